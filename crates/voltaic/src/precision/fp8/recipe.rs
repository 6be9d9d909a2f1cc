//! Recipes: how scales come about.

use std::fmt;
use std::sync::{Arc, OnceLock};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use tch::{Kind, Tensor};
use voltaic_macros::Defaults;

use crate::config::conversions;
use crate::error::{ConfigError, Result};

/// Which of the two formats tensors are cast to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Fp8Format {
    /// 5 bits of the exponent and 2 of the fraction, up to 57344, for all.
    #[default]
    #[serde(alias = "e5m2")]
    E5M2,
    /// 4 bits of the exponent and 3 of the fraction, up to 240, forward; [`Fp8Format::E5M2`] backward, with stochastic rounding of
    /// gradients.
    #[serde(rename = "HYBRID", alias = "hybrid")]
    Hybrid,
}

impl Fp8Format {
    /// The dtype of inputs and weights in the forward pass.
    pub fn forward_dtype(self) -> Kind {
        match self {
            Self::E5M2 => Kind::Float8e5m2,
            Self::Hybrid => Kind::Float8e4m3fn,
        }
    }

    /// The dtype of all in the backward pass.
    pub fn backward_dtype(self) -> Kind {
        Kind::Float8e5m2
    }
}

/// Whether gradients are rounded at random: those of [`Fp8Format::Hybrid`], or as `PT_TE_FORCE_SR_BWD` says.
pub(crate) fn rounds_stochastically(format: Fp8Format) -> bool {
    static FORCED: OnceLock<Option<bool>> = OnceLock::new();
    let forced = FORCED.get_or_init(|| {
        let value = std::env::var("PT_TE_FORCE_SR_BWD").ok()?;
        Some(matches!(value.to_ascii_lowercase().as_str(), "true" | "1"))
    });
    forced.unwrap_or(format == Fp8Format::Hybrid)
}

/// Which largest magnitude of the history a scale is made of.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AmaxComputeAlgo {
    /// The last one.
    #[default]
    MostRecent,
    /// The largest one.
    Max,
    /// What a function makes of the history `[rows, tensors]` float32: `[tensors]`.
    #[serde(skip_deserializing)]
    #[schemars(skip)]
    Custom(AmaxFn),
}

/// A function of your own from the history of largest magnitudes, `[rows, tensors]` float32, to those that scales are made of,
/// `[tensors]`. It is called with operators on tensors only, so that graphs have it.
#[derive(Clone)]
pub struct AmaxFn(Arc<OfHistory>);

/// From a history to the largest magnitudes.
type OfHistory = dyn Fn(&Tensor) -> anyhow::Result<Tensor> + Send + Sync;

/// A function of your own from largest magnitudes and scales, `[tensors]` float32 each, the largest number of the format, and the recipe
/// to new scales, `[tensors]`. It is called with operators on tensors only, so that graphs have it.
#[derive(Clone)]
pub struct ScalingFactorFn(Arc<ScalingFactorCode>);

type ScalingFactorCode =
    dyn Fn(&Tensor, &Tensor, f64, &DelayedScaling) -> anyhow::Result<Tensor> + Send + Sync;

/// A saved configuration says that there was a function.
impl Serialize for AmaxFn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("a function")
    }
}

impl AmaxFn {
    /// Wraps a function.
    pub fn new(function: impl Fn(&Tensor) -> anyhow::Result<Tensor> + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    pub(super) fn call(&self, history: &Tensor) -> anyhow::Result<Tensor> {
        (self.0)(history)
    }
}

impl ScalingFactorFn {
    /// Wraps a function.
    pub fn new(
        function: impl Fn(&Tensor, &Tensor, f64, &DelayedScaling) -> anyhow::Result<Tensor>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self(Arc::new(function))
    }

    pub(super) fn call(
        &self,
        amax: &Tensor,
        scale: &Tensor,
        fp8_max: f64,
        recipe: &DelayedScaling,
    ) -> anyhow::Result<Tensor> {
        (self.0)(amax, scale, fp8_max, recipe)
    }
}

macro_rules! function {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                Arc::ptr_eq(&self.0, &other.0)
            }
        }
    )*};
}

function!(AmaxFn, ScalingFactorFn);

/// The longest history of a scale.
const MAX_ROWS: usize = 1 << 16;

/// Scales from the largest magnitudes of earlier steps.
///
/// A scale is `2^(floor(log2(fp8_max / amax)) - margin)`; it stays where the largest magnitude is 0, infinite or no number. The first step
/// has scales of 1.
///
/// Source: `habana_frameworks.torch.hpex.experimental.transformer_engine.recipe.DelayedScaling`, with its defaults, which differ from
/// NVIDIA's.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DelayedScaling {
    /// Powers of two that are kept free below the largest number.
    pub margin: i64,
    /// Forward passes from one making of scales to the next.
    #[default(1)]
    pub interval: u64,
    /// The formats.
    pub fp8_format: Fp8Format,
    /// Rows of the history, at most 65536.
    #[default(1)]
    pub amax_history_len: usize,
    /// Which largest magnitude of the history counts.
    pub amax_compute_algo: AmaxComputeAlgo,
    /// Whether a product computes in high precision: forward, gradient of the input, gradient of the weights. All must be false, as in
    /// the original.
    pub override_linear_precision: (bool, bool, bool),
    /// In place of the formula above.
    #[serde(skip)]
    pub scaling_factor_compute_algo: Option<ScalingFactorFn>,
    /// Whether the largest magnitudes are those of all ranks.
    #[default(true)]
    pub reduce_amax: bool,
}

/// Scales from the largest magnitude of each tensor itself, in a pass over it before it is cast. Nothing is kept from step to step.
///
/// Source: `Float8CurrentScaling` of NVIDIA's transformer engine, with scales that are powers of two.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Float8CurrentScaling {
    /// Powers of two that are kept free below the largest number.
    pub margin: i64,
    /// The formats.
    pub fp8_format: Fp8Format,
}

/// A scale for each row of each factor of a product, along which it is summed. Nothing is kept from step to step.
///
/// Source: the row-wise recipe of torchao's `float8` training, with scales that are powers of two.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RowwiseScaling {
    /// Powers of two that are kept free below the largest number.
    pub margin: i64,
    /// The formats.
    pub fp8_format: Fp8Format,
}

/// How scales come about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum Recipe {
    /// From the largest magnitudes of earlier steps.
    DelayedScaling(DelayedScaling),
    /// From each tensor itself.
    Float8CurrentScaling(Float8CurrentScaling),
    /// From each row itself.
    RowwiseScaling(RowwiseScaling),
}

impl Default for Recipe {
    fn default() -> Self {
        Self::DelayedScaling(DelayedScaling::default())
    }
}

conversions! { Recipe:
    DelayedScaling => |recipe| Self::DelayedScaling(recipe),
    Float8CurrentScaling => |recipe| Self::Float8CurrentScaling(recipe),
    RowwiseScaling => |recipe| Self::RowwiseScaling(recipe),
}

impl Recipe {
    /// The formats.
    pub fn fp8_format(&self) -> Fp8Format {
        match self {
            Self::DelayedScaling(recipe) => recipe.fp8_format,
            Self::Float8CurrentScaling(recipe) => recipe.fp8_format,
            Self::RowwiseScaling(recipe) => recipe.fp8_format,
        }
    }

    /// The settings of scales from earlier steps, if it is that recipe.
    pub(crate) fn delayed(&self) -> Option<&DelayedScaling> {
        match self {
            Self::DelayedScaling(recipe) => Some(recipe),
            _ => None,
        }
    }

    /// Refuses what no recipe has.
    ///
    /// # Errors
    /// An interval or a history of 0, a margin that leaves no number, an override.
    pub fn check(&self) -> Result<(), ConfigError> {
        let margin = match self {
            Self::DelayedScaling(recipe) => recipe.margin,
            Self::Float8CurrentScaling(recipe) => recipe.margin,
            Self::RowwiseScaling(recipe) => recipe.margin,
        };
        if !(-100..=100).contains(&margin) {
            let what = format!("{margin} powers of two");
            return Err(ConfigError::new("recipe.margin", what, "use one from -100 to 100, mostly 0"));
        }
        let Some(recipe) = self.delayed() else { return Ok(()) };
        if recipe.interval == 0 {
            let what = "0 passes from one making of scales to the next";
            return Err(ConfigError::new("recipe.interval", what, "use 1 or more"));
        }
        if !(1..=MAX_ROWS).contains(&recipe.amax_history_len) {
            let what = format!("a history of {} rows", recipe.amax_history_len);
            let remedy = "use 1, as the original does, up to 65536";
            return Err(ConfigError::new("recipe.amax_history_len", what, remedy));
        }
        if recipe.override_linear_precision != (false, false, false) {
            let what = format!("{:?}: No override is currently supported.", recipe.override_linear_precision);
            let remedy = "leave it out, and exclude layers from fp8 in place of it";
            return Err(ConfigError::new("recipe.override_linear_precision", what, remedy));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_habanas() {
        let recipe: Recipe =
            serde_json::from_str(r#"{"class_path": "DelayedScaling", "init_args": {}}"#).unwrap();
        assert_eq!(recipe, Recipe::default());
        let DelayedScaling { margin, interval, fp8_format, amax_history_len, reduce_amax, .. } =
            recipe.delayed().unwrap().clone();
        assert_eq!((margin, interval, fp8_format, amax_history_len), (0, 1, Fp8Format::E5M2, 1));
        assert!(reduce_amax && recipe.check().is_ok());
    }

    #[test]
    fn what_is_refused() {
        let base = DelayedScaling::default;
        for (recipe, expected) in [
            (DelayedScaling { interval: 0, ..base() }, "recipe.interval: 0 passes"),
            (DelayedScaling { amax_history_len: 0, ..base() }, "a history of 0 rows"),
            (DelayedScaling { amax_history_len: usize::MAX, ..base() }, "use 1, as the original does, up to"),
            (DelayedScaling { margin: 200, ..base() }, "200 powers of two"),
            (
                DelayedScaling { override_linear_precision: (true, false, false), ..base() },
                "No override is currently supported.",
            ),
        ] {
            let message = Recipe::from(recipe).check().unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
