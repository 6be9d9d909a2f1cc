//! Optimizer kernels that work on lists of tensors.

use std::ptr;

use tch::Tensor;
use voltaic_sys as sys;

use super::{check, pointers, rng::take};
use crate::error::TorchError;

fn or_null(tensor: Option<&Tensor>) -> sys::vt_tensor {
    tensor.map_or(ptr::null_mut(), |tensor| tensor.as_ptr().cast_mut())
}

/// Pointer to a list, or null for an empty one, which is how the shim spells "absent".
fn list_or_null(list: &[sys::vt_tensor]) -> *const sys::vt_tensor {
    if list.is_empty() { ptr::null() } else { list.as_ptr() }
}

/// Numbers of one `torch._fused_sgd_` call.
#[derive(Debug, Clone, Copy)]
pub struct FusedSgd {
    /// Learning rate.
    pub lr: f64,
    /// L2 penalty.
    pub weight_decay: f64,
    /// Momentum factor.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
    /// The momentum buffers hold nothing yet.
    pub is_first_step: bool,
}

impl FusedSgd {
    /// Updates `params` in place. `momentum_buffers` is empty if momentum is 0.
    pub fn step(
        &self,
        params: &[Tensor],
        grads: &[Tensor],
        momentum_buffers: &[Tensor],
    ) -> Result<(), TorchError> {
        debug_assert_eq!(params.len(), grads.len());
        debug_assert!(momentum_buffers.is_empty() || momentum_buffers.len() == params.len());
        let (params, grads, buffers) = (pointers(params), pointers(grads), pointers(momentum_buffers));
        // SAFETY: all lists have params.len() entries (or are null), and their tensors are borrowed for the call.
        let error = unsafe {
            sys::vt_fused_sgd(
                params.as_ptr(),
                grads.as_ptr(),
                list_or_null(&buffers),
                params.len(),
                self.lr,
                self.weight_decay,
                self.momentum,
                self.dampening,
                self.nesterov.into(),
                self.maximize.into(),
                self.is_first_step.into(),
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        check("_fused_sgd_", error)
    }
}

/// Numbers of one `torch._fused_adam_` or `_fused_adamw_` call.
#[derive(Debug, Clone, Copy)]
pub struct AdamOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the two moment estimates.
    pub betas: (f64, f64),
    /// Term added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Keep the maximum of the second moments.
    pub amsgrad: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
    /// AdamW: decay the weights themselves instead of adding to the gradient.
    pub decoupled: bool,
}

/// The lists of one Adam update; all have the same length, except `max_exp_avg_sqs`, empty unless amsgrad.
#[derive(Debug, Clone, Copy)]
pub struct FusedAdam<'a> {
    /// Parameters, updated in place.
    pub params: &'a [Tensor],
    /// Their gradients.
    pub grads: &'a [Tensor],
    /// First moments.
    pub exp_avgs: &'a [Tensor],
    /// Second moments.
    pub exp_avg_sqs: &'a [Tensor],
    /// Maxima of the second moments.
    pub max_exp_avg_sqs: &'a [Tensor],
    /// Step counts including this step: `float32` scalars.
    pub steps: &'a [Tensor],
    /// Divides the gradients (set by a grad scaler).
    pub grad_scale: Option<&'a Tensor>,
    /// Non-zero skips the update (set by a grad scaler).
    pub found_inf: Option<&'a Tensor>,
}

impl FusedAdam<'_> {
    /// Updates the parameters and the moments in place.
    pub fn step(&self, options: &AdamOptions) -> Result<(), TorchError> {
        let len = self.params.len();
        debug_assert!(
            [self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps].iter().all(|l| l.len() == len)
        );
        debug_assert_eq!(self.max_exp_avg_sqs.len(), if options.amsgrad { len } else { 0 });
        let raw = sys::vt_adam_options {
            lr: options.lr,
            beta1: options.betas.0,
            beta2: options.betas.1,
            eps: options.eps,
            weight_decay: options.weight_decay,
            amsgrad: options.amsgrad.into(),
            maximize: options.maximize.into(),
            decoupled: options.decoupled.into(),
        };
        let (params, grads, steps) = (pointers(self.params), pointers(self.grads), pointers(self.steps));
        let (exp_avgs, exp_avg_sqs) = (pointers(self.exp_avgs), pointers(self.exp_avg_sqs));
        let max_exp_avg_sqs = pointers(self.max_exp_avg_sqs);
        // SAFETY: all lists have `len` entries (or are null), their tensors are borrowed for the call, and `raw`
        // lives on this stack.
        let error = unsafe {
            sys::vt_fused_adam(
                params.as_ptr(),
                grads.as_ptr(),
                exp_avgs.as_ptr(),
                exp_avg_sqs.as_ptr(),
                list_or_null(&max_exp_avg_sqs),
                steps.as_ptr(),
                len,
                &raw,
                or_null(self.grad_scale),
                or_null(self.found_inf),
            )
        };
        check(if options.decoupled { "_fused_adamw_" } else { "_fused_adam_" }, error)
    }
}

/// Adds `value` to each tensor, in place.
pub fn foreach_add_scalar(tensors: &[Tensor], value: f64) -> Result<(), TorchError> {
    let tensors = pointers(tensors);
    // SAFETY: the pointers belong to tensors borrowed for this call.
    check("_foreach_add_", unsafe { sys::vt_foreach_add_scalar(tensors.as_ptr(), tensors.len(), value) })
}

/// Multiplies each tensor by the scalar tensor `by`, in place, without reading `by` back to the host.
pub fn foreach_mul_tensor(tensors: &[Tensor], by: &Tensor) -> Result<(), TorchError> {
    let tensors = pointers(tensors);
    // SAFETY: all pointers belong to tensors borrowed for this call.
    check("_foreach_mul_", unsafe {
        sys::vt_foreach_mul_tensor(tensors.as_ptr(), tensors.len(), by.as_ptr().cast_mut())
    })
}

/// Limits each element to `[min, max]`, in place.
pub fn foreach_clamp(tensors: &[Tensor], min: f64, max: f64) -> Result<(), TorchError> {
    let tensors = pointers(tensors);
    // SAFETY: the pointers belong to tensors borrowed for this call.
    check("_foreach_clamp_", unsafe { sys::vt_foreach_clamp(tensors.as_ptr(), tensors.len(), min, max) })
}

/// The `p`-norm of each tensor, stacked: shape `[tensors.len()]`, on the tensors' device.
pub fn foreach_norm(tensors: &[Tensor], p: f64) -> Result<Tensor, TorchError> {
    let tensors = pointers(tensors);
    let mut norms = ptr::null_mut();
    // SAFETY: the pointers belong to tensors borrowed for this call; the out-pointer is valid.
    check("_foreach_norm", unsafe { sys::vt_foreach_norm(tensors.as_ptr(), tensors.len(), p, &mut norms) })?;
    Ok(take(norms))
}
