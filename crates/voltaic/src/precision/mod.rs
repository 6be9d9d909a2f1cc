//! The number formats of a computation: which dtype weights have, and what operators cast to.
//!
//! *Mixed* precision leaves weights in float32 and lets operators cast ([`autocast()`]); *true* precision stores weights
//! in the lower dtype. Which operators cast is decided by lists of names ([`OpLists`]) at libtorch's dispatcher.

mod autocast;
mod cast_log;
mod deepspeed_plugin;
pub mod fp8;
mod grad_scaler;
mod loss_scale;
mod loss_scaler;
mod op_files;
mod op_lists;
mod plugin;
#[expect(clippy::module_inception, reason = "the enum of the folder")]
mod precision;
mod region;

pub use crate::ffi::{Cast, observe_casts};
pub use autocast::{
    AutocastGuard, autocast, autocast_dtype, autocast_enabled, disable_casts, is_autocast_enabled,
    with_autocast,
};
pub(crate) use cast_log::log_casts;
pub use deepspeed_plugin::DeepSpeedPrecisionPlugin;
pub use grad_scaler::GradScaler;
pub(crate) use grad_scaler::unscale_grads;
pub(crate) use loss_scale::LossScale;
pub use loss_scaler::{DynamicLossScaler, LossScaler, LossScalerConfig, StaticLossScaler};
pub(crate) use op_lists::set_run_lists;
pub use op_lists::{OpLists, reset_op_lists, set_op_lists};
pub use plugin::{HpuPrecisionPlugin, OptLevel};

pub(crate) use precision::{NO_FLOAT8, NO_FLOAT16, as_written, is_float8, is_hmp};
pub use precision::{PRECISIONS, Precision};
pub(crate) use region::PrecisionRegion;
