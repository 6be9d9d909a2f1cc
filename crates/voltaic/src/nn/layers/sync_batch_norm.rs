//! Batch normalisation over the batches of all ranks.

use std::cell::RefCell;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::distributed::ProcessGroup;
use crate::error::Result;

thread_local! {
    static RANKS: RefCell<Option<Arc<ProcessGroup>>> = const { RefCell::new(None) };
}

/// While this lives, batch normalisation in training mode on this thread takes mean and variance over the batches of all
/// ranks, as layers converted by `torch.nn.SyncBatchNorm` do. The trainer's `sync_batchnorm` is this.
///
/// # Collective
/// All ranks must run forward and backward of the same layers meanwhile.
#[must_use = "it ends when it is dropped"]
#[derive(Debug)]
pub struct SyncBatchNorm {
    before: Option<Arc<ProcessGroup>>,
}

impl SyncBatchNorm {
    /// Starts it for the ranks of a group.
    pub fn over(group: Arc<ProcessGroup>) -> Self {
        Self { before: RANKS.replace(Some(group)) }
    }
}

impl Drop for SyncBatchNorm {
    fn drop(&mut self) {
        RANKS.set(self.before.take());
    }
}

/// The ranks to normalise over, if there are several.
pub(super) fn ranks() -> Option<Arc<ProcessGroup>> {
    RANKS.with_borrow(|group| group.clone().filter(|group| group.world_size() > 1))
}

/// `input`, `[batch, channels, ..]`, normalised by channel over all ranks, before scale and shift; with the mean, and the
/// unbiased variance, of each channel.
pub(super) fn normalise(input: &Tensor, eps: f64, group: &ProcessGroup) -> Result<(Tensor, Tensor, Tensor)> {
    let x = input.f_to_kind(if input.kind() == Kind::Double { Kind::Double } else { Kind::Float })?;
    let channels = x.size()[1];
    let others: Vec<i64> = (0..x.dim() as i64).filter(|&dim| dim != 1).collect();
    let shape: Vec<i64> = (0..x.dim()).map(|dim| if dim == 1 { channels } else { 1 }).collect();
    let sum = |values: &Tensor| values.f_sum_dim_intlist(&others[..], false, x.kind());
    let count = x.f_new_full([1_i64], (x.numel() as i64 / channels) as f64, (x.kind(), x.device()))?;
    let sums = group.differentiable_sum(&Tensor::f_cat(&[sum(&x)?, count], 0)?)?;
    let total = sums.f_narrow(0, channels, 1)?.f_detach()?;
    let mean = sums.f_narrow(0, 0, channels)?.f_div(&total)?;
    let centred = x.f_sub(&mean.f_view(&shape[..])?)?;
    // two sums rather than that of squares alone, which would cancel where the mean is large
    let squares = group.differentiable_sum(&sum(&centred.f_square()?)?)?;
    let scale = squares.f_div(&total)?.f_add_scalar(eps)?.f_rsqrt()?;
    let output = centred.f_mul(&scale.f_view(&shape[..])?)?.f_to_kind(input.kind())?;
    let unbiased = squares.f_detach()?.f_div(&total.f_sub_scalar(1.0)?)?;
    Ok((output, mean.f_detach()?, unbiased))
}
