//! The only unsafe code of this crate: safe functions over `voltaic-sys`, and entries for its kernels.
//!
//! Every wrapper takes and returns `tch` tensors, turns a `vt_error` into a [`TorchError`], and states in its
//! `SAFETY` comment which facts make the call sound.

#![allow(unsafe_code)]

mod allocator;
mod autocast;
mod autograd;
mod autograd_function;
mod backend;
mod c10d;
mod collectives;
mod cuda_graph;
mod execution;
mod graph;
mod hlml;
mod hpu;
mod kernels;
mod libtorch;
mod neighbours;
mod optim;
mod pool;
mod process;
mod rng;
mod room;
mod shared_region;
mod size;
mod switch;
mod tensor;
mod threads;

use std::ffi::CStr;

use voltaic_sys as sys;

pub use allocator::{host_pool, hpu_pool, install_host_pool};
pub use autocast::{
    AutocastPolicy, Cast, autocast_lists_version, autocast_state, enter_autocast, leave_autocast,
    observe_casts, operator_names, reset_autocast_lists, set_autocast_lists, set_autocast_state,
};
pub(crate) use autograd::panic_text;
pub use autograd::{GradHook, clear_grads, engine_multithreading, set_engine_multithreading, set_grad};
pub use autograd_function::{autograd_function, autograd_grad, grad_is_enabled};
pub use backend::{
    BackendMemory, backend_device_count, backend_is_loaded, backend_memory, has_generator, load_library,
    reset_backend_peak, seed_device, set_environment, synchronize,
};
pub use c10d::{Backend, GlooInterface, ReduceOp, Store, Work, adopt_grads, fill_bucket, reached_leaves};
pub use collectives::{CollectiveApi, CollectiveLibrary, Seat};
pub use cuda_graph::{CudaGraph, is_capturing_on_cuda};
pub use execution::{
    AnomalyWatch, DeterministicMode, InferenceMode, deterministic, set_cudnn_benchmark, set_deterministic,
};
pub use graph::{
    GraphPlan, Recording, RecordingPause, ReplayGraph, ReplayStats, Replayed, is_recording, refuse_recording,
    set_recording_scope,
};
pub use hlml::{Hlml, HlmlCard};
pub use hpu::{
    HpuOptions, MAX_HPUS, adopt_hpu_plugin, compare_hpu_operators, hpu_copied_outputs, init_hpu_emulator,
};
pub use kernels::{has_attention_kernel, install_kernels};
pub use libtorch::{check_libtorch, libtorch_library, libtorch_version};
pub use neighbours::{Home, Neighbours, Summing, shares_memory};
pub use optim::{
    AdamLists, AdamOptions, GradStatus, Gradients, LearningRate, SgdOptions, TensorList, foreach_clamp,
    foreach_mul_tensor, foreach_norm, is_dense, tensor_id,
};
pub use pool::{PeakReset, Pool, PoolBlock, PoolStats};
pub use process::{die_with_parent, signal_group};
pub use rng::{manual_seed, randperm, rng_state, set_rng_state};
pub(crate) use size::{format_size, parse_size};
pub use tensor::{SharedTensor, device_numbers, tch_names_hpu};
pub use threads::{set_thread_num_threads, with_one_thread};

use crate::error::{TorchError, TorchErrorKind};

/// Turns what a shim function returned into a `Result`, freeing the error.
///
/// `error` must come straight from the shim function `op`, and must not be used afterwards.
fn check(op: &'static str, error: *mut sys::vt_error) -> Result<(), TorchError> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null vt_error from the shim is valid until vt_error_free, which is called once, here; the
    // message is copied before that.
    let (kind, message) = unsafe {
        let kind = sys::vt_error_kind_of(error);
        let message = CStr::from_ptr(sys::vt_error_message(error)).to_string_lossy().into_owned();
        sys::vt_error_free(error);
        (kind, message)
    };
    let kind = match kind {
        sys::VT_ERROR_OUT_OF_MEMORY => TorchErrorKind::OutOfMemory,
        sys::VT_ERROR_INDEX => TorchErrorKind::Index,
        sys::VT_ERROR_NOT_IMPLEMENTED => TorchErrorKind::NotImplemented,
        _ => TorchErrorKind::Other,
    };
    Err(TorchError::new(op, kind, &message))
}

/// The C++ objects behind tensors, for one call. Borrows the tensors, so the pointers stay valid.
fn pointers<'a>(tensors: impl IntoIterator<Item = &'a tch::Tensor>) -> Vec<sys::vt_tensor> {
    tensors.into_iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}
