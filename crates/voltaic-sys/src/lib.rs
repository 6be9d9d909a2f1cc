//! Raw declarations of voltaic's C++ shim, in the order of `csrc/voltaic.h`, which documents ownership, threads
//! and errors. No policy and no safe API: those are in `voltaic::ffi`.

#![allow(missing_docs)] // each item is documented in csrc/voltaic.h
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};

pub use torch_sys::C_tensor;

/// A borrowed or owned `at::Tensor`, the object torch-sys calls `C_tensor`.
pub type vt_tensor = *mut C_tensor;

#[repr(C)]
pub struct vt_error {
    _opaque: [u8; 0],
}

pub const VT_ERROR_OTHER: i32 = 0;
pub const VT_ERROR_OUT_OF_MEMORY: i32 = 1;
pub const VT_ERROR_INDEX: i32 = 2;
pub const VT_ERROR_NOT_IMPLEMENTED: i32 = 3;

pub const VT_CPU: i32 = 0;
pub const VT_CUDA: i32 = 1;
pub const VT_HPU: i32 = 15;

#[repr(C)]
pub struct vt_adam_options {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub amsgrad: i32,
    pub maximize: i32,
    pub decoupled: i32,
}

#[repr(C)]
pub struct vt_allocator {
    pub allocate: extern "C" fn(bytes: usize) -> *mut c_void,
    pub release: extern "C" fn(block: *mut c_void),
    pub explain: extern "C" fn(bytes: usize, text: *mut c_char, capacity: usize),
}

unsafe extern "C" {
    pub fn vt_error_kind_of(error: *const vt_error) -> i32;
    pub fn vt_error_message(error: *const vt_error) -> *const c_char;
    pub fn vt_error_free(error: *mut vt_error);

    pub fn vt_tensor_device(
        tensor: vt_tensor,
        device_type: *mut i32,
        device_index: *mut i32,
    ) -> *mut vt_error;
    pub fn vt_libtorch_version() -> *const c_char;
    pub fn vt_dtype_number(name: *const c_char) -> i32;

    pub fn vt_autograd_set_multithreading(enabled: i32) -> *mut vt_error;
    pub fn vt_autograd_is_multithreading(enabled: *mut i32) -> *mut vt_error;
    pub fn vt_grads_clear(tensors: *const vt_tensor, len: usize) -> *mut vt_error;
    pub fn vt_post_accumulate_grad_hook(
        tensor: vt_tensor,
        hook: extern "C" fn(data: *mut c_void) -> i32,
        data: *mut c_void,
        release: extern "C" fn(data: *mut c_void),
    ) -> *mut vt_error;
    pub fn vt_clear_post_accumulate_grad_hooks(tensor: vt_tensor) -> *mut vt_error;

    pub fn vt_fused_sgd(
        params: *const vt_tensor,
        grads: *const vt_tensor,
        momentum_buffers: *const vt_tensor,
        len: usize,
        lr: f64,
        weight_decay: f64,
        momentum: f64,
        dampening: f64,
        nesterov: i32,
        maximize: i32,
        is_first_step: i32,
        grad_scale: vt_tensor,
        found_inf: vt_tensor,
    ) -> *mut vt_error;
    pub fn vt_fused_adam(
        params: *const vt_tensor,
        grads: *const vt_tensor,
        exp_avgs: *const vt_tensor,
        exp_avg_sqs: *const vt_tensor,
        max_exp_avg_sqs: *const vt_tensor,
        steps: *const vt_tensor,
        len: usize,
        options: *const vt_adam_options,
        grad_scale: vt_tensor,
        found_inf: vt_tensor,
    ) -> *mut vt_error;
    pub fn vt_foreach_add_scalar(tensors: *const vt_tensor, len: usize, value: f64) -> *mut vt_error;
    pub fn vt_foreach_mul_tensor(tensors: *const vt_tensor, len: usize, by: vt_tensor) -> *mut vt_error;
    pub fn vt_foreach_clamp(tensors: *const vt_tensor, len: usize, min: f64, max: f64) -> *mut vt_error;
    pub fn vt_foreach_norm(
        tensors: *const vt_tensor,
        len: usize,
        p: f64,
        norms: *mut vt_tensor,
    ) -> *mut vt_error;

    pub fn vt_manual_seed(seed: u64) -> *mut vt_error;
    pub fn vt_rng_get_state(device_type: i32, device_index: i32, state: *mut vt_tensor) -> *mut vt_error;
    pub fn vt_rng_set_state(device_type: i32, device_index: i32, state: vt_tensor) -> *mut vt_error;
    pub fn vt_randperm(len: i64, seed: u64, permutation: *mut vt_tensor) -> *mut vt_error;

    pub fn vt_set_cpu_allocator(allocator: *const vt_allocator) -> *mut vt_error;
}
