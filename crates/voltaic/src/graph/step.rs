//! Capture of a training step that somebody else runs: recorded, compared with the one before, made ready.

use std::borrow::Borrow;

use tch::Tensor;

use super::capture::{self, Segment, compile_all, read_all};
use super::ir::Graph;
use super::plan::PlanStats;
use crate::error::{GraphError, Result};
use crate::ffi::{Recording, ReplayStats};

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
    pub(crate) fn read(&self, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        self.read_with(None, names)
    }

    /// The operators of this capture, then those of one that goes on from it; an error if they cannot be replayed.
    pub(super) fn read_with(&self, later: Option<&Self>, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        let graphs = self.graphs_with(later, names)?;
        match graphs.iter().find_map(Graph::problem) {
            Some(problem) => Err(problem.into()),
            None => Ok(graphs),
        }
    }

    /// The operators, whether they can be replayed or not.
    pub(crate) fn graphs(&self, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        self.graphs_with(None, names)
    }

    fn graphs_with(&self, later: Option<&Self>, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        let later = later.iter().flat_map(|later| &later.recordings);
        read_all(&self.recordings.iter().chain(later).collect::<Vec<_>>(), names)
    }

    /// Refuses what the code keeps for itself of the tensors that it makes: a replay would not give it new ones. `known` are those
    /// that it is meant to leave behind.
    ///
    /// # Errors
    /// [`GraphError::NotCapturable`].
    pub(super) fn check_kept<'a>(
        recordings: impl IntoIterator<Item = &'a Recording>,
        graphs: &[Graph],
        known: &[&Tensor],
    ) -> Result<()> {
        for (recording, graph) in recordings.into_iter().zip(graphs) {
            let known = known.iter().map(|tensor| recording.buffer_of(tensor));
            let known = known.collect::<Result<Vec<_>, _>>()?;
            if let Some(problem) = graph.kept_problem(|buffer| known.contains(&Some(buffer))) {
                return Err(problem.into());
            }
        }
        Ok(())
    }

    /// The recordings of its parts.
    pub(super) fn recordings(&self) -> &[Recording] {
        &self.recordings
    }

    /// As [`CapturedStep::check_kept`], of a step with these graphs.
    pub(crate) fn check_kept_of_step(&self, graphs: &[Graph], known: &[&Tensor]) -> Result<()> {
        Self::check_kept(&self.recordings, graphs, known)
    }

    /// Number of parts between two `mark_step`s.
    pub(super) fn num_parts(&self) -> usize {
        self.recordings.len()
    }

    /// Keeps what a later capture is compared with.
    pub(crate) fn into_seen(mut self, graphs: Vec<Graph>) -> SeenStep {
        self.recordings.iter_mut().for_each(Recording::forget_results);
        SeenStep { graphs, _recordings: self.recordings }
    }

    /// Makes it ready, with what [`CapturedStep::graphs`] gave; `inputs` are the placeholders that replays are given
    /// others for.
    pub(crate) fn compile(self, graphs: Vec<Graph>, inputs: &[Tensor]) -> Result<StepGraph> {
        Ok(self.compile_giving(graphs, inputs, &[])?.0)
    }

    /// The same; each replay makes new ones of the `outputs` for which this returns true, and keeps nothing of them.
    pub(super) fn compile_giving(
        self,
        graphs: Vec<Graph>,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<(StepGraph, Vec<bool>)> {
        let (segments, given_away) = compile_all(self.recordings, graphs, inputs, outputs)?;
        Ok((StepGraph { segments }, given_away))
    }
}

/// A capture of a step, to be compared with the next one.
#[derive(Debug)]
pub(crate) struct SeenStep {
    graphs: Vec<Graph>,
    /// They hold the tensors that were there before: where one of those lies no other can lie meanwhile, so that the same
    /// address is the same tensor.
    _recordings: Vec<Recording>,
}

impl SeenStep {
    /// Whether another capture of the same code is the same graph, so that one can stand for all that follow.
    ///
    /// # Errors
    /// [`GraphError::NotStatic`].
    pub(crate) fn check_same(&self, now: &[Graph]) -> Result<()> {
        check_same(&self.graphs, now)
    }
}

/// A step that can be replayed with other batches.
#[derive(Debug)]
pub(crate) struct StepGraph {
    segments: Vec<Segment>,
}

impl StepGraph {
    /// Runs the kernels once more, with `inputs` in place of the placeholders or on what those hold. Gives the outputs
    /// that it was compiled to give away.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], [`GraphError::ShapeChanged`].
    pub(crate) fn replay(&mut self, inputs: Option<&[Tensor]>) -> Result<Vec<Tensor>> {
        let mut given = Vec::new();
        for segment in &mut self.segments {
            given.extend(segment.replay(inputs)?);
        }
        Ok(given)
    }

    pub(crate) fn plan_stats(&self) -> impl Iterator<Item = PlanStats> {
        self.segments.iter().map(|segment| segment.stats)
    }

    pub(super) fn graphs(&self) -> impl Iterator<Item = &Graph> {
        self.segments.iter().map(|segment| &*segment.graph)
    }

    pub(super) fn replay_stats(&self) -> impl Iterator<Item = ReplayStats> {
        self.segments.iter().map(Segment::replay_stats)
    }

    /// Whether a replay writes to a tensor of a name that begins so.
    pub(super) fn writes_to_named(&self, prefix: &str) -> bool {
        self.graphs().any(|graph| graph.writes_to_named(prefix))
    }
}

/// Tensors with their names: `prefix`, a blank and a number. Names of weights have no blanks.
pub(crate) fn numbered(prefix: &str, tensors: &[Tensor]) -> impl Iterator<Item = (String, Tensor)> {
    tensors
        .iter()
        .enumerate()
        .map(move |(index, tensor)| (format!("{prefix} {index}"), tensor.shallow_clone()))
}

/// Whether two captures of the same code are the same graph. What was there before the first one must still be held, or
/// other tensors may lie where it was.
pub(super) fn check_same<'a>(
    before: impl IntoIterator<Item = &'a Graph>,
    now: impl IntoIterator<Item = &'a Graph>,
) -> Result<()> {
    let (before, now): (Vec<_>, Vec<_>) = (before.into_iter().collect(), now.into_iter().collect());
    let difference = if before.len() == now.len() {
        before.iter().zip(&now).find_map(|(before, now)| before.difference(now))
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

/// A tensor of its own with the values of another, laid out as that is unless elements of it share memory.
pub(super) fn copy_like(tensor: &Tensor) -> Result<Tensor> {
    let stride = tensor.stride();
    if shares_elements(tensor) || stride.contains(&0) {
        return copy_of(tensor);
    }
    let _no_grad = tch::no_grad_guard();
    let mut copy = Tensor::f_empty_strided(tensor.size(), &stride, (tensor.kind(), tensor.device()))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// A tensor of its own that lies in its memory as another one does, with its values: a kernel may do its work otherwise
/// on another layout. None if elements share memory otherwise than by a dimension that was expanded.
pub(crate) fn placeholder_for(tensor: &Tensor) -> Result<Option<Tensor>> {
    if shares_elements(tensor) {
        return Ok(None);
    }
    let (size, stride) = (tensor.size(), tensor.stride());
    let Some(first) = stride.iter().position(|by| *by == 0) else { return copy_like(tensor).map(Some) };
    let _no_grad = tch::no_grad_guard();
    let mut once = tensor.f_detach()?;
    for dim in (first..size.len()).filter(|dim| stride[*dim] == 0) {
        once = once.f_narrow(dim as i64, 0, size[dim].min(1))?;
    }
    let mut place = Tensor::f_empty_strided(once.size(), &stride, (once.kind(), once.device()))?;
    place.f_copy_(&once)?;
    Ok(Some(place.f_expand(size, false)?))
}

/// Whether elements of a tensor share memory otherwise than by a dimension that was expanded.
pub(crate) fn shares_elements(tensor: &Tensor) -> bool {
    overlaps(&tensor.size(), &tensor.stride())
}

/// Whether two elements of a tensor of these strides may share memory, in dimensions that were not expanded.
fn overlaps(size: &[i64], stride: &[i64]) -> bool {
    let dims = size.iter().zip(stride).filter(|(n, by)| **n > 1 && **by != 0);
    let mut dims: Vec<(i64, i64)> = dims.map(|(n, by)| (*by, *n)).collect();
    dims.sort_unstable();
    let mut extent = 0; // of the dimensions so far, up to the last element
    dims.into_iter().any(|(by, n)| {
        let is_within = by <= extent;
        extent += by * (n - 1);
        is_within
    })
}

/// Copies each tensor to its place. One that was expanded is copied once.
pub(crate) fn fill<T: Borrow<Tensor>>(places: &[Tensor], tensors: &[T]) -> Result<()> {
    for (place, tensor) in places.iter().zip(tensors) {
        let (mut place, mut tensor) = (place.f_detach()?, tensor.borrow().f_detach()?);
        for dim in 0..place.dim() {
            if place.stride()[dim] == 0 && place.size()[dim] > 1 {
                (place, tensor) = (place.f_narrow(dim as i64, 0, 1)?, tensor.f_narrow(dim as i64, 0, 1)?);
            }
        }
        place.f_copy_(&tensor)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::overlaps;

    #[test]
    fn elements_that_share_memory_are_found() {
        assert!(!overlaps(&[4, 3], &[3, 1]) && !overlaps(&[4, 3], &[1, 4]), "dense");
        assert!(!overlaps(&[4, 3], &[8, 2]) && !overlaps(&[], &[]), "with gaps");
        assert!(!overlaps(&[4, 3], &[0, 1]) && !overlaps(&[1, 3], &[1, 1]), "expanded, or of one row");
        assert!(overlaps(&[4, 3], &[1, 1]) && overlaps(&[4, 3], &[2, 1]), "windows that overlap");
    }
}
