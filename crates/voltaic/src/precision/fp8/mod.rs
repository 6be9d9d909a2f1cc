//! float8: recipes, scales and the region in which layers compute in float8 in training; settings and scales of inference.
//!
//! See `docs/fp8.md`.

pub(super) mod autocast;
mod meta;
mod quant_config;
mod quant_words;
pub(super) mod recipe;
mod scale_method;
pub(super) mod settings;
mod window;

pub use autocast::{Fp8Autocast, fp8_autocast, fp8_recipe, is_fp8_enabled, set_measurement_mode};
pub(crate) use autocast::{
    Fp8Region, Measured, begin_forward, check_generation, fp8_number, note_replayed, reduce_amaxes,
    share_amaxes,
};
pub(crate) use meta::{Forward, check_device};
pub use meta::{Fp8Meta, Fp8State};
pub(crate) use quant_config::MEASURE;
pub use quant_config::{Inference, LayerList, QuantConfig};
pub use quant_words::{HpDtype, MeasureExclude, Observer, QuantFormat, QuantMode, ScaleDevice, ScaleFormat};
pub(crate) use recipe::rounds_stochastically;
pub use recipe::{
    AmaxComputeAlgo, AmaxFn, DelayedScaling, Float8CurrentScaling, Fp8Format, Recipe, RowwiseScaling,
    ScalingFactorFn,
};
pub(crate) use scale_method::{LayerType, Rounding, Scaler, WeightRows, WeightScales, kernel_format};
pub use scale_method::{ScaleMethod, ScaleParams};
pub use settings::Fp8Settings;
