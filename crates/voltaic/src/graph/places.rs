//! Static inputs and outputs: tensors at fixed places, which a graph reads and writes.

use std::borrow::Borrow;
use std::ops::Range;

use tch::Tensor;

use crate::error::{GraphError, Problem, Result};
use crate::ffi;

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

/// What tells whether code writes to a tensor.
#[derive(Debug)]
pub(super) struct Mark {
    /// None of a tensor that was made in inference mode.
    version: Option<i64>,
    /// Where autograd takes its gradient.
    edge: (usize, u32),
}

impl Mark {
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        Ok(Self { version: tensor.f_internal_version().ok(), edge: ffi::gradient_edge(tensor)? })
    }

    /// Whether the tensor has been written to since; none if nothing tells.
    pub(super) fn is_written(&self, tensor: &Tensor) -> Option<bool> {
        Some(tensor.f_internal_version().ok()? != self.version?)
    }

    /// Whether such a write is part of what has gradients.
    pub(super) fn has_new_history(&self, tensor: &Tensor) -> Result<bool> {
        Ok(ffi::gradient_edge(tensor)? != self.edge)
    }
}

/// Writes to an input of a call what the call has written to a copy of it; with a history if that is part of what has gradients.
pub(super) fn write_back(copy: &Tensor, input: &Tensor, has_history: bool) -> Result<()> {
    let _no_grad = (!has_history).then(tch::no_grad_guard);
    input.shallow_clone().f_copy_(copy)?;
    Ok(())
}

/// The memory from the first to the last element of a tensor.
fn memory_of(tensor: &Tensor) -> Range<usize> {
    let start = tensor.data_ptr().addr();
    let last: i64 = tensor.size().iter().zip(tensor.stride()).map(|(n, by)| (n - 1).max(0) * by).sum();
    let elements = if tensor.numel() == 0 { 0 } else { 1 + last as usize };
    start..start + elements * tensor.kind().elt_size_in_bytes()
}

/// Whether one of the tensors lies within the memory of one of the places.
pub(crate) fn any_within<'a>(tensors: impl IntoIterator<Item = &'a Tensor>, places: &[Tensor]) -> bool {
    let places: Vec<_> = places.iter().map(memory_of).collect();
    tensors.into_iter().any(|tensor| places.iter().any(|place| place.contains(&tensor.data_ptr().addr())))
}

/// Whether a tensor's memory overlaps that of another one.
pub(super) fn share_memory(tensors: &[Tensor]) -> bool {
    let mut memory: Vec<_> = tensors.iter().map(memory_of).filter(|memory| !memory.is_empty()).collect();
    memory.sort_unstable_by_key(|memory| memory.start);
    memory.windows(2).any(|pair| pair[1].start < pair[0].end)
}

/// Tensors with their names: `prefix`, a blank and a number. Names of weights have no blanks.
pub(crate) fn numbered(prefix: &str, tensors: &[Tensor]) -> impl Iterator<Item = (String, Tensor)> {
    tensors
        .iter()
        .enumerate()
        .map(move |(index, tensor)| (format!("{prefix} {index}"), tensor.shallow_clone()))
}

/// Whether a tensor of a call is a `None`.
pub(super) fn any_missing(tensors: &[Tensor]) -> bool {
    tensors.iter().any(|tensor| !tensor.defined())
}

/// That a graph has no place for a `None`.
pub(super) fn missing(what: &str) -> GraphError {
    let what = format!("{what} is missing, and a graph has a place for each tensor");
    GraphError::Arguments { problem: Problem::new(what, "leave such calls out of graphs") }
}

/// Refuses tensors that cannot take the places of those that were captured.
pub(super) fn check_inputs(captured: &[Tensor], given: &[&Tensor]) -> Result<()> {
    if captured.len() != given.len() {
        let what =
            format!("{} inputs are given to a graph that was captured with {}", given.len(), captured.len());
        return Err(GraphError::Arguments { problem: Problem::new(what, "give one for each") }.into());
    }
    for (index, (captured, given)) in captured.iter().zip(given).enumerate() {
        let is_alike = captured.kind() == given.kind()
            && captured.device() == given.device()
            && captured.size() == given.size();
        if !is_alike {
            return Err(GraphError::InputMismatch {
                index,
                given: describe(given),
                captured: describe(captured),
            }
            .into());
        }
    }
    Ok(())
}

/// Dtype, shape and device, such as `Float[8, 64] on Cpu`.
pub(super) fn describe(tensor: &Tensor) -> String {
    format!("{:?}{:?} on {:?}", tensor.kind(), tensor.size(), tensor.device())
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
