//! Raw declarations of voltaic's C++ shim: `csrc/voltaic.h`, which documents ownership, threads and errors, and the `abi.h` of
//! each room, which documents its functions.
//! No policy and no safe API: those are in `voltaic::ffi`.

#![allow(missing_docs)] // each item is documented in csrc
#![allow(non_camel_case_types)]

mod kernels;
mod profiler;

use std::ffi::{c_char, c_void};

pub use kernels::*;
pub use profiler::*;
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

#[repr(C)]
pub struct vt_store {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_group {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_work {
    _opaque: [u8; 0],
}

pub const VT_COLLECTIVE_ID_BYTES: usize = 4096;

/// Is told of a cast of autocast: operator, position of the argument, numbers of both dtypes.
pub type vt_cast_report = extern "C" fn(op: *const c_char, argument: usize, from: i32, to: i32);

/// A function that C++ calls with the type of its vendor's header.
pub type vt_function = Option<unsafe extern "C" fn()>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct vt_collective_library {
    pub name: *const c_char,
    pub has_average: i32,
    pub get_unique_id: vt_function,
    pub init_rank: vt_function,
    pub all_reduce: vt_function,
    pub broadcast: vt_function,
    pub all_gather: vt_function,
    pub reduce_scatter: vt_function,
    pub reduce: vt_function,
    pub send: vt_function,
    pub recv: vt_function,
    pub group_start: vt_function,
    pub group_end: vt_function,
    pub async_error: vt_function,
    pub abort: vt_function,
    pub destroy: vt_function,
    pub error_text: vt_function,
    pub device_malloc: vt_function,
    pub device_free: vt_function,
    pub host_malloc: vt_function,
    pub host_free: vt_function,
    pub copy: vt_function,
    pub stream_create: vt_function,
    pub stream_query: vt_function,
}

pub const VT_REDUCE_SUM: i32 = 0;
pub const VT_REDUCE_AVG: i32 = 1;
pub const VT_REDUCE_MIN: i32 = 2;
pub const VT_REDUCE_MAX: i32 = 3;
pub const VT_REDUCE_PRODUCT: i32 = 4;

pub const VT_CPU: i32 = 0;
pub const VT_CUDA: i32 = 1;
pub const VT_HPU: i32 = 15;

pub const VT_TCH_HPU: usize = 64;

pub const VT_AUTOCAST_LOWER: u8 = 0;
pub const VT_AUTOCAST_LOWER_FIRST: u8 = 1;
pub const VT_AUTOCAST_FP32: u8 = 2;
pub const VT_AUTOCAST_PROMOTE: u8 = 3;

pub const VT_GRAD_ABSENT: u8 = 0;
pub const VT_GRAD_PRESENT: u8 = 1;
pub const VT_GRAD_UNUSABLE: u8 = 2;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct vt_backend_memory_stats {
    pub total: u64,
    pub free: u64,
    pub in_use: u64,
    pub max_in_use: u64,
    pub num_allocs: u64,
    pub num_frees: u64,
}

#[repr(C)]
pub struct vt_cuda_graph {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_recompute_callbacks {
    pub recompute: extern "C" fn(
        data: *mut c_void,
        inputs: *const vt_tensor,
        len: usize,
        text: *mut c_char,
        capacity: usize,
    ) -> i32,
    pub release: extern "C" fn(data: *mut c_void),
    pub data: *mut c_void,
}

#[repr(C)]
pub struct vt_offload {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_save_policy {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_segment {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_autograd_callbacks {
    pub backward: extern "C" fn(
        data: *mut c_void,
        grad_outputs: *const vt_tensor,
        grad_inputs: *mut vt_tensor,
        text: *mut c_char,
        capacity: usize,
    ) -> i32,
    pub release: extern "C" fn(data: *mut c_void),
    pub data: *mut c_void,
}

#[repr(C)]
pub struct vt_list {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_sgd_options {
    pub lr: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub nesterov: i32,
    pub maximize: i32,
    pub lr_tensor: vt_tensor,
}

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
    pub lr_tensor: vt_tensor,
}

#[repr(C)]
pub struct vt_adam_state {
    pub exp_avgs: *const vt_list,
    pub exp_avg_sqs: *const vt_list,
    pub max_exp_avg_sqs: *const vt_list,
    pub steps: *const vt_list,
    pub all_steps: vt_tensor,
}

pub const VT_HOST_POOL: i32 = 0;
pub const VT_HPU_MAX_DEVICES: usize = 8;
pub const VT_BLOCK_HEADER_BYTES: usize = 64;
pub const VT_BLOCK_MAGIC: u32 = 0x76A1_7A1C;

#[repr(C)]
pub struct vt_block_header {
    pub twin: *mut c_void,
    pub pool: i32,
    pub magic: u32,
}

#[repr(C)]
pub struct vt_allocator {
    pub allocate: extern "C" fn(pool: i32, bytes: usize) -> *mut c_void,
    pub release: extern "C" fn(block: *mut c_void),
    pub explain: extern "C" fn(pool: i32, bytes: usize, text: *mut c_char, capacity: usize),
}

#[repr(C)]
pub struct vt_hpu_options {
    pub num_devices: i32,
    pub dtypes: u64,
    pub explain_dtype: extern "C" fn(dtype: i32, text: *mut c_char, capacity: usize),
}

#[repr(C)]
pub struct vt_recording {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct vt_graph {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct vt_graph_stats {
    pub replays: u64,
    pub moved_results: u64,
    pub pool_blocks: u64,
}

pub const VT_GRAPH_NOWHERE: u64 = u64::MAX;
pub const VT_GRAPH_FROZEN: u8 = 2;

#[repr(C)]
pub struct vt_chain {
    pub node: usize,
    pub len: i64,
    pub row: i64,
    pub steps: *const vt_chain_step,
    pub num_steps: usize,
    pub inputs: *const i64,
    pub periods: *const i64,
    pub num_inputs: usize,
    pub outputs: *const i64,
    pub registers: *const i32,
    pub output_periods: *const i64,
    pub num_outputs: usize,
}

#[repr(C)]
pub struct vt_moved_value {
    pub value: usize,
    pub buffer: usize,
    pub offset: i64,
    pub strides: *const i64,
}

#[repr(C)]
pub struct vt_repeated_call {
    pub node: usize,
    pub before: usize,
    pub chain: *const vt_chain,
}

#[repr(C)]
pub struct vt_graph_plan {
    pub runs: *const u8,
    pub buffer_offsets: *const u64,
    pub block_offsets: *const u64,
    pub constants: *const u8,
    pub arena_bytes: u64,
    pub uses_out_variants: i32,
    pub inputs: *const vt_tensor,
    pub num_inputs: usize,
    pub outputs: *const vt_tensor,
    pub num_outputs: usize,
    pub merged: *const u64,
    pub chains: *const vt_chain,
    pub num_chains: usize,
    pub moved: *const vt_moved_value,
    pub num_moved: usize,
    pub repeated: *const vt_repeated_call,
    pub num_repeated: usize,
}

unsafe extern "C" {
    pub fn vt_error_kind_of(error: *const vt_error) -> i32;
    pub fn vt_error_message(error: *const vt_error) -> *const c_char;
    pub fn vt_error_free(error: *mut vt_error);

    pub fn vt_tch_names_hpu() -> i32;
    pub fn vt_tensor_device(
        tensor: vt_tensor,
        device_type: *mut i32,
        device_index: *mut i32,
    ) -> *mut vt_error;
    pub fn vt_libtorch_version() -> *const c_char;
    pub fn vt_dtype_number(name: *const c_char) -> i32;

    pub fn vt_backend_is_loaded(device_type: i32) -> i32;
    pub fn vt_backend_device_count(device_type: i32, devices: *mut i32) -> *mut vt_error;
    pub fn vt_backend_synchronize(device_type: i32, device_index: i32) -> *mut vt_error;
    pub fn vt_backend_has_generators(device_type: i32, has_generators: *mut i32) -> *mut vt_error;
    pub fn vt_backend_memory(
        device_type: i32,
        device_index: i32,
        stats: *mut vt_backend_memory_stats,
        is_measured: *mut i32,
    ) -> *mut vt_error;
    pub fn vt_backend_reset_peak_memory(device_type: i32, device_index: i32) -> *mut vt_error;

    pub fn vt_anomaly_watch(on: i32) -> *mut vt_error;
    pub fn vt_anomaly_take(text: *mut c_char, capacity: usize) -> *mut vt_error;
    pub fn vt_inference_mode_enter(guard: *mut *mut c_void) -> *mut vt_error;
    pub fn vt_inference_mode_leave(guard: *mut c_void);
    pub fn vt_set_deterministic(mode: i32) -> *mut vt_error;
    pub fn vt_deterministic(mode: *mut i32) -> *mut vt_error;
    pub fn vt_set_cudnn_benchmark(on: i32) -> *mut vt_error;
    pub fn vt_cuda_graph_begin(device_index: i32, graph: *mut *mut vt_cuda_graph) -> *mut vt_error;
    pub fn vt_cuda_graph_end(graph: *mut vt_cuda_graph) -> *mut vt_error;
    pub fn vt_cuda_graph_replay(graph: *mut vt_cuda_graph) -> *mut vt_error;
    pub fn vt_cuda_graph_free(graph: *mut vt_cuda_graph);

    pub fn vt_grad_is_enabled() -> i32;
    pub fn vt_autograd_function(
        inputs: *const vt_tensor,
        num_inputs: usize,
        outputs: *const vt_tensor,
        num_outputs: usize,
        saved: *const vt_tensor,
        num_saved: usize,
        callbacks: vt_autograd_callbacks,
    ) -> *mut vt_error;
    pub fn vt_autograd_grad(
        outputs: *const vt_tensor,
        grad_outputs: *const vt_tensor,
        num_outputs: usize,
        inputs: *const vt_tensor,
        num_inputs: usize,
        grads: *mut vt_tensor,
    ) -> *mut vt_error;
    pub fn vt_autograd_set_multithreading(enabled: i32) -> *mut vt_error;
    pub fn vt_autograd_is_multithreading(enabled: *mut i32) -> *mut vt_error;
    pub fn vt_grads_clear(tensors: *const vt_tensor, len: usize) -> *mut vt_error;
    pub fn vt_grad_set(tensor: vt_tensor, grad: vt_tensor) -> *mut vt_error;
    pub fn vt_post_accumulate_grad_hook(
        tensor: vt_tensor,
        hook: extern "C" fn(data: *mut c_void) -> i32,
        data: *mut c_void,
        release: extern "C" fn(data: *mut c_void),
    ) -> *mut vt_error;
    pub fn vt_post_accumulate_grad_hook_remove(tensor: vt_tensor, data: *const c_void) -> *mut vt_error;
    pub fn vt_tensor_hook(tensor: vt_tensor, callbacks: vt_autograd_callbacks) -> *mut vt_error;
    pub fn vt_base_hook(tensor: vt_tensor, callbacks: vt_autograd_callbacks) -> *mut vt_error;
    pub fn vt_gradient_edge(tensor: vt_tensor, node: *mut usize, output: *mut u32) -> *mut vt_error;
    pub fn vt_at_backward_end(callbacks: vt_autograd_callbacks) -> *mut vt_error;
    pub fn vt_backward(loss: vt_tensor, retain_graph: i32) -> *mut vt_error;
    pub fn vt_is_in_backward() -> i32;
    pub fn vt_save_policy_new() -> *mut vt_save_policy;
    pub fn vt_save_policy_add(
        policy: *mut vt_save_policy,
        name: *const c_char,
        found: *mut usize,
    ) -> *mut vt_error;
    pub fn vt_save_policy_free(policy: *mut vt_save_policy);
    pub fn vt_segment_enter(
        inputs: *const vt_tensor,
        len: usize,
        inputs_on_host: i32,
        policy: *const vt_save_policy,
        callbacks: vt_recompute_callbacks,
        segment: *mut *mut vt_segment,
    ) -> *mut vt_error;
    pub fn vt_segment_leave(segment: *mut vt_segment);
    pub fn vt_segment_bytes(segment: *const vt_segment) -> i64;
    pub fn vt_segment_saved_bytes(segment: *const vt_segment) -> i64;
    pub fn vt_offload_enter(offload: *mut *mut vt_offload) -> *mut vt_error;
    pub fn vt_offload_leave(offload: *mut vt_offload);
    pub fn vt_offload_bytes(offload: *const vt_offload) -> i64;
    pub fn vt_recompute_is_complete() -> i32;
    pub fn vt_recompute_may_end(may_end: i32) -> i32;

    pub fn vt_autocast_get(device_type: i32, enabled: *mut i32, dtype: *mut i32) -> *mut vt_error;
    pub fn vt_autocast_set(device_type: i32, enabled: i32, dtype: i32) -> *mut vt_error;
    pub fn vt_autocast_enter() -> *mut vt_error;
    pub fn vt_autocast_leave() -> *mut vt_error;
    pub fn vt_autocast_clear_cache() -> *mut vt_error;
    pub fn vt_storage_release(tensor: vt_tensor, bytes: *mut usize) -> *mut vt_error;
    pub fn vt_storage_restore(tensor: vt_tensor, bytes: usize) -> *mut vt_error;
    pub fn vt_storage_lend(tensor: vt_tensor, memory: vt_tensor) -> *mut vt_error;
    pub fn vt_storage_refill(tensor: vt_tensor, values: vt_tensor) -> *mut vt_error;
    pub fn vt_empty_pinned(like: vt_tensor, pinned: *mut vt_tensor) -> *mut vt_error;
    pub fn vt_copy_async(to: vt_tensor, from: vt_tensor) -> *mut vt_error;
    pub fn vt_storage_describe(tensor: vt_tensor, id: *mut usize, bytes: *mut usize) -> *mut vt_error;
    pub fn vt_set_version(tensor: vt_tensor, version: i64) -> *mut vt_error;
    pub fn vt_autocast_set_lists(
        device_type: i32,
        names: *const *const c_char,
        policies: *const u8,
        len: usize,
        replaces_rest: i32,
    ) -> *mut vt_error;
    pub fn vt_autocast_reset_lists(device_type: i32) -> *mut vt_error;
    pub fn vt_autocast_observe(report: Option<vt_cast_report>);
    pub fn vt_operator_names(
        report: extern "C" fn(data: *mut c_void, name: *const c_char),
        data: *mut c_void,
    ) -> *mut vt_error;

    pub fn vt_tensor_id(tensor: vt_tensor, id: *mut usize) -> *mut vt_error;
    pub fn vt_tensor_is_dense(tensor: vt_tensor, is_dense: *mut i32) -> *mut vt_error;
    pub fn vt_list_new(tensors: *const vt_tensor, len: usize, list: *mut *mut vt_list) -> *mut vt_error;
    pub fn vt_list_free(list: *mut vt_list);
    pub fn vt_list_len(list: *const vt_list) -> usize;
    pub fn vt_list_clear(list: *mut vt_list);
    pub fn vt_list_select(
        list: *const vt_list,
        indices: *const usize,
        len: usize,
        selected: *mut *mut vt_list,
    ) -> *mut vt_error;
    pub fn vt_list_copies(list: *const vt_list, copies: *mut *mut vt_list) -> *mut vt_error;
    pub fn vt_list_clear_grads(params: *const vt_list) -> *mut vt_error;
    pub fn vt_list_grads(params: *const vt_list, grads: *mut vt_list) -> *mut vt_error;
    pub fn vt_list_all_grads(params: *const vt_list, grads: *mut vt_list) -> *mut vt_error;
    pub fn vt_list_bind_grads(
        params: *const vt_list,
        grads: *const vt_list,
        carries_over: i32,
    ) -> *mut vt_error;
    pub fn vt_list_are_grads(
        params: *const vt_list,
        grads: *const vt_list,
        are_grads: *mut i32,
    ) -> *mut vt_error;
    pub fn vt_list_grads_for_update(
        params: *const vt_list,
        grads: *mut vt_list,
        status: *mut u8,
        are_narrowed: *mut i32,
    ) -> *mut vt_error;
    pub fn vt_list_widen_grads(params: *const vt_list) -> *mut vt_error;
    pub fn vt_fused_sgd(
        params: *const vt_list,
        grads: *mut vt_list,
        momentum_buffers: *const vt_list,
        options: *const vt_sgd_options,
        is_first_step: i32,
    ) -> *mut vt_error;
    pub fn vt_fused_adam(
        params: *const vt_list,
        grads: *mut vt_list,
        state: *const vt_adam_state,
        options: *const vt_adam_options,
        grad_scale: vt_tensor,
        found_inf: vt_tensor,
    ) -> *mut vt_error;
    pub fn vt_list_to_float(list: *mut vt_list) -> *mut vt_error;
    pub fn vt_foreach_copy(to: *const vt_list, from: *const vt_list) -> *mut vt_error;
    pub fn vt_foreach_mul_tensor(list: *const vt_list, by: vt_tensor) -> *mut vt_error;
    pub fn vt_foreach_clamp(list: *const vt_list, min: f64, max: f64) -> *mut vt_error;
    pub fn vt_foreach_norm(list: *const vt_list, p: f64, norms: *mut vt_tensor) -> *mut vt_error;

    /// c10's own: it logs to standard error from this level on (0 info, 1 warning, 2 error, 3 fatal).
    pub static mut FLAGS_caffe2_log_level: i32;
    pub fn vt_store_tcp(
        host: *const c_char,
        port: u16,
        is_server: i32,
        listener: i32,
        timeout_ms: i64,
        store: *mut *mut vt_store,
        actual_port: *mut u16,
    ) -> *mut vt_error;
    pub fn vt_store_sealed(
        store: *const vt_store,
        secret: *const u8,
        seal: extern "C" fn(*const u8, *const u8, usize, *const u8, usize, *mut u8),
        sealed: *mut *mut vt_store,
    ) -> *mut vt_error;
    pub fn vt_store_with_prefix(
        store: *const vt_store,
        prefix: *const c_char,
        prefixed: *mut *mut vt_store,
    ) -> *mut vt_error;
    pub fn vt_store_set(
        store: *const vt_store,
        key: *const c_char,
        value: *const u8,
        len: usize,
    ) -> *mut vt_error;
    pub fn vt_store_get(
        store: *const vt_store,
        key: *const c_char,
        timeout_ms: i64,
        take: extern "C" fn(data: *mut c_void, value: *const u8, len: usize),
        data: *mut c_void,
    ) -> *mut vt_error;
    pub fn vt_store_add(
        store: *const vt_store,
        key: *const c_char,
        amount: i64,
        sum: *mut i64,
    ) -> *mut vt_error;
    pub fn vt_store_has(store: *const vt_store, key: *const c_char, has: *mut i32) -> *mut vt_error;
    pub fn vt_store_free(store: *mut vt_store);
    pub fn vt_group_gloo(
        store: *const vt_store,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        interface: *const c_char,
        address: *const c_char,
        group: *mut *mut vt_group,
    ) -> *mut vt_error;
    pub fn vt_collective_id(library: *const vt_collective_library, id: *mut u8) -> *mut vt_error;
    pub fn vt_collective_join(
        library: *const vt_collective_library,
        id: *const u8,
        rank: i32,
        size: i32,
        device_type: i32,
        device_index: i32,
        timeout_ms: i64,
        group: *mut *mut vt_group,
    ) -> *mut vt_error;
    pub fn vt_group_free(group: *mut vt_group);
    pub fn vt_group_set_timeout(group: *const vt_group, timeout_ms: i64) -> *mut vt_error;
    pub fn vt_group_all_reduce(
        group: *const vt_group,
        tensor: vt_tensor,
        op: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_broadcast(
        group: *const vt_group,
        tensor: vt_tensor,
        root: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_all_gather(
        group: *const vt_group,
        input: vt_tensor,
        output: vt_tensor,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_reduce_scatter(
        group: *const vt_group,
        input: vt_tensor,
        output: vt_tensor,
        op: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_send(
        group: *const vt_group,
        tensor: vt_tensor,
        peer: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_recv(
        group: *const vt_group,
        tensor: vt_tensor,
        peer: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_reduce(
        group: *const vt_group,
        tensor: vt_tensor,
        root: i32,
        op: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_gather(
        group: *const vt_group,
        input: vt_tensor,
        output: vt_tensor,
        root: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_scatter(
        group: *const vt_group,
        input: vt_tensor,
        output: vt_tensor,
        root: i32,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_all_to_all(
        group: *const vt_group,
        input: vt_tensor,
        input_splits: *const i64,
        output: vt_tensor,
        output_splits: *const i64,
        work: *mut *mut vt_work,
    ) -> *mut vt_error;
    pub fn vt_group_barrier(group: *const vt_group, work: *mut *mut vt_work) -> *mut vt_error;
    pub fn vt_group_all_reduce_sum_function(
        group: *const vt_group,
        input: vt_tensor,
        output: *mut vt_tensor,
    ) -> *mut vt_error;
    pub fn vt_work_wait(work: *mut vt_work) -> *mut vt_error;
    pub fn vt_work_free(work: *mut vt_work);
    pub fn vt_bucket_fill(
        params: *const vt_tensor,
        views: *const vt_tensor,
        len: usize,
        scale: f64,
    ) -> *mut vt_error;
    pub fn vt_bucket_adopt(params: *const vt_tensor, views: *const vt_tensor, len: usize) -> *mut vt_error;
    pub fn vt_reaches_leaves(
        root: vt_tensor,
        leaves: *const vt_tensor,
        len: usize,
        reached: *mut u8,
    ) -> *mut vt_error;

    pub fn vt_manual_seed(seed: u64) -> *mut vt_error;
    pub fn vt_rng_get_state(device_type: i32, device_index: i32, state: *mut vt_tensor) -> *mut vt_error;
    pub fn vt_rng_set_state(device_type: i32, device_index: i32, state: vt_tensor) -> *mut vt_error;
    pub fn vt_randperm(len: i64, seed: u64, permutation: *mut vt_tensor) -> *mut vt_error;

    pub fn vt_set_cpu_allocator(allocator: *const vt_allocator) -> *mut vt_error;

    pub fn vt_install_convolution_grads() -> *mut vt_error;
    pub fn vt_install_kernels(kernels: *const vt_kernels) -> *mut vt_error;
    pub fn vt_update_lists(
        params: *const vt_list,
        grads: *mut vt_list,
        states: *const *const vt_list,
        num_states: usize,
        rounded: *const vt_list,
        steps: *const f64,
        rule: *const vt_update_rule,
        is_done: *mut i32,
    ) -> *mut vt_error;

    pub fn vt_attend_cached(tensors: *const vt_cached_tensors, out: *mut vt_tensor) -> *mut vt_error;

    pub fn vt_install_float8(kernels: *const vt_float8_kernels) -> *mut vt_error;
    pub fn vt_fp8_cast(
        input: vt_tensor,
        meta: *const vt_fp8_meta,
        slot: i64,
        measures: i32,
        dtype: i32,
        is_stochastic: i32,
        codes: *mut vt_tensor,
        scale_inv: *mut vt_tensor,
    ) -> *mut vt_error;
    pub fn vt_fp8_cast_current(
        input: vt_tensor,
        by_row: i32,
        dtype: i32,
        margin: i64,
        is_stochastic: i32,
        codes: *mut vt_tensor,
        scale_inv: *mut vt_tensor,
    ) -> *mut vt_error;
    pub fn vt_fp8_update(meta: *const vt_fp8_meta, dtype: i32, margin: i64, uses_max: i32) -> *mut vt_error;
    pub fn vt_fp8_from(codes: vt_tensor, dtype: i32, numbers: *mut vt_tensor) -> *mut vt_error;
    pub fn vt_fp8_mm(
        a: vt_tensor,
        b: vt_tensor,
        a_scale_inv: vt_tensor,
        b_scale_inv: vt_tensor,
        bias: vt_tensor,
        out_dtype: i32,
        out: *mut vt_tensor,
    ) -> *mut vt_error;

    pub fn vt_hpu_emulator_init(options: *const vt_hpu_options) -> *mut vt_error;
    pub fn vt_hpu_adopt_plugin() -> *mut vt_error;
    pub fn vt_hpu_drop_twin(twin: *mut c_void);
    pub fn vt_hpu_copied_outputs() -> u64;
    pub fn vt_hpu_compare_operators(
        report: extern "C" fn(data: *mut c_void, op: *const c_char, difference: *const c_char),
        data: *mut c_void,
    ) -> *mut vt_error;

    pub fn vt_recording_begin() -> *mut vt_error;
    pub fn vt_recording_end(recording: *mut *mut vt_recording) -> *mut vt_error;
    pub fn vt_recording_forget_results(recording: *mut vt_recording);
    pub fn vt_recording_free(recording: *mut vt_recording);
    pub fn vt_recording_is_on() -> i32;
    pub fn vt_recording_pause(pauses: i32) -> i32;
    pub fn vt_recording_refuse(reason: *const c_char);
    pub fn vt_recording_set_scope(scope: *const c_char);
    pub fn vt_recording_hash(recording: *const vt_recording, buffer: usize) -> u64;
    pub fn vt_recording_describe(
        recording: *const vt_recording,
        peers: *const *const vt_recording,
        num_peers: usize,
        take: extern "C" fn(data: *mut c_void, text: *const c_char),
        data: *mut c_void,
    ) -> *mut vt_error;
    pub fn vt_recording_buffer_of(
        recording: *const vt_recording,
        tensor: vt_tensor,
        buffer: *mut i32,
    ) -> *mut vt_error;
    pub fn vt_graph_build(
        recording: *mut vt_recording,
        plan: *const vt_graph_plan,
        graph: *mut *mut vt_graph,
    ) -> *mut vt_error;
    pub fn vt_graph_free(graph: *mut vt_graph);
    pub fn vt_graph_gone_buffer(graph: *const vt_graph) -> i32;
    pub fn vt_graph_replay(
        graph: *mut vt_graph,
        inputs: *const vt_tensor,
        num_inputs: usize,
        outputs: *mut vt_tensor,
        computes_frozen: i32,
    ) -> *mut vt_error;
    pub fn vt_graph_misfit(graph: *const vt_graph) -> i32;
    pub fn vt_graph_get_stats(graph: *const vt_graph, stats: *mut vt_graph_stats);
}
