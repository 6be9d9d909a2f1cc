//! The only unsafe code of this crate: safe functions over `voltaic-sys`, and entries for its kernels.
//!
//! Every wrapper takes and returns `tch` tensors, turns a `vt_error` into a [`TorchError`](crate::error::TorchError), and states in its
//! `SAFETY` comment which facts make the call sound.

#![allow(unsafe_code)]

mod activities;
mod autograd;
mod check;
mod device;
mod exit;
mod files;
mod graph;
mod kernels;
mod kineto;
mod libtorch;
mod ranks;
mod reach;
mod tensor;
mod threads;

pub use activities::{
    Activity, ActivityRow, KERNELS, MemoryChange, Recorded, collective_begins, collective_ends,
};
pub use autograd::function::{
    at_backward_end, autograd_function, autograd_function_saving, autograd_grad, backward, base_hook,
    grad_is_enabled, gradient_edge, is_in_backward, tensor_hook,
};
pub use autograd::hooks::{
    GradHook, SingleThreadedEngine, clear_grads, engine_multithreading, set_engine_multithreading, set_grad,
};
pub use autograd::modes::{
    AnomalyWatch, DeterministicMode, InferenceMode, deterministic, set_cudnn_benchmark, set_deterministic,
};
pub use autograd::segment::{Offload, SavePolicy, Segment, recompute_is_complete, set_recompute_may_end};
pub(crate) use check::panic_text;
pub use device::allocator::{host_pool, hpu_pool, install_host_pool};
pub use device::backend::{
    BackendMemory, backend_device_count, backend_is_loaded, backend_memory, has_generator, load_library,
    reset_backend_peak, set_environment, synchronize,
};
pub use device::hlml::{Hlml, HlmlCard};
pub(crate) use device::host_memory::memory_limits;
pub use device::hpu::{
    HpuOptions, MAX_HPUS, adopt_hpu_plugin, compare_hpu_operators, hpu_copied_outputs, init_hpu_emulator,
};
pub use device::pool::{PeakReset, Pool, PoolBlock, PoolStats};
pub use exit::at_exit;
pub use files::buffer::{AlignedBuffer, DIRECT_ALIGN};
pub use files::engine::{FileBackend, FileEngine, FileOptions};
pub use files::transfer::{NamedFile, Transfer};
pub use graph::cuda::{CudaGraph, is_capturing_on_cuda};
pub use graph::frozen::{FrozenMemory, note_write, note_writes};
pub use graph::recording::{
    GraphPlan, MovedValue, PlannedChain, Recording, RecordingPause, RepeatedCall, ReplayGraph, ReplayStats,
    Replayed, is_recording, refuse_recording, set_recording_scope,
};
pub(crate) use kernels::has_kernels;
pub use kernels::{has_attention_kernel, install_kernels};
pub use kineto::{EventScope, Kineto, KinetoEvent, KinetoOptions, Profile, ProfileRange, unescaped_name};
pub use libtorch::{check_libtorch, libtorch_library, libtorch_version};
#[cfg(test)]
pub(crate) use ranks::c10d::store_requests;
pub use ranks::c10d::{
    Backend, GlooInterface, Listen, ReduceOp, Store, Work, adopt_grads, fill_bucket, reached_leaves,
};
pub use ranks::flight_memory::{
    ENTRIES as FLIGHT_ENTRIES, FlightMemory, WORDS as FLIGHT_WORDS, monotonic_nanos,
};
pub use ranks::libraries::{CollectiveApi, CollectiveLibrary, Seat};
pub use ranks::listeners::Listeners;
pub use ranks::process::{die_with_parent, handles_or_ignores, ignores, signal_group};
pub use ranks::seal::{JobSecret, SEAL_BYTES};
pub use ranks::shared_sum::{HostPeers, OwnRegion, Summing, next_ticket, shares_memory};
pub use reach::Lent;
pub use tensor::attention::{CachedStates, attend_cached};
pub use tensor::autocast::{
    AutocastPolicy, Cast, autocast_lists_version, autocast_state, clear_autocast_cache, enter_autocast,
    leave_autocast, observe_casts, operator_names, reset_autocast_lists, set_autocast_lists,
    set_autocast_state,
};
pub use tensor::device::tch_names_hpu;
pub use tensor::float8::{Fp8Cast, Fp8Tensor, Fp8Tensors, fp8_mm, fp8_to};
pub use tensor::lists::{
    AdamLists, AdamOptions, GradStatus, Gradients, LearningRate, SgdOptions, TensorList, foreach_clamp,
    foreach_mul_tensor, foreach_norm, is_dense, tensor_id,
};
pub use tensor::rng::{manual_seed, randperm, rng_state, set_rng_state};
pub(crate) use tensor::storage::describe_storage;
pub use tensor::storage::{
    ReleasableStorage, SharedTensor, cannot_pin, copy_async, empty_pinned, set_version,
};
pub use tensor::updates::{StepKind, StepLists, StepRule};
pub use threads::{set_thread_num_threads, with_one_thread};
