//! A profiler that a program holds too: one and the same is given to the module and to the trainer.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::tracer::Tracer;
use crate::error::Result;

/// The shared tracer behind a profiler and its clones.
#[derive(Debug, Clone)]
pub(in crate::profiler) struct Handle(Arc<Mutex<Tracer>>);

/// A range of your own; it ends when this goes out of scope.
#[derive(Debug)]
#[must_use = "the range ends when its guard goes out of scope"]
pub struct ProfiledRange {
    handle: Handle,
    name: String,
    /// It ends on the thread on which it began.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Handle {
    pub fn new(tracer: Tracer) -> Self {
        Self(Arc::new(Mutex::new(tracer)))
    }

    pub fn lock(&self) -> MutexGuard<'_, Tracer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn profile(&self, name: &str) -> Result<ProfiledRange> {
        self.lock().start(name)?;
        Ok(ProfiledRange { handle: self.clone(), name: name.to_owned(), not_send: std::marker::PhantomData })
    }

    pub fn traces(&self) -> Vec<PathBuf> {
        self.lock().traces().to_vec()
    }
}

impl Drop for ProfiledRange {
    fn drop(&mut self) {
        if let Err(error) = self.handle.lock().stop(&self.name) {
            tracing::warn!("the profiler could not end {}: {error}", self.name);
        }
    }
}
