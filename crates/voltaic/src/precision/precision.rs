//! The values of `trainer.precision`.

use std::fmt;

use serde_json::Value;
use tch::Kind;

use crate::error::Problem;

/// Values of `trainer.precision`.
pub const PRECISIONS: &str =
    "32-true, 16-mixed, bf16-mixed, 16-true, bf16-true, 64-true, fp8 (also 32, 16, bf16, 64)";

const HPU_PRECISIONS: &str = "32-true, 16-mixed, bf16-mixed, 16-true, bf16-true, fp8 (also 32, 16, bf16)";

/// What is said of float16 on the first generation of Gaudi.
pub(crate) const NO_FLOAT16: &str =
    "fp16 not supported: FP16 not supported on Gaudi, Gaudi2 or higher required";

/// What is said of float8 there.
pub(crate) const NO_FLOAT8: &str = "fp8 not supported: FP8 not supported on Gaudi, Gaudi2 or higher required";

/// Number format of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Precision {
    /// float32 everywhere.
    #[default]
    Full,
    /// Weights in float32, operators in bfloat16 by autocast.
    Bf16Mixed,
    /// Weights in float32, operators in float16 by autocast, the loss scaled so that small gradients survive.
    Fp16Mixed,
    /// Weights and computation in bfloat16.
    Bf16True,
    /// Weights and computation in float16.
    Fp16True,
    /// float64 everywhere.
    Double,
    /// Weights in float32; layers of the transformer engine compute products in float8.
    Fp8,
}

impl Precision {
    /// Reads a value of `trainer.precision`, a number or text, of any of Lightning's versions.
    ///
    /// `16` meant bfloat16 by HMP ([`HpuPrecisionPlugin`](super::HpuPrecisionPlugin)) on an HPU before it meant `16-mixed`, and still does there.
    ///
    /// # Errors
    /// That it is none, or that the accelerator cannot compute in it; with what is accepted.
    pub fn parse(value: &Value, accelerator: &str) -> Result<Self, Problem> {
        let is_hpu = accelerator == "hpu";
        let precision = match spelling(value).as_str() {
            "32" | "32-true" => Self::Full,
            "bf16" | "bf16-mixed" => Self::Bf16Mixed,
            "16" if is_hpu => Self::Bf16Mixed,
            "16" | "16-mixed" => Self::Fp16Mixed,
            "bf16-true" => Self::Bf16True,
            "16-true" => Self::Fp16True,
            "64" | "64-true" => Self::Double,
            "fp8" if accelerator != "cuda" => Self::Fp8,
            _ => {
                let accepted = if is_hpu { HPU_PRECISIONS } else { PRECISIONS };
                let shown = value.as_str().map_or_else(|| value.to_string(), |text| format!("'{text}'"));
                let what =
                    format!("`Trainer(accelerator='{accelerator}', precision={shown})` is not supported");
                return Err(Problem::new(what, format!("use one of {accepted}")));
            }
        };
        if is_hpu && precision == Self::Double {
            let remedy = format!("use accelerator=cpu, or {HPU_PRECISIONS}");
            return Err(Problem::new(format!("{value}: an HPU has no float64"), remedy));
        }
        Ok(precision)
    }

    /// The dtype that weights and batches are converted to; none if they stay as they are.
    pub fn true_dtype(self) -> Option<Kind> {
        match self {
            Self::Full | Self::Bf16Mixed | Self::Fp16Mixed | Self::Fp8 => None,
            Self::Bf16True => Some(Kind::BFloat16),
            Self::Fp16True => Some(Kind::Half),
            Self::Double => Some(Kind::Double),
        }
    }

    /// Whether tensors are float16, which the first generation of Gaudi has not got.
    pub fn has_float16(self) -> bool {
        matches!(self, Self::Fp16Mixed | Self::Fp16True)
    }

    /// What operators cast to; none if they do not.
    pub fn autocast_dtype(self) -> Option<Kind> {
        match self {
            Self::Bf16Mixed => Some(Kind::BFloat16),
            Self::Fp16Mixed => Some(Kind::Half),
            _ => None,
        }
    }
}

/// A value of `trainer.precision` as text, without regard to how it is written.
fn spelling(value: &Value) -> String {
    match value {
        Value::String(text) => text.trim().to_ascii_lowercase(),
        other => other.to_string(),
    }
}

/// A value as its author wrote it.
pub(crate) fn as_written(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Whether a value asks for float8.
pub(crate) fn is_float8(value: &Value) -> bool {
    matches!(spelling(value).as_str(), "fp8" | "transformer-engine")
}

/// Whether a precision of an HPU stands for HMP.
pub(crate) fn is_hmp(value: &Value) -> bool {
    spelling(value) == "16"
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "32-true",
            Self::Bf16Mixed => "bf16-mixed",
            Self::Fp16Mixed => "16-mixed",
            Self::Bf16True => "bf16-true",
            Self::Fp16True => "16-true",
            Self::Double => "64-true",
            Self::Fp8 => "fp8",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_spelling_of_both_eras_is_read() {
        for (value, on_cpu, on_hpu) in [
            (json!(32), Some(Precision::Full), Some(Precision::Full)),
            (json!("32"), Some(Precision::Full), Some(Precision::Full)),
            (json!("32-true"), Some(Precision::Full), Some(Precision::Full)),
            (json!(16), Some(Precision::Fp16Mixed), Some(Precision::Bf16Mixed)),
            (json!("16"), Some(Precision::Fp16Mixed), Some(Precision::Bf16Mixed)),
            (json!("16-mixed"), Some(Precision::Fp16Mixed), Some(Precision::Fp16Mixed)),
            (json!("bf16"), Some(Precision::Bf16Mixed), Some(Precision::Bf16Mixed)),
            (json!("bf16-mixed"), Some(Precision::Bf16Mixed), Some(Precision::Bf16Mixed)),
            (json!("BF16-true"), Some(Precision::Bf16True), Some(Precision::Bf16True)),
            (json!("16-true"), Some(Precision::Fp16True), Some(Precision::Fp16True)),
            (json!("64-true"), Some(Precision::Double), None),
            (json!(64), Some(Precision::Double), None),
            (json!("FP8"), Some(Precision::Fp8), Some(Precision::Fp8)),
        ] {
            assert_eq!(Precision::parse(&value, "cpu").ok(), on_cpu, "{value} on cpu");
            assert_eq!(Precision::parse(&value, "hpu").ok(), on_hpu, "{value} on hpu");
            if let Some(precision) = on_cpu {
                assert_eq!(Precision::parse(&json!(precision.to_string()), "cpu"), Ok(precision));
            }
        }
    }

    #[test]
    fn other_values_are_refused_with_those_that_are_not() {
        for value in [json!("fp32"), json!(8), json!(true), json!(""), json!("16-half"), json!([32])] {
            let message = Precision::parse(&value, "cpu").unwrap_err();
            let shown = value.to_string().replace('"', "'");
            let start = format!("`Trainer(accelerator='cpu', precision={shown})` is not supported; ");
            assert!(
                message.to_string().starts_with(&start) && message.remedy.ends_with(PRECISIONS),
                "{message}"
            );
        }
        for value in [json!("fp32"), json!("64-true"), json!(64)] {
            let message = Precision::parse(&value, "hpu").unwrap_err();
            let shown = value.to_string().replace('"', "");
            assert!(message.what.contains(&shown) && message.remedy.ends_with(HPU_PRECISIONS), "{message}");
        }
    }
}
