//! `DeepSpeedPrecisionPlugin`: the precision of a run with DeepSpeed's strategy.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use voltaic_macros::Defaults;

use super::fp8::recipe::Recipe;
use super::fp8::settings::{Fp8Settings, InferenceKeys, fp8_plugin};
use super::precision::Precision;
use crate::error::ConfigError;

/// Precision of a run with a DeepSpeed strategy, in place of `trainer.precision`.
///
/// With DeepSpeed, `bf16-mixed` and `bf16-true` both mean weights in bfloat16, of which float32 copies are updated.
///
/// Source: `lightning.pytorch.plugins.DeepSpeedPrecisionPlugin`, and Habana's `HPUDeepSpeedPrecisionPlugin`.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DeepSpeedPrecisionPlugin {
    /// `32-true`, `bf16-mixed`, `bf16-true`, and the other values of `trainer.precision`.
    #[default(Value::from("32-true"))]
    pub precision: Value,
    /// With precision fp8: layers of the module compute in float8, if it has none that do.
    pub replace_layers: bool,
    /// With precision fp8: how scales come about; `DelayedScaling` with its defaults if it is null.
    pub recipe: Option<Recipe>,
    /// With `replace_layers`: modules whose layers stay as they are, by type, fqn, or a pattern of fqns with `*`.
    pub exclude_layers: Vec<String>,
    /// With `replace_layers`: layers with fewer weights stay as they are.
    pub min_weights: i64,
    /// With precision fp8: layers measure, or compute in float8 with scales of measurements, in validate, test and predict.
    pub inference: bool,
    /// With `inference`: false measures, true quantizes, a path or a mapping has the settings; null: `QUANT_CONFIG`, else true.
    pub quant: Value,
    /// With `inference`: the folder of the measurements; null: `HABANA_LOGS`, else the folder of the run.
    pub fp8_data_path: Option<PathBuf>,
}

fp8_plugin!(DeepSpeedPrecisionPlugin);

impl DeepSpeedPrecisionPlugin {
    /// The plugin for a precision, such as `bf16-mixed`.
    pub fn new(precision: impl Into<Value>) -> Self {
        Self { precision: precision.into(), ..Self::default() }
    }
}
