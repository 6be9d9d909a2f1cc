//! Kernels of the CPU that are written in Rust, as `csrc/kernels/abi.h` describes them.

use std::ffi::{c_char, c_void};

use crate::vt_tensor;

pub const VT_FLOAT32: i32 = 0;
pub const VT_BFLOAT16: i32 = 1;
pub const VT_FLOAT16: i32 = 2;

pub const VT_OUTPUT: i32 = 1;
pub const VT_INPUT_GRAD: i32 = 2;
pub const VT_WEIGHT_GRAD: i32 = 4;

#[repr(C)]
pub struct vt_product {
    pub batches: i64,
    pub rows: i64,
    pub columns: i64,
    pub depth: i64,
    pub out: *mut c_void,
    pub a: *const c_void,
    pub b: *const c_void,
    pub out_strides: [i64; 3],
    pub a_strides: [i64; 3],
    pub b_strides: [i64; 3],
    pub adds: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct vt_rows {
    pub data: *mut c_void,
    pub strides: [i64; 3],
}

#[repr(C)]
pub struct vt_attention {
    pub dtype: i32,
    pub is_causal: i32,
    pub scale: f64,
    pub batches: i64,
    pub heads: i64,
    pub queries: i64,
    pub keys: i64,
    pub dim: i64,
    pub query: vt_rows,
    pub key: vt_rows,
    pub value: vt_rows,
    pub out: vt_rows,
    pub grad_out: vt_rows,
    pub grad_query: vt_rows,
    pub grad_key: vt_rows,
    pub grad_value: vt_rows,
    pub log_sum_exp: vt_rows,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct vt_cached_rows {
    pub rows: *mut c_void,
    pub strides: [i64; 2],
    pub cache: *mut c_void,
    pub bytes: i32,
    pub format: i32,
    pub dim: i64,
    pub scale: f32,
}

#[repr(C)]
pub struct vt_cached_attention {
    pub dtype: i32,
    pub scale: f32,
    pub batches: i64,
    pub heads: i64,
    pub capacity: i64,
    pub slot: i64,
    pub positions: *const i64,
    pub query: *mut c_void,
    pub strides: [i64; 2],
    pub out: *mut c_void,
    pub keys: vt_cached_rows,
    pub values: vt_cached_rows,
}

#[repr(C)]
pub struct vt_cached_tensors {
    pub query: vt_tensor,
    pub key: vt_tensor,
    pub value: vt_tensor,
    pub keys: vt_tensor,
    pub values: vt_tensor,
    pub slot: vt_tensor,
    pub positions: vt_tensor,
    pub key_scale_inv: vt_tensor,
    pub value_scale_inv: vt_tensor,
}

pub const VT_ADAM: i32 = 0;
pub const VT_SGD: i32 = 1;
pub const VT_ADAGRAD: i32 = 2;
pub const VT_LION: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct vt_update_rule {
    pub kind: i32,
    pub lr: f64,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub lr_decay: f64,
    pub decoupled: i32,
    pub amsgrad: i32,
    pub nesterov: i32,
    pub maximize: i32,
    pub is_first_step: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct vt_numbers {
    pub data: *mut c_void,
    pub dtype: i32,
}

#[repr(C)]
pub struct vt_update {
    pub len: i64,
    pub weights: vt_numbers,
    pub grad: vt_numbers,
    pub states: [vt_numbers; 3],
    pub rounded: vt_numbers,
    pub step: f64,
}

#[repr(C)]
pub struct vt_mt19937 {
    pub left: i32,
    pub next: u32,
    pub words: *mut u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vt_chain_step {
    pub op: i32,
    pub a: i32,
    pub b: i32,
    pub number: f32,
}

#[repr(C)]
pub struct vt_chain_tensor {
    pub data: *mut c_void,
    pub period: i64,
    pub dtype: i32,
    pub from: i32,
}

#[repr(C)]
pub struct vt_chain_call {
    pub steps: *const vt_chain_step,
    pub num_steps: usize,
    pub inputs: *const vt_chain_tensor,
    pub num_inputs: usize,
    pub outputs: *const vt_chain_tensor,
    pub num_outputs: usize,
    pub len: i64,
    pub row: i64,
}

#[repr(C)]
pub struct vt_convolution {
    pub dtype: i32,
    pub is_channels_last: i32,
    pub images: i64,
    pub in_channels: i64,
    pub out_channels: i64,
    pub in_size: [i64; 2],
    pub out_size: [i64; 2],
    pub kernel: [i64; 2],
    pub stride: [i64; 2],
    pub padding: [i64; 2],
}

#[repr(C)]
pub struct vt_max_pool {
    pub dtype: i32,
    pub images: i64,
    pub height: i64,
    pub width: i64,
    pub channels: i64,
}

#[repr(C)]
pub struct vt_batch_norm {
    pub dtype: i32,
    pub pixels: i64,
    pub channels: i64,
    pub momentum: f64,
    pub eps: f64,
    pub input: *const c_void,
    pub weight: *const f32,
    pub bias: *const f32,
    pub running_mean: *mut f32,
    pub running_var: *mut f32,
    pub mean: *mut f32,
    pub invstd: *mut f32,
}

pub const VT_KERNEL_FAILED: i32 = -1;
pub const VT_KERNEL_DECLINED: i32 = 0;
pub const VT_KERNEL_DONE: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct vt_kernels {
    pub failure: Option<extern "C" fn(text: *mut c_char, len: usize) -> i32>,
    pub product: Option<extern "C" fn(product: *const vt_product) -> i32>,
    pub product_bf16: Option<extern "C" fn(product: *const vt_product) -> i32>,
    pub gelu: Option<
        extern "C" fn(dtype: i32, is_tanh: i32, input: *const c_void, output: *mut c_void, len: i64) -> i32,
    >,
    pub gelu_backward: Option<
        extern "C" fn(
            dtype: i32,
            is_tanh: i32,
            grad: *const c_void,
            input: *const c_void,
            output: *mut c_void,
            len: i64,
        ) -> i32,
    >,
    pub max_pool2d: Option<
        extern "C" fn(
            pool: *const vt_max_pool,
            input: *const c_void,
            output: *mut c_void,
            indices: *mut i64,
        ) -> i32,
    >,
    pub max_pool2d_backward: Option<
        extern "C" fn(
            pool: *const vt_max_pool,
            grad: *const c_void,
            indices: *const i64,
            output: *mut c_void,
        ) -> i32,
    >,
    pub relu_bf16: Option<extern "C" fn(input: *const c_void, output: *mut c_void, len: i64) -> i32>,
    pub relu_backward_bf16: Option<
        extern "C" fn(grad: *const c_void, result: *const c_void, output: *mut c_void, len: i64) -> i32,
    >,
    pub add_bf16: Option<
        extern "C" fn(dtype: i32, a: *const c_void, b: *const c_void, output: *mut c_void, len: i64) -> i32,
    >,
    pub convert:
        Option<extern "C" fn(dtype: i32, input: *const c_void, output: *mut c_void, len: i64) -> i32>,
    pub bernoulli: Option<
        extern "C" fn(dtype: i32, generator: *mut vt_mt19937, p: f64, output: *mut c_void, len: i64) -> i32,
    >,
    pub attention: Option<extern "C" fn(attention: *const vt_attention) -> i32>,
    pub attention_backward: Option<extern "C" fn(attention: *const vt_attention) -> i32>,
    pub attend_cached: Option<extern "C" fn(attention: *const vt_cached_attention) -> i32>,
    pub convolves_by_taps: Option<extern "C" fn(convolution: *const vt_convolution) -> i32>,
    pub convolves: Option<extern "C" fn(convolution: *const vt_convolution) -> i32>,
    pub convolution: Option<
        extern "C" fn(
            convolution: *const vt_convolution,
            input: *const c_void,
            weight: *const c_void,
            bias: *const c_void,
            output: *mut c_void,
        ) -> i32,
    >,
    pub convolution_input_grad: Option<
        extern "C" fn(
            convolution: *const vt_convolution,
            grad: *const c_void,
            weight: *const c_void,
            output: *mut c_void,
        ) -> i32,
    >,
    pub convolution_weight_grad: Option<
        extern "C" fn(
            convolution: *const vt_convolution,
            grad: *const c_void,
            input: *const c_void,
            output: *mut c_void,
        ) -> i32,
    >,
    pub batch_norm: Option<extern "C" fn(norm: *const vt_batch_norm, output: *mut c_void) -> i32>,
    pub batch_norm_backward: Option<
        extern "C" fn(
            norm: *const vt_batch_norm,
            grad: *const c_void,
            output: *mut c_void,
            grad_weight: *mut f32,
            grad_bias: *mut f32,
        ) -> i32,
    >,
    pub update:
        Option<extern "C" fn(rule: *const vt_update_rule, updates: *const vt_update, len: usize) -> i32>,
    pub chain: Option<extern "C" fn(chain: *const vt_chain_call) -> i32>,
}

pub const VT_E4M3: i32 = 0;
pub const VT_E5M2: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct vt_float8_kernels {
    pub failure: extern "C" fn(text: *mut c_char, len: usize) -> i32,
    pub cast: extern "C" fn(
        dtype: i32,
        input: *const c_void,
        len: i64,
        format: i32,
        scale: f32,
        seed: *const u64,
        output: *mut c_void,
        amax: *mut f32,
    ) -> i32,
    pub largest: extern "C" fn(dtype: i32, input: *const c_void, len: i64, amax: *mut f32) -> i32,
    pub widen: extern "C" fn(
        format: i32,
        input: *const c_void,
        len: i64,
        scale: f32,
        dtype: i32,
        output: *mut c_void,
    ) -> i32,
    pub new_scale: extern "C" fn(amax: f32, before: f32, format: i32, margin: i32, scale: *mut f32) -> i32,
    pub rows: extern "C" fn(
        input: *const f32,
        rows: i64,
        codes: *const c_void,
        columns: i64,
        depth: i64,
        format: i32,
        output: *mut f32,
        is_known: *mut i32,
    ) -> i32,
    pub product: extern "C" fn(product: *const vt_product) -> i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct vt_fp8_meta {
    pub scale: vt_tensor,
    pub scale_inv: vt_tensor,
    pub amax_history: vt_tensor,
    pub amax_history_index: vt_tensor,
}
