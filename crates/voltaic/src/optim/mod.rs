//! Optimizers, gradient clipping and learning rate schedules, with PyTorch's numbers, names and defaults.
//!
//! An optimizer is configured by a plain struct ([`Sgd`], [`Adam`], [`AdamW`]) and built over groups of parameters;
//! its state is a list of named tensors, which is what checkpoints and sharding need. Updates run in
//! voltaic's kernel on the CPU and in libtorch's fused kernels elsewhere, one call per group, dtype and device. Absent
//! on purpose: closures that evaluate the loss again (L-BFGS), sparse and complex gradients.

mod adam;
mod adaptive;
mod checks;
mod clip;
mod config;
mod engine;
mod formula;
mod lion;
mod lr_scheduler;
mod masters;
mod muon;
mod muon_aux;
mod muon_rule;
mod newton_schulz;
mod offload_states;
mod optimizer;
mod optimizers;
mod param_group;
mod problems;
mod replay;
mod rounding;
mod settings;
mod sgd;
mod unsharded_params;
mod values;

pub use adam::{Adam, AdamW};
pub use adaptive::{Adadelta, Adagrad, RmsProp};
pub(crate) use clip::local_norm;
pub use clip::{
    GradientClip, clip_grad_norm, clip_grad_norm_of_type, clip_grad_value, clip_to_norm, grad_norm,
};
pub use config::{LrSchedulerConfig, OptimizerConfig, SequentialLr};
pub use lion::{Lamb, Lion};
pub use lr_scheduler::{
    AnnealStrategy, BuildLrScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts,
    ExponentialLr, LambdaLr, LinearLr, LinearWarmupCosine, LrRangeTest, LrScheduler, MultiStepLr, OneCycle,
    OneCycleLr, PerGroup, PlateauMode, PolynomialLr, ReduceLrOnPlateau, StepLr, SwaLr, ThresholdMode,
    WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType,
};
pub(crate) use masters::take_edit;
pub use muon::Muon;
pub use muon_aux::MuonWithAuxAdam;
pub use offload_states::{OffloadState, OffloadStates};
pub(crate) use offload_states::{move_grad, moved, take_place};
pub use optimizer::{BuildOptimizer, Optimizer, OptimizerState};
pub use optimizers::{
    ActiveLrScheduler, ConfiguredLrScheduler, ConfiguredOptimizer, Interval, LrSchedulerSpec, Optimizers,
};
pub use param_group::{AdjustLr, GroupOptions, NsMethod, ParamGroup, ParamGroupSpec};
pub use sgd::Sgd;
pub use unsharded_params::UnshardedParameters;
pub use values::ParamValue;
pub(crate) use values::{kinds, no_state, parameter, shape_problem};
