//! The collectives where a divided layer begins and ends. Each is a function of autograd whose gradient is the opposite one.

use std::sync::Arc;

use tch::Tensor;

use super::shard::Division;
use crate::distributed::{ProcessGroup, ReduceOp};
use crate::error::Result;
use crate::ffi;

/// Where activations are the same on all ranks, so are their gradients: no other function of this file may be used there.
fn begin() {
    if ffi::is_recording() {
        ffi::refuse_recording(
            "a layer is divided among the ranks of tensor parallelism, and a replay would not exchange its results; run without graphs",
        );
    }
}

/// Gives `output`, which was computed without a history, the gradient `backward`, if one is needed.
fn with_gradient(
    input: &Tensor,
    output: Tensor,
    mut backward: impl FnMut(&Tensor) -> Result<Tensor> + Send + 'static,
) -> Result<Tensor> {
    if input.requires_grad() && ffi::grad_is_enabled() {
        let backward = move |grads: &[Tensor]| {
            let grad = grads.first().filter(|grad| grad.defined());
            Ok(vec![grad.map(&mut backward).transpose()?])
        };
        ffi::autograd_function([input], std::slice::from_ref(&output), backward)?;
    }
    Ok(output)
}

/// The sum over the ranks, in a new tensor.
fn sum(group: &ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = tensor.f_new_empty(tensor.size(), (tensor.f_kind()?, tensor.device()))?;
    copy.f_copy_(tensor)?;
    group.all_reduce(&copy, ReduceOp::Sum)?;
    Ok(copy)
}

/// What all ranks have, for a layer of which each computes a part: the gradients are summed.
pub(crate) fn copy_to_group(group: &Arc<ProcessGroup>, input: &Tensor) -> Result<Tensor> {
    begin();
    let ranks = group.clone();
    with_gradient(input, input.f_detach()?, move |grad| sum(&ranks, grad))
}

/// The sum of what the ranks have computed, in the memory of `partial`.
pub(crate) fn sum_over_group(group: &Arc<ProcessGroup>, partial: &Tensor) -> Result<Tensor> {
    begin();
    // the product is a new tensor that nothing else refers to
    let total = partial.f_detach()?.f_contiguous()?;
    group.all_reduce(&total, ReduceOp::Sum)?;
    with_gradient(partial, total, |grad| Ok(grad.shallow_clone()))
}

/// The last dimension, of which each rank has its slice.
pub(crate) fn gather_from_group(
    group: &Arc<ProcessGroup>,
    division: &Division,
    local: &Tensor,
) -> Result<Tensor> {
    begin();
    let whole = division.gather(group, local, local.dim() as i64 - 1)?;
    let (division, rank) = (division.clone(), group.rank());
    with_gradient(local, whole, move |grad| division.slice(grad, grad.dim() as i64 - 1, rank))
}

/// This rank's slice of the last dimension of what all ranks have.
pub(crate) fn slice_for_group(
    group: &Arc<ProcessGroup>,
    division: &Division,
    whole: &Tensor,
) -> Result<Tensor> {
    begin();
    let slice = {
        let _no_grad = tch::no_grad_guard();
        division.slice(&whole.f_detach()?, whole.dim() as i64 - 1, group.rank())?.f_contiguous()?
    };
    let (division, ranks) = (division.clone(), group.clone());
    with_gradient(whole, slice, move |grad| division.gather(&ranks, grad, grad.dim() as i64 - 1))
}
