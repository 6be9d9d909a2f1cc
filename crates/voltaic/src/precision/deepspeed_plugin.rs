//! `DeepSpeedPrecisionPlugin`: the precision of a run with DeepSpeed's strategy.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Precision of a run with a DeepSpeed strategy, in place of `trainer.precision`.
///
/// With DeepSpeed, `bf16-mixed` and `bf16-true` both mean weights in bfloat16, of which float32 copies are updated.
///
/// Source: `lightning.pytorch.plugins.DeepSpeedPrecisionPlugin`, and Habana's `HPUDeepSpeedPrecisionPlugin`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DeepSpeedPrecisionPlugin {
    /// `32-true`, `bf16-mixed`, `bf16-true`, and the other values of `trainer.precision`.
    pub precision: Value,
}

impl Default for DeepSpeedPrecisionPlugin {
    fn default() -> Self {
        Self { precision: Value::from("32-true") }
    }
}

impl DeepSpeedPrecisionPlugin {
    /// The plugin for a precision, such as `bf16-mixed`.
    pub fn new(precision: impl Into<Value>) -> Self {
        Self { precision: precision.into() }
    }
}
