//! What a checkpoint keeps of the values logged in an epoch that is not over.

use serde::{Deserialize, Serialize};

use super::scope::LogOptions;

/// Logged values of an epoch in progress, as a checkpoint keeps them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MetricsState {
    pub(super) train: Vec<EntryState>,
    pub(super) finished: Vec<(String, Number)>,
}

impl MetricsState {
    /// Without the values of the epoch that is not over, which another rank counts.
    pub(crate) fn without_open_epoch(self) -> Self {
        Self { train: Vec::new(), ..self }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct EntryState {
    pub name: String,
    pub options: LogOptions,
    pub last: Number,
    pub reduced: Option<Number>,
    pub weight: f64,
    /// Fqn of the metric that was logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
}

/// A float that survives JSON, which has no NaN and no infinity.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(into = "NumberText", from = "NumberText")]
pub(super) struct Number(pub f64);

impl PartialEq for Number {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits() || (self.0.is_nan() && other.0.is_nan())
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum NumberText {
    Finite(f64),
    Text(String),
}

impl From<Number> for NumberText {
    fn from(number: Number) -> Self {
        if number.0.is_finite() { Self::Finite(number.0) } else { Self::Text(number.0.to_string()) }
    }
}

impl From<NumberText> for Number {
    fn from(text: NumberText) -> Self {
        Self(match text {
            NumberText::Finite(value) => value,
            NumberText::Text(text) => text.parse().unwrap_or(f64::NAN),
        })
    }
}
