//! `Metric`: a member of the tree that accumulates tensors over batches, behind a lock.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::error::{ModuleError, Result};
use crate::ffi;

/// A value over all batches since the last reset.
///
/// Your own metric keeps a [`MetricState`], to which its `update` adds, and computes its value from it. Clones share
/// their state.
///
/// ```
/// use voltaic::metrics::{Metric, MetricState, Reduction};
/// use voltaic::{Kind, Module, Result, Tensor};
///
/// /// Largest value seen in a batch, on average.
/// #[derive(Debug, Clone, Module)]
/// #[module(metric)]
/// struct MeanMax {
///     state: MetricState,
/// }
///
/// impl MeanMax {
///     fn new() -> Self {
///         let parts = &[("sum", Reduction::Sum), ("batches", Reduction::Sum)];
///         Self { state: MetricState::new("MeanMax", parts) }
///     }
///
///     fn update(&self, values: &Tensor) -> Result<()> {
///         self.state.add(vec![values.f_max()?, Tensor::from(1.0_f32)])
///     }
/// }
///
/// impl Metric for MeanMax {
///     fn state(&self) -> &MetricState {
///         &self.state
///     }
///
///     fn value(&self, parts: &[Tensor]) -> Result<Tensor> {
///         Ok(parts[0].f_div(&parts[1])?)
///     }
/// }
///
/// # fn main() -> anyhow::Result<()> {
/// let metric = MeanMax::new();
/// metric.update(&Tensor::from_slice(&[1.0_f32, 3.0]))?;
/// metric.update(&Tensor::from_slice(&[5.0_f32, 4.0]))?;
/// assert_eq!(metric.compute()?.double_value(&[]), 4.0);
/// # Ok(()) }
/// ```
pub trait Metric: Debug + Send + Sync {
    /// What has been accumulated.
    fn state(&self) -> &MetricState;

    /// The value of accumulated tensors, in the order of the state's parts; on their device.
    ///
    /// # Errors
    /// If libtorch refuses them.
    fn value(&self, parts: &[Tensor]) -> Result<Tensor>;

    /// The value of all batches; on the device of the inputs.
    ///
    /// # Errors
    /// If nothing has been accumulated yet.
    fn compute(&self) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        self.value(&self.state().tensors()?)
    }

    /// The value of the last batch alone.
    ///
    /// # Errors
    /// If nothing has been accumulated yet.
    fn compute_last(&self) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        self.value(&self.state().last_tensors()?)
    }

    /// Forgets all batches.
    fn reset(&self) {
        self.state().reset();
    }

    /// Adds the state of another metric of the same settings, such as that of another process: its `state().named()`.
    ///
    /// # Errors
    /// If the tensors do not fit.
    fn merge(&self, state: &[(String, Tensor)]) -> Result<()> {
        self.state().merge(state)
    }
}

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
    /// By part. Parts that are concatenated have a tensor for each batch until all are read.
    all: Vec<Vec<Tensor>>,
    /// Those of the last batch.
    last: Vec<Tensor>,
    /// Grows with each change.
    version: u64,
}

impl Accumulated {
    /// One tensor for each part.
    fn joined(&mut self) -> Result<Vec<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        for chunks in self.all.iter_mut().filter(|chunks| chunks.len() > 1) {
            *chunks = vec![Tensor::f_cat(chunks, 0)?];
        }
        Ok(self.all.iter().flatten().map(Tensor::shallow_clone).collect())
    }
}

/// A copy of what is to be put after what is there, and can be: others may change theirs, or keep more than is needed.
fn chunk(new: &Tensor, after: Option<&Tensor>) -> Result<Option<Tensor>> {
    let fits = after.is_none_or(|old| old.kind() == new.kind() && old.size()[1..] == new.size()[1..]);
    if new.dim() == 0 || !fits {
        return Ok(None);
    }
    let device = after.map_or_else(|| new.device(), Tensor::device);
    let mut copy = Tensor::f_empty(new.size(), (new.kind(), device))?;
    copy.f_copy_(new)?;
    Ok(Some(copy))
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
            return Err(refuse_shape(self.metric, &[batch.len() as i64], expected));
        }
        let mut tensors = self.lock();
        let is_first = tensors.all.is_empty();
        let mut added = Vec::with_capacity(batch.len());
        for (index, ((name, reduction), new)) in self.parts.iter().zip(batch).enumerate() {
            let old = tensors.all.get(index).and_then(|chunks| chunks.first());
            added.push(match (reduction, old) {
                (Reduction::Sum, None) => new,
                (Reduction::Sum, Some(old)) => old.f_add(&new.f_to_device(old.device())?)?,
                (Reduction::Cat, old) => match chunk(&new, old)? {
                    Some(chunk) => chunk,
                    None => {
                        let shape = old.map(Tensor::size).unwrap_or_default();
                        let expected =
                            format!("{name} has to have dimensions that go after those of {shape:?}");
                        return Err(refuse_shape(self.metric, &new.size(), expected));
                    }
                },
            });
        }
        if is_first {
            tensors.all = self.parts.iter().map(|_| Vec::new()).collect();
        }
        for (((_, reduction), chunks), new) in self.parts.iter().zip(&mut tensors.all).zip(added) {
            if *reduction == Reduction::Sum {
                chunks.clear();
            }
            chunks.push(new);
        }
        tensors.version += 1;
        Ok(())
    }

    /// The tensors of all batches, in the order of the parts.
    ///
    /// # Errors
    /// If there are none yet.
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        let all = self.lock().joined()?;
        self.some(all)
    }

    /// Those of the last batch.
    fn last_tensors(&self) -> Result<Vec<Tensor>> {
        self.some(shared(&self.lock().last))
    }

    fn some(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        if tensors.is_empty() {
            return Err(refuse_shape(self.metric, &[0], "update has to be called before compute"));
        }
        Ok(tensors)
    }

    /// Forgets all batches.
    pub fn reset(&self) {
        let mut tensors = self.lock();
        *tensors = Accumulated { version: tensors.version + 1, ..Accumulated::default() };
    }

    /// The tensors of all batches with their names; none before the first.
    ///
    /// # Errors
    /// If there is no memory to put them together.
    pub fn named(&self) -> Result<Vec<(String, Tensor)>> {
        let all = self.lock().joined()?;
        Ok(self.parts.iter().map(|(name, _)| (*name).to_owned()).zip(all).collect())
    }

    /// A number that changes with the state.
    pub(crate) fn version(&self) -> u64 {
        self.lock().version
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

    /// Identifies the state; clones have the same.
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

/// The error of a batch that a metric cannot take.
pub(crate) fn refuse_shape(metric: &'static str, shape: &[i64], expected: impl Into<String>) -> crate::Error {
    ModuleError::Shape { layer: metric.to_owned(), shape: shape.to_vec(), expected: expected.into() }.into()
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    const PARTS: &[(&str, Reduction)] = &[("scores", Reduction::Cat), ("count", Reduction::Sum)];

    fn scores(from: i64, to: i64) -> Tensor {
        Tensor::arange_start(from, to, (Kind::Float, tch::Device::Cpu))
    }

    #[test]
    fn batches_are_put_together_when_somebody_asks() {
        let state = MetricState::new("Test", PARTS);
        for batch in 0..5 {
            state.add(vec![scores(2 * batch, 2 * batch + 2), Tensor::from(1.0_f32)]).unwrap();
        }
        let chunks: Vec<usize> = state.lock().all.iter().map(Vec::len).collect();
        assert_eq!(chunks, [5, 1], "no batch is copied again for each that follows");
        assert_eq!(state.tensors().unwrap(), [scores(0, 10), Tensor::from(5.0_f32)]);
        state.add(vec![scores(10, 13), Tensor::from(1.0_f32)]).unwrap();
        assert_eq!(state.named().unwrap()[0].1, scores(0, 13));
        assert_eq!(state.last_tensors().unwrap()[0], scores(10, 13));
        state.reset();
        assert!(state.tensors().is_err() && state.named().unwrap().is_empty());
    }

    #[test]
    fn a_batch_that_does_not_fit_is_refused_and_changes_nothing() {
        let state = MetricState::new("Test", PARTS);
        let one = || Tensor::from(1.0_f32);
        assert!(state.add(vec![one(), one()]).is_err(), "a scalar goes after nothing");
        state.add(vec![scores(0, 4).reshape([2, 2]), one()]).unwrap();
        let version = state.version();
        for wrong in
            [scores(0, 2), scores(0, 3).reshape([1, 3]), scores(0, 2).to_kind(Kind::Int64).reshape([1, 2])]
        {
            assert!(state.add(vec![wrong, one()]).is_err());
        }
        assert_eq!((state.version(), state.tensors().unwrap()[1].double_value(&[])), (version, 1.0));
    }

    #[test]
    fn what_is_changed_afterwards_does_not_change_the_state() {
        let state = MetricState::new("Test", PARTS);
        let mut batch = scores(1, 3);
        state.add(vec![batch.shallow_clone(), Tensor::from(1.0_f32)]).unwrap();
        let _ = batch.fill_(9.0);
        assert_eq!(state.tensors().unwrap()[0], scores(1, 3));
    }
}
