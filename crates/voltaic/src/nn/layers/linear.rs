//! The fully connected layer.

use std::fmt;

use tch::Tensor;

use crate::error::Result;
use crate::nn::calls::call::within_call;
use crate::nn::check::{at_least, empty, explain};
use crate::nn::compute::{Compute, ComputeMode};
use crate::nn::init;
use crate::nn::module::{Forward, Module};
use crate::nn::parallel::mode::ParallelMode;
use crate::nn::parameter::Parameter;

/// Applies `y = x Wᵀ + b` to the last dimension, as `torch.nn.Linear`.
///
/// Input `[*, in_features]`, output `[*, out_features]`, for any number of dimensions before the last.
///
/// ```
/// use voltaic::nn::{Forward, Linear};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let fc = Linear::new(784, 256)?;
/// let without_bias = Linear::builder(256, 10).bias(false).build()?;
/// # let digits = Tensor::zeros([64, 784], (Kind::Float, tch::Device::Cpu));
/// let logits = without_bias.forward(&fc.forward(&digits)?.relu())?;
/// assert_eq!(logits.size(), [64, 10]);
///
/// let error = fc.forward(&logits).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "Linear(784, 256): input of shape [64, 10] does not fit: last dimension must be 784"
/// );
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
pub struct Linear {
    /// Shape `[out_features, in_features]`.
    pub weight: Parameter,
    /// Shape `[out_features]`.
    pub bias: Option<Parameter>,
    in_features: i64,
    out_features: i64,
    /// In which numbers it computes.
    pub(in crate::nn) compute: ComputeMode,
    /// Whether this rank has a slice of it.
    #[module(skip)]
    pub(in crate::nn) parallel: ParallelMode,
}

impl Linear {
    /// A layer from `in_features` to `out_features` with a bias, both drawn uniformly within `1 / sqrt(in_features)`.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(in_features: i64, out_features: i64) -> Result<Self> {
        Self::builder(in_features, out_features).build()
    }

    /// A layer with options.
    pub fn builder(in_features: i64, out_features: i64) -> LinearBuilder {
        LinearBuilder { in_features, out_features, bias: true }
    }

    /// Size of the input's last dimension.
    pub fn in_features(&self) -> i64 {
        self.in_features
    }

    /// Size of the output's last dimension.
    pub fn out_features(&self) -> i64 {
        self.out_features
    }

    /// What the layer gives: its product, or this rank's part of it with what the ranks exchange.
    pub(super) fn product(&self, input: &Tensor, is_first_microbatch: Option<bool>) -> Result<Tensor> {
        let product = |input: &Tensor, in_features, bias: Option<&Parameter>| {
            self.own_product(input, in_features, bias, is_first_microbatch)
        };
        match self.parallel.get() {
            None => product(input, self.in_features, self.bias.as_ref()),
            Some(parallel) => {
                let is_fp8 = self.compute.active_fp8().is_some();
                parallel.product(input, (self.in_features, self.bias.as_ref(), is_fp8), product)
            }
        }
    }

    /// The product itself; the only place that computes it.
    fn own_product(
        &self,
        input: &Tensor,
        in_features: i64,
        bias: Option<&Parameter>,
        is_first_microbatch: Option<bool>,
    ) -> Result<Tensor> {
        let fits = input.size().last() == Some(&in_features);
        if fits && let Some((fp8, recipe)) = self.compute.active_fp8() {
            return fp8.product(&recipe, input, (&self.weight, bias), is_first_microbatch);
        }
        let plain = || {
            explain(self, input.f_linear(&self.weight, bias.map(|bias| bias.tensor())), input, |shape| {
                let expected = format!("last dimension must be {in_features}");
                (shape.last() != Some(&in_features)).then(|| (format!("{self:?}"), expected))
            })
        };
        match self.compute.get() {
            Compute::Quantized(layer) if fits => {
                layer.linear(input, &self.weight, bias.map(|bias| bias.tensor()))
            }
            Compute::Measured(observer) if fits => {
                observer.inputs(&[input])?;
                let output = plain()?;
                observer.output(&output)?;
                Ok(output)
            }
            Compute::Unmeasured(layer) => Err(layer.error()),
            _ => plain(),
        }
    }

    /// A call that knows which batch of an accumulation window it is of.
    pub(in crate::nn) fn forward_microbatch(&self, input: &Tensor, is_first: bool) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            Parameter::unshard_all([Some(&self.weight), self.bias.as_ref()])?;
            Ok(self.product(input, Some(is_first))?)
        })
    }
}

impl Forward for Linear {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            Parameter::unshard_all([Some(&self.weight), self.bias.as_ref()])?;
            Ok(self.product(input, None)?)
        })
    }
}

impl fmt::Debug for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bias, parallel) = (no_bias(&self.bias), &self.parallel);
        write!(f, "Linear({}, {}{bias}{parallel})", self.in_features, self.out_features)
    }
}

/// What a layer's debug text says of a bias: nothing, or that there is none.
pub(super) fn no_bias(bias: &Option<Parameter>) -> &'static str {
    if bias.is_some() { "" } else { ", bias=false" }
}

/// Options of a [`Linear`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct LinearBuilder {
    in_features: i64,
    out_features: i64,
    bias: bool,
}

impl LinearBuilder {
    /// Whether a bias is added (default `true`).
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn build(self) -> Result<Linear> {
        let Self { in_features, out_features, bias } = self;
        at_least("Linear", 1, [("in_features", &[in_features][..]), ("out_features", &[out_features])])?;
        let weight = Parameter::new(empty(&[out_features, in_features])?);
        let bias = if bias { Some(Parameter::new(empty(&[out_features])?)) } else { None };
        init::linear_(&weight, bias.as_deref())?;
        let (compute, parallel) = (ComputeMode::default(), ParallelMode::default());
        Ok(Linear { weight, bias, in_features, out_features, compute, parallel })
    }
}
