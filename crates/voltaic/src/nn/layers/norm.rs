//! Normalisation of each sample by itself: over its last dimensions, or over groups of its channels.

use std::fmt;

use tch::Tensor;

use crate::config::setters;
use crate::error::Result;
use crate::nn::calls::call::within_call;
use crate::nn::check::{at_least, divides, empty, explain};
use crate::nn::init;
use crate::nn::module::{Forward, Module};
use crate::nn::parameter::Parameter;

/// Sizes of the last dimensions over which a [`LayerNorm`] works: `512`, `[8, 64]`, a slice or a `Vec`.
pub trait NormalizedShape {
    /// The sizes.
    fn into_sizes(self) -> Vec<i64>;
}

impl NormalizedShape for i64 {
    fn into_sizes(self) -> Vec<i64> {
        vec![self]
    }
}

impl<const N: usize> NormalizedShape for [i64; N] {
    fn into_sizes(self) -> Vec<i64> {
        self.to_vec()
    }
}

impl NormalizedShape for &[i64] {
    fn into_sizes(self) -> Vec<i64> {
        self.to_vec()
    }
}

impl NormalizedShape for Vec<i64> {
    fn into_sizes(self) -> Vec<i64> {
        self
    }
}

/// Normalises over the last dimensions, as `torch.nn.LayerNorm` ([Ba et al., 2016](https://arxiv.org/abs/1607.06450)).
///
/// Input `[*, *normalized_shape]`; the output has the same shape.
///
/// ```
/// use voltaic::nn::{Forward, LayerNorm};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let ln = LayerNorm::new(128)?;
/// let without_bias = LayerNorm::builder([4, 128]).bias(false).build()?;
/// # let hidden = Tensor::zeros([2, 4, 128], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(without_bias.forward(&ln.forward(&hidden)?)?.size(), [2, 4, 128]);
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
pub struct LayerNorm {
    /// Scale of each element, initially 1.
    pub weight: Option<Parameter>,
    /// Shift of each element, initially 0.
    pub bias: Option<Parameter>,
    normalized_shape: Vec<i64>,
    eps: f64,
}

impl LayerNorm {
    /// A layer with scale and shift and `eps` 1e-5.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(normalized_shape: impl NormalizedShape) -> Result<Self> {
        Self::builder(normalized_shape).build()
    }

    /// A layer with options.
    pub fn builder(normalized_shape: impl NormalizedShape) -> LayerNormBuilder {
        let normalized_shape = normalized_shape.into_sizes();
        LayerNormBuilder { normalized_shape, eps: 1e-5, elementwise_affine: true, bias: true }
    }
}

impl Forward for LayerNorm {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            Parameter::unshard_all([self.weight.as_ref(), self.bias.as_ref()])?;
            let (weight, bias) = (self.weight.as_deref(), self.bias.as_deref());
            let output = input.f_layer_norm(&self.normalized_shape, weight, bias, self.eps, true);
            Ok(explain(self, output, input, |shape| {
                let expected = format!("last dimensions must be {:?}", self.normalized_shape);
                (!shape.ends_with(&self.normalized_shape)).then(|| (format!("{self:?}"), expected))
            })?)
        })
    }
}

impl fmt::Debug for LayerNorm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayerNorm({:?})", self.normalized_shape)
    }
}

/// Options of a [`LayerNorm`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct LayerNormBuilder {
    normalized_shape: Vec<i64>,
    eps: f64,
    elementwise_affine: bool,
    bias: bool,
}

impl LayerNormBuilder {
    setters! {
        /// Added to the variance before its root is taken (default 1e-5).
        eps: f64;
        /// Whether each element has a trained scale and shift (default `true`); `false` leaves out both.
        elementwise_affine: bool;
        /// Whether the scale is accompanied by a shift (default `true`).
        bias: bool;
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1 or there is none.
    pub fn build(self) -> Result<LayerNorm> {
        let Self { normalized_shape, eps, elementwise_affine, bias } = self;
        at_least("LayerNorm", 1, [("normalized_shape", normalized_shape.as_slice())])?;
        at_least("LayerNorm", 1, [("number of dimensions", &[normalized_shape.len() as i64][..])])?;
        let (weight, bias) = scale_and_shift(&normalized_shape, elementwise_affine, bias)?;
        Ok(LayerNorm { weight, bias, normalized_shape, eps })
    }
}

/// Normalises over groups of channels, as `torch.nn.GroupNorm` ([Wu and He, 2018](https://arxiv.org/abs/1803.08494)).
///
/// Input `[batch, num_channels, *]`; the output has the same shape.
///
/// ```
/// use voltaic::nn::{Forward, GroupNorm};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let gn = GroupNorm::new(8, 64)?;
/// # let features = Tensor::zeros([2, 64, 7, 7], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(gn.forward(&features)?.size(), [2, 64, 7, 7]);
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
pub struct GroupNorm {
    /// Scale of each channel, `[num_channels]`, initially 1.
    pub weight: Option<Parameter>,
    /// Shift of each channel, `[num_channels]`, initially 0.
    pub bias: Option<Parameter>,
    num_groups: i64,
    num_channels: i64,
    eps: f64,
}

impl GroupNorm {
    /// A layer with scale and shift and `eps` 1e-5.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if `num_groups` does not divide `num_channels`.
    pub fn new(num_groups: i64, num_channels: i64) -> Result<Self> {
        Self::builder(num_groups, num_channels).build()
    }

    /// A layer with options.
    pub fn builder(num_groups: i64, num_channels: i64) -> GroupNormBuilder {
        GroupNormBuilder { num_groups, num_channels, eps: 1e-5, affine: true }
    }
}

impl Forward for GroupNorm {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            Parameter::unshard_all([self.weight.as_ref(), self.bias.as_ref()])?;
            let (weight, bias) = (self.weight.as_deref(), self.bias.as_deref());
            let output = input.f_group_norm(self.num_groups, weight, bias, self.eps, true);
            Ok(explain(self, output, input, |shape| {
                let expected = format!("dimension 1 holds the channels and must be {}", self.num_channels);
                (shape.get(1) != Some(&self.num_channels)).then(|| (format!("{self:?}"), expected))
            })?)
        })
    }
}

impl fmt::Debug for GroupNorm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupNorm({}, {})", self.num_groups, self.num_channels)
    }
}

/// Options of a [`GroupNorm`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct GroupNormBuilder {
    num_groups: i64,
    num_channels: i64,
    eps: f64,
    affine: bool,
}

impl GroupNormBuilder {
    setters! {
        /// Added to the variance before its root is taken (default 1e-5).
        eps: f64;
        /// Whether each channel has a trained scale and shift (default `true`).
        affine: bool;
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if `num_groups` does not divide `num_channels`.
    pub fn build(self) -> Result<GroupNorm> {
        let Self { num_groups, num_channels, eps, affine } = self;
        at_least("GroupNorm", 1, [("num_groups", &[num_groups][..]), ("num_channels", &[num_channels])])?;
        divides("GroupNorm", ("num_groups", num_groups), ("num_channels", num_channels))?;
        let (weight, bias) = scale_and_shift(&[num_channels], affine, true)?;
        Ok(GroupNorm { weight, bias, num_groups, num_channels, eps })
    }
}

fn scale_and_shift(
    shape: &[i64],
    affine: bool,
    bias: bool,
) -> Result<(Option<Parameter>, Option<Parameter>)> {
    let filled = |wanted: bool, value| -> Result<Option<Parameter>> {
        if !wanted {
            return Ok(None);
        }
        let tensor = empty(shape)?;
        init::constant_(&tensor, value)?;
        Ok(Some(Parameter::new(tensor)))
    };
    Ok((filled(affine, 1.0)?, filled(affine && bias, 0.0)?))
}
