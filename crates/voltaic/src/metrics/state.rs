//! Accumulated tensors behind a lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use crate::error::{ModuleError, Result};
use crate::ffi;

/// How the tensors of two batches become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// They are added up.
    Sum,
    /// They are put one after the other along dimension 0.
    Cat,
}

/// What a metric has accumulated since its last reset: tensors by name. Clones share it; a step has `&self`, so it is
/// behind a lock.
#[derive(Debug, Clone)]
pub struct MetricState {
    metric: &'static str,
    parts: &'static [(&'static str, Reduction)],
    tensors: Arc<Mutex<Accumulated>>,
}

#[derive(Debug, Default)]
struct Accumulated {
    all: Vec<Tensor>,
    /// Those of the last batch.
    last: Vec<Tensor>,
}

fn shared(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

impl MetricState {
    /// Of no batches yet; `metric` is what errors call it.
    pub fn new(metric: &'static str, parts: &'static [(&'static str, Reduction)]) -> Self {
        Self { metric, parts, tensors: Arc::default() }
    }

    /// Adds the tensors of a batch, in the order of the parts. They must not be changed afterwards.
    ///
    /// # Errors
    /// If they do not fit those that are there.
    pub fn add(&self, batch: Vec<Tensor>) -> Result<()> {
        // a replay would not run this
        ffi::refuse_recording("the step updates a metric, whose state is kept outside the graph");
        let last = shared(&batch);
        self.append(batch)?;
        self.lock().last = last;
        Ok(())
    }

    fn append(&self, batch: Vec<Tensor>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        if batch.len() != self.parts.len() {
            let names: Vec<&str> = self.parts.iter().map(|(name, _)| *name).collect();
            let expected = format!("a state of {} is needed", names.join(", "));
            return Err(refuse(self.metric, &[batch.len() as i64], expected));
        }
        let mut tensors = self.lock();
        if tensors.all.is_empty() {
            tensors.all = batch;
            return Ok(());
        }
        let mut sums = Vec::with_capacity(batch.len());
        for (((_, reduction), old), new) in self.parts.iter().zip(&tensors.all).zip(&batch) {
            let new = new.f_to_device(old.device())?;
            sums.push(match reduction {
                Reduction::Sum => old.f_add(&new)?,
                Reduction::Cat => Tensor::f_cat(&[old, &new], 0)?,
            });
        }
        tensors.all = sums;
        Ok(())
    }

    /// The tensors of all batches, in the order of the parts.
    ///
    /// # Errors
    /// If there are none yet.
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        self.some(shared(&self.lock().all))
    }

    /// Those of the last batch.
    pub(super) fn last_tensors(&self) -> Result<Vec<Tensor>> {
        self.some(shared(&self.lock().last))
    }

    fn some(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        if tensors.is_empty() {
            return Err(refuse(self.metric, &[0], "update has to be called before compute"));
        }
        Ok(tensors)
    }

    /// Forgets all batches.
    pub fn reset(&self) {
        *self.lock() = Accumulated::default();
    }

    /// The tensors of all batches with their names; none before the first.
    pub fn named(&self) -> Vec<(String, Tensor)> {
        let all = shared(&self.lock().all);
        self.parts.iter().map(|(name, _)| (*name).to_owned()).zip(all).collect()
    }

    /// Adds tensors by name.
    ///
    /// # Errors
    /// If one is missing or does not fit.
    pub fn merge(&self, saved: &[(String, Tensor)]) -> Result<()> {
        if saved.is_empty() {
            return Ok(());
        }
        let find = |(name, _): &(&str, Reduction)| saved.iter().find(|(other, _)| other == name);
        self.append(self.parts.iter().filter_map(find).map(|(_, tensor)| tensor.shallow_clone()).collect())
    }

    /// Takes tensors by name in place of its own.
    pub(crate) fn restore(&self, saved: &[(String, Tensor)]) -> Result<()> {
        self.reset();
        self.merge(saved)
    }

    /// What tells states apart: the same for clones.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.tensors).addr()
    }

    /// Another one of these parts, of no batches.
    pub(crate) fn empty(&self) -> Self {
        Self::new(self.metric, self.parts)
    }

    fn lock(&self) -> MutexGuard<'_, Accumulated> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn refuse(metric: &'static str, shape: &[i64], expected: impl Into<String>) -> crate::Error {
    ModuleError::Shape { layer: metric.to_owned(), shape: shape.to_vec(), expected: expected.into() }.into()
}

/// `a / b`, and 0 where `b` is 0.
pub(super) fn safe_divide(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (a.f_to_kind(Kind::Float)?, b.f_to_kind(Kind::Float)?);
    let is_zero = b.f_eq(0.0)?;
    Ok(a.f_div(&b.f_masked_fill(&is_zero, 1.0)?)?.f_masked_fill(&is_zero, 0.0)?)
}
