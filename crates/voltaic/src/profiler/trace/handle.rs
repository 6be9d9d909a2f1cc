//! A profiler that a program holds too: one and the same is given to the module and to the trainer.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::tracer::{TraceOptions, Tracer};
use crate::error::Result;
use crate::profiler::profiler::{ProfiledRun, Profiler};

/// A profiler that records the operators of a few steps, with settings of type `C`: a
/// [`PyTorchProfiler`](super::super::PyTorchProfiler) or an [`HpuProfiler`](super::super::HpuProfiler).
///
/// It is a handle: a clone of it records ranges of your own wherever the module keeps it.
#[derive(Debug)]
pub struct TraceProfiler<C> {
    handle: Handle,
    config: PhantomData<fn() -> C>,
}

/// The shared tracer behind a profiler and its clones.
#[derive(Debug, Clone)]
struct Handle(Arc<Mutex<Tracer>>);

/// A range of your own; it ends when this goes out of scope.
#[derive(Debug)]
#[must_use = "the range ends when its guard goes out of scope"]
pub struct ProfiledRange {
    handle: Handle,
    name: String,
    /// It ends on the thread on which it began.
    not_send: PhantomData<*const ()>,
}

impl Handle {
    fn lock(&self) -> MutexGuard<'_, Tracer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C> Clone for TraceProfiler<C> {
    fn clone(&self) -> Self {
        Self { handle: self.handle.clone(), config: PhantomData }
    }
}

impl<C> TraceProfiler<C> {
    pub(in crate::profiler) fn recording(options: TraceOptions) -> Self {
        let handle = Handle(Arc::new(Mutex::new(Tracer::new(options))));
        Self { handle, config: PhantomData }
    }

    /// A range of this name, which ends when the guard goes out of scope; ranges are nested.
    ///
    /// # Errors
    /// [`ProfilerError`](crate::error::ProfilerError) if one of this name is running on this thread.
    pub fn profile(&self, name: &str) -> Result<ProfiledRange> {
        self.start(name)?;
        let (handle, name) = (self.handle.clone(), name.to_owned());
        Ok(ProfiledRange { handle, name, not_send: PhantomData })
    }

    /// Begins a range of this name, which [`TraceProfiler::stop`] ends on the same thread.
    ///
    /// # Errors
    /// [`ProfilerError`](crate::error::ProfilerError) if one of this name is running on this thread.
    pub fn start(&self, name: &str) -> Result<()> {
        self.handle.lock().start(name)
    }

    /// Ends a range.
    ///
    /// # Errors
    /// [`ProfilerError`](crate::error::ProfilerError) if none of this name is running on this thread.
    pub fn stop(&self, name: &str) -> Result<()> {
        self.handle.lock().stop(name)
    }

    /// The traces that were written, the oldest first.
    pub fn traces(&self) -> Vec<PathBuf> {
        self.handle.lock().traces().to_vec()
    }

    /// Calls this with the path of each trace once it is written (`on_trace_ready` of torch).
    #[must_use]
    pub fn on_trace_ready(self, call: impl FnMut(&Path) + Send + 'static) -> Self {
        self.handle.lock().on_trace_ready(call);
        self
    }
}

impl<C: 'static> Profiler for TraceProfiler<C> {
    fn setup(&mut self, run: &ProfiledRun) -> Result<()> {
        self.handle.lock().setup(run)
    }

    fn records_modules(&self) -> bool {
        self.handle.lock().records_modules()
    }

    fn start(&mut self, action: &str) -> Result<()> {
        self.handle.lock().start(action)
    }

    fn stop(&mut self, action: &str) -> Result<()> {
        self.handle.lock().stop(action)
    }

    fn summary(&self) -> String {
        self.handle.lock().summary()
    }

    fn describe(&mut self) -> Result<()> {
        self.handle.lock().describe()
    }
}

impl Drop for ProfiledRange {
    fn drop(&mut self) {
        if let Err(error) = self.handle.lock().stop(&self.name) {
            tracing::warn!("the profiler could not end {}: {error}", self.name);
        }
    }
}
