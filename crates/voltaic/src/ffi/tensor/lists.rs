//! Lists of tensors that stay with libtorch between calls, and optimizer kernels that work on them.

use std::ptr::{self, NonNull};

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::{check, pointers};
use crate::ffi::tensor::rng::take;

/// A number that is the same for all handles of one tensor, as long as one of them lives.
pub fn tensor_id(tensor: &Tensor) -> Result<usize, TorchError> {
    let mut id = 0;
    // SAFETY: the tensor is borrowed for the call; the out-pointer is a valid usize on this stack.
    check("tensor_id", unsafe { sys::vt_tensor_id(tensor.as_ptr().cast_mut(), &mut id) })?;
    Ok(id)
}

/// Whether the elements fill a block of memory without gaps or overlaps, which the fused kernels need.
pub fn is_dense(tensor: &Tensor) -> Result<bool, TorchError> {
    let mut dense = 0;
    // SAFETY: the tensor is borrowed for the call; the out-pointer is a valid i32 on this stack.
    check("is_dense", unsafe { sys::vt_tensor_is_dense(tensor.as_ptr().cast_mut(), &mut dense) })?;
    Ok(dense != 0)
}

/// What [`Gradients::collect`] found for a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct GradStatus(u8);

impl GradStatus {
    /// There is no gradient.
    pub const ABSENT: Self = Self(sys::VT_GRAD_ABSENT);
    /// The gradient is in the list.
    pub const PRESENT: Self = Self(sys::VT_GRAD_PRESENT);
    /// The gradient is sparse, complex, or of another dtype, device or shape than the parameter; bfloat16 and float16 are usable
    /// for a parameter of float32.
    pub const UNUSABLE: Self = Self(sys::VT_GRAD_UNUSABLE);
}

/// Handles of tensors, kept as the vector that libtorch's list operators take: passing it costs nothing.
#[derive(Debug)]
pub struct TensorList {
    raw: NonNull<sys::vt_list>,
}

// SAFETY: the list owns its handles; libtorch's reference counts are atomic, and tch's Tensor is Send on the same
// grounds.
unsafe impl Send for TensorList {}

impl TensorList {
    /// A list that shares `tensors`.
    pub fn new<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<Self, TorchError> {
        let tensors = pointers(tensors);
        let mut raw = ptr::null_mut();
        // SAFETY: the pointers belong to tensors borrowed for this call; the out-pointer is valid.
        check("list", unsafe { sys::vt_list_new(tensors.as_ptr(), tensors.len(), &mut raw) })?;
        Ok(Self::own(raw))
    }

    /// Takes ownership of a list that a shim function has just written to its out-pointer.
    fn own(raw: *mut sys::vt_list) -> Self {
        // SAFETY: callers pass what a successful shim call wrote: a pointer from operator new, which is never null.
        Self { raw: unsafe { NonNull::new_unchecked(raw) } }
    }

    /// A list of the entries `indices`, in that order.
    ///
    /// # Errors
    /// If an index is out of range.
    pub fn select(&self, indices: &[usize]) -> Result<Self, TorchError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the list and the indices are alive for the call; the out-pointer is valid.
        let error =
            unsafe { sys::vt_list_select(self.raw.as_ptr(), indices.as_ptr(), indices.len(), &mut raw) };
        check("list_select", error)?;
        Ok(Self::own(raw))
    }

    /// A list of copies of the tensors, laid out as they are.
    ///
    /// # Errors
    /// If memory is used up.
    pub fn copies(&self) -> Result<Self, TorchError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the list is alive for the call; the out-pointer is valid.
        check("list_copies", unsafe { sys::vt_list_copies(self.raw.as_ptr(), &mut raw) })?;
        Ok(Self::own(raw))
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut sys::vt_list {
        self.raw.as_ptr()
    }

    /// Number of tensors in the list.
    pub fn len(&self) -> usize {
        // SAFETY: the list is alive.
        unsafe { sys::vt_list_len(self.raw.as_ptr()) }
    }

    /// Whether there is no tensor in the list.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces the contents of `self` by the gradients of `params`, in order, without the absent ones.
    pub fn fill_with_grads(&mut self, params: &Self) -> Result<(), TorchError> {
        // SAFETY: both lists are alive, and distinct because one is borrowed mutably.
        check("grads", unsafe { sys::vt_list_grads(params.raw.as_ptr(), self.raw.as_ptr()) })
    }

    /// Replaces the contents of `self` by the gradients of `params`, an undefined tensor for an absent one, to be
    /// given back by [`TensorList::bind_grads`].
    pub fn fill_with_all_grads(&mut self, params: &Self) -> Result<(), TorchError> {
        // SAFETY: both lists are alive, and distinct because one is borrowed mutably.
        check("all_grads", unsafe { sys::vt_list_all_grads(params.raw.as_ptr(), self.raw.as_ptr()) })
    }

    /// Makes the tensors of `self` the gradients of `params`; with `carries_over` they take the values of those that
    /// they replace.
    pub fn bind_grads(&self, params: &Self, carries_over: bool) -> Result<(), TorchError> {
        // SAFETY: both lists are alive.
        let error =
            unsafe { sys::vt_list_bind_grads(params.raw.as_ptr(), self.raw.as_ptr(), carries_over.into()) };
        check("bind_grads", error)
    }

    /// Whether the tensors of `self`, as [`TensorList::fill_with_all_grads`] found them, are still the gradients of
    /// `params`.
    pub fn are_grads_of(&self, params: &Self) -> Result<bool, TorchError> {
        let mut are_grads = 0;
        // SAFETY: both lists are alive; the out-pointer is a valid i32 on this stack.
        let error = unsafe { sys::vt_list_are_grads(params.raw.as_ptr(), self.raw.as_ptr(), &mut are_grads) };
        check("are_grads", error)?;
        Ok(are_grads != 0)
    }

    /// Replaces gradients of bfloat16 and float16 of `float32` tensors in the list by copies in float32.
    pub fn widen_grads(&self) -> Result<(), TorchError> {
        // SAFETY: the list is alive and owns its tensors.
        check("widen_grads", unsafe { sys::vt_list_widen_grads(self.raw.as_ptr()) })
    }

    /// Empties the list.
    pub fn clear(&mut self) {
        // SAFETY: the list is alive and borrowed mutably.
        unsafe { sys::vt_list_clear(self.raw.as_ptr()) }
    }

    /// Replaces the tensors of another dtype by copies in float32.
    pub fn to_float(&mut self) -> Result<(), TorchError> {
        // SAFETY: the list is alive and borrowed mutably.
        check("to_float", unsafe { sys::vt_list_to_float(self.raw.as_ptr()) })
    }

    /// Copies each tensor of `from` into the one at its place in `self`, casting to its dtype.
    ///
    /// # Errors
    /// If the lists differ in number or shapes.
    pub fn copy_from(&self, from: &Self) -> Result<(), TorchError> {
        // SAFETY: both lists are alive for the call.
        check("_foreach_copy_", unsafe { sys::vt_foreach_copy(self.raw.as_ptr(), from.raw.as_ptr()) })
    }

    /// Drops the gradients of the tensors in the list.
    pub fn clear_grads(&self) -> Result<(), TorchError> {
        // SAFETY: the list is alive and owns its tensors.
        check("clear_grads", unsafe { sys::vt_list_clear_grads(self.raw.as_ptr()) })
    }
}

impl Drop for TensorList {
    fn drop(&mut self) {
        // SAFETY: `raw` came from vt_list_new and is freed here only.
        unsafe { sys::vt_list_free(self.raw.as_ptr()) }
    }
}

/// Parameters of which the gradients are collected before each update.
#[derive(Debug)]
pub struct Gradients {
    params: TensorList,
    grads: TensorList,
    status: Vec<GradStatus>,
    are_narrow: bool,
}

impl Gradients {
    /// For the gradients of `params`.
    pub fn of<'a>(params: impl IntoIterator<Item = &'a Tensor>) -> Result<Self, TorchError> {
        let params: Vec<&Tensor> = params.into_iter().collect();
        let status = vec![GradStatus::ABSENT; params.len()];
        let (params, grads) = (TensorList::new(params)?, TensorList::new([])?);
        Ok(Self { params, grads, status, are_narrow: false })
    }

    /// Reads the gradients as they are now, laid out as the parameters, for the next update: in their dtype, which may be one of 16
    /// bits for a parameter of float32.
    ///
    /// Gives the status of each parameter; the collected list holds those that are present, in order.
    pub fn collect(&mut self) -> Result<&[GradStatus], TorchError> {
        let mut are_narrow = 0;
        // SAFETY: both lists are alive and distinct; `status` has an entry for each of the `params`, whose number
        // never changes, and GradStatus is a transparent u8 of which the shim writes only the three known values;
        // `are_narrow` lies on this stack.
        let error = unsafe {
            sys::vt_list_grads_for_update(
                self.params.raw.as_ptr(),
                self.grads.raw.as_ptr(),
                self.status.as_mut_ptr().cast(),
                &mut are_narrow,
            )
        };
        check("grads_for_update", error)?;
        self.are_narrow = are_narrow != 0;
        Ok(&self.status)
    }

    /// The status that [`Gradients::collect`] found last.
    pub fn status(&self) -> &[GradStatus] {
        &self.status
    }

    /// Whether [`Gradients::collect`] found one of 16 bits of a parameter of float32.
    pub fn are_narrow(&self) -> bool {
        self.are_narrow
    }

    /// All parameters.
    pub fn params(&self) -> &TensorList {
        &self.params
    }

    /// The gradients that [`Gradients::collect`] found; an update empties the list.
    pub fn collected(&mut self) -> &mut TensorList {
        &mut self.grads
    }
}

pub(super) fn list_or_null(list: Option<&TensorList>) -> *const sys::vt_list {
    list.map_or(ptr::null(), |list| list.raw.as_ptr().cast_const())
}

/// The learning rate of one update.
#[derive(Debug, Clone, Copy)]
pub enum LearningRate<'a> {
    /// A constant of the call.
    Number(f64),
    /// What the kernel reads when it runs: a 0-dim `float64` tensor on the CPU.
    Tensor(&'a Tensor),
}

impl LearningRate<'_> {
    fn raw(self) -> (f64, sys::vt_tensor) {
        match self {
            Self::Number(lr) => (lr, ptr::null_mut()),
            Self::Tensor(lr) => (f64::NAN, lr.as_ptr().cast_mut()),
        }
    }
}

/// Numbers of one `torch._fused_sgd_` call.
#[derive(Debug, Clone, Copy)]
pub struct SgdOptions<'a> {
    /// Learning rate.
    pub lr: LearningRate<'a>,
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
}

impl SgdOptions<'_> {
    /// Updates `params` in place and empties `grads`.
    ///
    /// `momentum_buffers` is absent if momentum is 0. With `is_first_step` they are written before they are read.
    ///
    /// # Errors
    /// If the lists differ in number, shapes, strides, dtypes or devices.
    pub fn step(
        &self,
        params: &TensorList,
        grads: &mut TensorList,
        momentum_buffers: Option<&TensorList>,
        is_first_step: bool,
    ) -> Result<(), TorchError> {
        let (lr, lr_tensor) = self.lr.raw();
        let raw = sys::vt_sgd_options {
            lr,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            dampening: self.dampening,
            nesterov: self.nesterov.into(),
            maximize: self.maximize.into(),
            lr_tensor,
        };
        // SAFETY: the lists and the learning rate are alive for the call and the shim checks that they match each
        // other before the kernel walks their memory; `raw` lives on this stack.
        let error = unsafe {
            sys::vt_fused_sgd(
                params.raw.as_ptr(),
                grads.raw.as_ptr(),
                list_or_null(momentum_buffers),
                &raw,
                is_first_step.into(),
            )
        };
        check("_fused_sgd_", error)
    }
}

/// Numbers of one `torch._fused_adam_` or `_fused_adamw_` call.
#[derive(Debug, Clone, Copy)]
pub struct AdamOptions<'a> {
    /// Learning rate.
    pub lr: LearningRate<'a>,
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

/// What Adam keeps for a list of parameters; all lists have an entry for each.
#[derive(Debug)]
pub struct AdamLists {
    /// Parameters, updated in place.
    pub params: TensorList,
    /// First moments.
    pub exp_avgs: TensorList,
    /// Second moments.
    pub exp_avg_sqs: TensorList,
    /// Maxima of the second moments, with amsgrad only.
    pub max_exp_avg_sqs: Option<TensorList>,
    /// Counts of the updates done: `float32` scalars.
    pub steps: TensorList,
    /// A tensor whose elements are exactly `steps`, so that they are counted up in one operation.
    pub all_steps: Tensor,
}

impl AdamLists {
    /// Counts the steps up, updates parameters and moments in place, and empties `grads`.
    ///
    /// # Errors
    /// If the lists differ in number, shapes, strides, dtypes or devices.
    pub fn step(&self, grads: &mut TensorList, options: &AdamOptions<'_>) -> Result<(), TorchError> {
        let (lr, lr_tensor) = options.lr.raw();
        let raw = sys::vt_adam_options {
            lr,
            beta1: options.betas.0,
            beta2: options.betas.1,
            eps: options.eps,
            weight_decay: options.weight_decay,
            amsgrad: options.amsgrad.into(),
            maximize: options.maximize.into(),
            decoupled: options.decoupled.into(),
            lr_tensor,
        };
        let state = sys::vt_adam_state {
            exp_avgs: self.exp_avgs.raw.as_ptr(),
            exp_avg_sqs: self.exp_avg_sqs.raw.as_ptr(),
            max_exp_avg_sqs: list_or_null(self.max_exp_avg_sqs.as_ref()),
            steps: self.steps.raw.as_ptr(),
            all_steps: self.all_steps.as_ptr().cast_mut(),
        };
        // SAFETY: the lists and the learning rate are alive for the call and the shim checks that they match each
        // other before the kernel walks their memory; `raw` and `state` live on this stack; a null grad_scale and found_inf mean
        // that there is no gradient scaler.
        let error = unsafe {
            sys::vt_fused_adam(
                self.params.raw.as_ptr(),
                grads.raw.as_ptr(),
                &state,
                &raw,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        check(if options.decoupled { "_fused_adamw_" } else { "_fused_adam_" }, error)
    }
}

/// Multiplies each tensor by the scalar tensor `by`, in place, without reading `by` back to the host.
pub fn foreach_mul_tensor(list: &TensorList, by: &Tensor) -> Result<(), TorchError> {
    // SAFETY: the list and the tensor are alive for the call.
    check("_foreach_mul_", unsafe { sys::vt_foreach_mul_tensor(list.raw.as_ptr(), by.as_ptr().cast_mut()) })
}

/// Limits each element to `[min, max]`, in place.
pub fn foreach_clamp(list: &TensorList, min: f64, max: f64) -> Result<(), TorchError> {
    // SAFETY: the list is alive for the call.
    check("_foreach_clamp_", unsafe { sys::vt_foreach_clamp(list.raw.as_ptr(), min, max) })
}

/// The `p`-norm of each tensor, stacked: shape `[number of tensors]`, on the tensors' device.
///
/// # Errors
/// If the list is empty.
pub fn foreach_norm(list: &TensorList, p: f64) -> Result<Tensor, TorchError> {
    let mut norms = ptr::null_mut();
    // SAFETY: the list is alive for the call; the out-pointer is valid.
    check("_foreach_norm", unsafe { sys::vt_foreach_norm(list.raw.as_ptr(), p, &mut norms) })?;
    Ok(take(norms))
}
