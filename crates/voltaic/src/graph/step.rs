//! Capture of a training step that somebody else runs: recorded, compared with the one before, made ready.

use std::borrow::Borrow;

use tch::Tensor;

use super::capture::{self, Segment, read};
use super::ir::Graph;
use super::plan::PlanStats;
use crate::error::{GraphError, Result};
use crate::ffi::Recording;

/// A capture in progress; abandoned when dropped.
#[derive(Debug)]
#[must_use = "the capture is abandoned when this is dropped; call end()"]
pub(crate) struct StepCapture {
    is_over: bool,
}

impl StepCapture {
    pub(crate) fn begin() -> Result<Self> {
        capture::begin()?;
        Ok(Self { is_over: false })
    }

    pub(crate) fn end(mut self) -> Result<CapturedStep> {
        self.is_over = true;
        Ok(CapturedStep { recordings: capture::end()? })
    }
}

impl Drop for StepCapture {
    fn drop(&mut self) {
        if !self.is_over {
            drop(capture::end());
        }
    }
}

/// What was captured, one recording for each part between two `mark_step`s.
#[derive(Debug)]
pub(crate) struct CapturedStep {
    recordings: Vec<Recording>,
}

impl CapturedStep {
    /// The operators; an error if they cannot be replayed.
    pub(crate) fn read(&self, names: &[(String, Tensor)]) -> Result<Box<[Graph]>> {
        let graphs = self.graphs(names)?;
        match graphs.iter().find_map(Graph::problem) {
            Some(problem) => Err(problem.into()),
            None => Ok(graphs),
        }
    }

    /// The operators, whether they can be replayed or not.
    pub(crate) fn graphs(&self, names: &[(String, Tensor)]) -> Result<Box<[Graph]>> {
        self.recordings.iter().map(|recording| read(recording, names)).collect()
    }

    /// Makes it ready; `inputs` are the placeholders that replays are given others for.
    pub(crate) fn compile(self, names: &[(String, Tensor)], inputs: &[Tensor]) -> Result<StepGraph> {
        let compile = |recording| Segment::compile(recording, names, inputs);
        Ok(StepGraph { segments: self.recordings.into_iter().map(compile).collect::<Result<_>>()? })
    }
}

/// A step that can be replayed with other batches.
#[derive(Debug)]
pub(crate) struct StepGraph {
    segments: Vec<Segment>,
}

impl StepGraph {
    pub(crate) fn replay(&mut self, inputs: &[Tensor]) -> Result<()> {
        self.segments.iter_mut().try_for_each(|segment| segment.replay(Some(inputs)))
    }

    pub(crate) fn plan_stats(&self) -> impl Iterator<Item = PlanStats> {
        self.segments.iter().map(|segment| segment.stats)
    }
}

/// Whether two captures of the same code are the same graph, so that one can stand for all that follow.
pub(crate) fn check_same(before: &[Graph], now: &[Graph]) -> Result<()> {
    let difference = if before.len() == now.len() {
        before.iter().zip(now).find_map(|(before, now)| before.difference(now))
    } else {
        Some(format!("there were {} parts and are {}", before.len(), now.len()))
    };
    let Some(difference) = difference else { return Ok(()) };
    Err(GraphError::NotStatic { difference }.into())
}

/// A tensor of its own, contiguous, with the values of another.
pub(crate) fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = Tensor::f_empty(tensor.size(), (tensor.kind(), tensor.device()))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Copies each tensor to its place.
pub(crate) fn fill<T: Borrow<Tensor>>(places: &[Tensor], tensors: &[T]) -> Result<()> {
    for (place, tensor) in places.iter().zip(tensors) {
        place.f_detach()?.f_copy_(&tensor.borrow().f_detach()?)?;
    }
    Ok(())
}
