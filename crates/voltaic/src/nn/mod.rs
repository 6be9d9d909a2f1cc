//! Modules: the tree of named parameters, and the usual layers with PyTorch's names and initialisations.
//!
//! A model is a struct of layers with `#[derive(Module)]`. Its parameters have the names that PyTorch gives the same
//! structure, and after [`manual_seed`](crate::ffi::manual_seed) the weights that PyTorch draws, bit for bit, when the
//! layers are made in the same order.
//!
//! # Making layers
//! Every layer with sizes is made in one of two ways, and both end in `?`:
//!
//! ```
//! use voltaic::nn::{Conv2d, Linear};
//!
//! # fn main() -> voltaic::Result<()> {
//! let fc = Linear::new(784, 256)?; // sizes alone: PyTorch's defaults
//! let conv = Conv2d::builder(3, 64, 3).stride(2).padding(1).bias(false).build()?; // sizes and options
//! # Ok(())
//! # }
//! ```
//!
//! Options come before `build`, because some of them decide how many random numbers the layer draws: a layer made
//! first and changed later would leave the random stream where PyTorch does not. Making a layer fails with
//! [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) rather than at the first batch, so that a bad size in a
//! recipe is reported while the model is built, next to the line that gave it. What has nothing to refuse
//! ([`Relu`], [`Identity`], [`Softmax::new`]) returns no `Result`.
//!
//! Sizes are `i64`, as libtorch counts them, so that sizes of tensors and sizes of layers mix without casts.
//!
//! # Shapes
//! A layer does not check its input beforehand: libtorch does that anyway. When libtorch refuses, the layer looks
//! for the reason and says it in its own terms, as
//! [`ModuleError::Shape`](crate::error::ModuleError::Shape): the right input pays nothing.

mod buffer;
mod callable;
mod calls;
mod check;
mod checkpoint;
mod checkpoint_policy;
mod choice;
mod compute;
mod deferred;
mod field;
mod fp8_attention;
mod fp8_linear;
pub mod functional;
pub mod init;
mod layers;
mod metric;
mod misfit;
mod modes;
mod module;
mod named;
pub mod parallel;
mod parameter;
pub mod quant;
mod running_statistics;
mod sequential;
mod snapshot;
mod state_dict;
pub mod te;
mod tensor_tuple;
mod tree;
mod unshard;

pub use buffer::Buffer;
pub use callable::Callable;
pub(crate) use callable::call_with;
pub use calls::active::{
    CallInterceptor, InterceptorHandle, InterceptorLevel, Next, RecomputeFn, intercept_calls,
};
pub(crate) use calls::active::{await_forward, interceptors_now};
pub(crate) use calls::call::{call_as, within_call};
pub(crate) use calls::entry::CallWatcher;
pub use calls::entry::ModuleCall;
pub use calls::hooks::{ModuleHooks, RemovableHandle};
pub(crate) use calls::recompute::is_in_segment;
pub use calls::recompute::is_recomputing;
pub use calls::which::Which;
pub use check::Sizes;
pub(crate) use checkpoint::{CheckpointCalls, Treatment};
pub use checkpoint::{
    CheckpointScope, CheckpointSettings, CheckpointStats, checkpoint, checkpoint_fn, checkpoint_with,
    save_on_host,
};
pub use checkpoint_policy::CheckpointPolicy;
pub(crate) use choice::kept_within;
#[doc(hidden)]
pub use field::Field;
pub use layers::activation::{Gelu, Identity, LeakyRelu, Relu, Sigmoid, Silu, Softmax, Tanh};
pub use layers::attention::{AttentionMask, MultiheadAttention, MultiheadAttentionBuilder};
pub use layers::batch_norm::{BatchNorm, BatchNorm1d, BatchNorm2d, BatchNormBuilder};
pub use layers::conv::{Conv, Conv1d, Conv2d, ConvBuilder};
pub use layers::conv_transpose::{ConvTranspose2d, ConvTranspose2dBuilder};
pub use layers::dropout::Dropout;
pub use layers::embedding::{Embedding, EmbeddingBuilder};
pub use layers::kv_cache::KvCacheLayer;
pub use layers::linear::{Linear, LinearBuilder};
pub use layers::matmul::Matmul;
pub use layers::norm::{GroupNorm, GroupNormBuilder, LayerNorm, LayerNormBuilder, NormalizedShape};
pub use layers::pool::{
    AdaptiveAvgPool2d, AvgPool2d, AvgPool2dBuilder, Flatten, MaxPool2d, MaxPool2dBuilder,
};
pub use layers::recurrent::{Gru, GruBuilder, Lstm, LstmBuilder, PackedSequence, Rnn, RnnBuilder};
pub use layers::sync_batch_norm::SyncBatchNorm;
pub(crate) use metric::refuse_shape;
pub use metric::{Metric, MetricState, Reduction};
pub(crate) use misfit::with_fqn;
pub use modes::set_training;
pub(crate) use modes::{
    ModeNumbers, ModuleKind, NumberHash, each_parameter, set_training_modes, training_modes,
};
pub(crate) use module::identity;
#[doc(hidden)]
pub use module::{AsCode, AsModule, ModuleCode};
pub use module::{Forward, Member, Module};
pub(crate) use named::{is_member, modules_named};
pub(crate) use parameter::GradShare;
pub use parameter::{Logical, Parameter, Sharding};
pub(crate) use running_statistics::{EqualBatches, has_running_statistics, reset_running_statistics};
pub use sequential::Sequential;
pub(crate) use snapshot::{Snapshot, SnapshotParts};
pub use state_dict::IncompatibleKeys;
pub(crate) use state_dict::StateEntry;
pub use tensor_tuple::TensorTuple;
pub use tree::ModuleExt;
pub use tree::name_parameters;
pub(crate) use tree::{
    check_tied, frozen_parameters, join_fqn, load_state_dict_each, refuse_kept, state_dict_of, tied_names,
};
pub(crate) use unshard::UnshardWatch;
pub use unshard::take_unshard_failure;
