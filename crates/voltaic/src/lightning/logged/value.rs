//! A logged scalar: on its device, or a number of the host.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::device::Device;
use crate::graph;
use crate::nn::Metric;
use crate::precision::disable_casts;

/// How the values of an epoch become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceFx {
    /// Mean weighted by batch size.
    #[default]
    Mean,
    /// Sum.
    Sum,
    /// Smallest value.
    Min,
    /// Largest value.
    Max,
}

/// The smaller number; NaN if one of them is, as torch's `minimum` on any device.
pub(super) fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) }
}

/// The larger number; NaN if one of them is.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// A scalar to be logged: a tensor of one element, or a number.
#[derive(Debug)]
pub enum LogValue {
    /// A tensor of one element, on any device.
    Tensor(Tensor),
    /// A number of the host.
    Host(f64),
    /// A metric of the module, whose value is of its last batch for a step, and of all batches and ranks for an epoch.
    Metric(Arc<dyn Metric>),
}

impl<M: Metric + Clone + 'static> From<&M> for LogValue {
    fn from(metric: &M) -> Self {
        graph::refuse_capture("the step logs a metric, whose state is kept outside the graph");
        Self::Metric(Arc::new(metric.clone()))
    }
}

impl LogValue {
    /// The tensor, if it is one.
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }
}

impl From<&Tensor> for LogValue {
    fn from(tensor: &Tensor) -> Self {
        // the number of a step that is captured is not that of its replays
        if graph::is_capturing() {
            return Self::Tensor(tensor.detach());
        }
        // on the host the number costs less than another handle, and sums of numbers less than sums of tensors
        if Device::of(tensor).is_ok_and(|device| device == Device::Cpu)
            && tensor.numel() == 1
            && let Ok(number) = tensor.f_double_value(&[])
        {
            return Self::Host(number);
        }
        Self::Tensor(tensor.detach())
    }
}

impl From<Tensor> for LogValue {
    fn from(tensor: Tensor) -> Self {
        Self::from(&tensor)
    }
}

macro_rules! log_value_from_number {
    ($($number:ty),*) => {$(
        impl From<$number> for LogValue {
            fn from(value: $number) -> Self {
                Self::Host(value as f64)
            }
        }
    )*};
}
log_value_from_number!(f64, f32, i32, i64, u32, u64, usize);

#[cfg(test)]
thread_local! {
    /// Tensors read back on this thread.
    pub(crate) static READS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl LogValue {
    /// The same value.
    pub(crate) fn handle(&self) -> Self {
        match self {
            Self::Tensor(tensor) => Self::Tensor(tensor.shallow_clone()),
            Self::Host(value) => Self::Host(*value),
            Self::Metric(metric) => Self::Metric(Arc::clone(metric)),
        }
    }

    /// The value as it is now, whatever becomes of its tensor.
    pub(crate) fn snapshot(&self) -> Result<Self, tch::TchError> {
        Ok(match self {
            Self::Host(value) => Self::Host(*value),
            Self::Metric(metric) => Self::Metric(Arc::clone(metric)),
            Self::Tensor(tensor) => match Self::from(tensor) {
                Self::Tensor(tensor) => Self::Tensor(tensor.f_add_scalar(0)?),
                other => other,
            },
        })
    }

    /// The number. # Sync: reads a tensor back from its device.
    pub(crate) fn read(&self) -> f64 {
        match self {
            Self::Tensor(tensor) => {
                #[cfg(test)]
                READS.with(|reads| reads.set(reads.get() + 1));
                tensor.f_double_value(&[]).unwrap_or(f64::NAN)
            }
            Self::Host(value) => *value,
            Self::Metric(metric) => {
                metric.compute_last().map_or(f64::NAN, |value| Self::Tensor(value).read())
            }
        }
    }

    /// The value as a float32 scalar.
    pub(crate) fn to_f32(&self) -> Result<Self, tch::TchError> {
        Ok(match self {
            Self::Tensor(tensor) => Self::Tensor(tensor.f_to_kind(Kind::Float)?.f_reshape([] as [i64; 0])?),
            Self::Host(value) => Self::Host(f64::from(*value as f32)),
            Self::Metric(metric) => Self::Metric(Arc::clone(metric)),
        })
    }

    /// A scalar float32 tensor on the device of `like`.
    fn tensor_like(&self, like: &Tensor) -> Result<Tensor, tch::TchError> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.shallow_clone()),
            Self::Host(value) => like.f_full_like(*value)?.f_to_kind(Kind::Float),
            Self::Metric(_) => like.f_full_like(f64::NAN)?.f_to_kind(Kind::Float), // it reduces itself
        }
    }

    /// `self` combined with the next value of the epoch, weighted by `weight`.
    pub(crate) fn reduce(&self, next: &Self, fx: ReduceFx, weight: f64) -> Result<Self, tch::TchError> {
        if let (Self::Host(old), Self::Host(new)) = (self, next) {
            return Ok(Self::Host(match fx {
                ReduceFx::Mean => old + new * weight,
                ReduceFx::Sum => old + new,
                ReduceFx::Min => smaller(*old, *new),
                ReduceFx::Max => larger(*old, *new),
            }));
        }
        let like = match (self, next) {
            (Self::Tensor(tensor), _) | (_, Self::Tensor(tensor)) => tensor,
            _ => return Ok(Self::Host(f64::NAN)),
        };
        // sums of an epoch are not what autocast is for
        let _no_casts = Device::of(like).ok().and_then(|device| disable_casts(device).ok());
        let (old, new) = (self.tensor_like(like)?, next.tensor_like(like)?);
        Ok(Self::Tensor(match fx {
            ReduceFx::Mean => old.f_add(&new.f_mul_scalar(weight)?)?,
            ReduceFx::Sum => old.f_add(&new)?,
            ReduceFx::Min => old.f_minimum(&new)?,
            ReduceFx::Max => old.f_maximum(&new)?,
        }))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_no_number_shows_in_the_reduction_on_host_and_device() {
        let tensor = |value: f64| LogValue::Tensor(Tensor::from(value as f32));
        let host = LogValue::Host;
        for fx in [ReduceFx::Min, ReduceFx::Max, ReduceFx::Sum, ReduceFx::Mean] {
            for (old, new) in [(f64::NAN, 1.0), (1.0, f64::NAN)] {
                assert!(host(old).reduce(&host(new), fx, 1.0).unwrap().read().is_nan(), "{fx:?} on the host");
                assert!(tensor(old).reduce(&tensor(new), fx, 1.0).unwrap().read().is_nan(), "{fx:?}");
            }
        }
        assert_eq!(host(2.0).reduce(&host(1.0), ReduceFx::Min, 1.0).unwrap().read(), 1.0);
        assert_eq!(host(2.0).reduce(&host(1.0), ReduceFx::Max, 1.0).unwrap().read(), 2.0);
    }
}
