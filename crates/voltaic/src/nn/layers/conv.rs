//! Convolutions over one and two dimensions.

use std::fmt;

use tch::Tensor;

use crate::config::setters;
use crate::error::Result;
use crate::nn::calls::call::within_call;
use crate::nn::check::{Sizes, at_least, divides, empty, explain};
use crate::nn::compute::{Compute, ComputeMode};
use crate::nn::init;
use crate::nn::layers::linear::no_bias;
use crate::nn::module::{Forward, Module};
use crate::nn::parameter::Parameter;

/// Convolution over one dimension, as `torch.nn.Conv1d`: input `[batch, in_channels, length]`.
pub type Conv1d = Conv<1>;

/// Convolution over two dimensions, as `torch.nn.Conv2d`: input `[batch, in_channels, height, width]`.
pub type Conv2d = Conv<2>;

/// Convolution over `N` dimensions: [`Conv1d`] and [`Conv2d`].
///
/// Input `[batch, in_channels, *]`, output `[batch, out_channels, *]`; the batch dimension may be missing. Along each
/// dimension, `size_out = (size_in + 2 padding - dilation (kernel_size - 1) - 1) / stride + 1`, rounded down.
///
/// ```
/// use voltaic::nn::{Conv2d, Forward};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let conv1 = Conv2d::new(1, 32, 3)?;
/// let conv2 = Conv2d::builder(32, 64, (3, 5)).stride(2).padding((1, 2)).bias(false).build()?;
/// # let images = Tensor::zeros([8, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
/// let features = conv2.forward(&conv1.forward(&images)?)?;
/// assert_eq!(features.size(), [8, 64, 13, 13]);
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
#[module(type_name = Self::NAME)]
pub struct Conv<const N: usize> {
    /// Shape `[out_channels, in_channels / groups, *kernel_size]`.
    pub weight: Parameter,
    /// Shape `[out_channels]`.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: ConvBuilder<N>,
    /// In which numbers it computes.
    pub(in crate::nn) compute: ComputeMode,
}

impl<const N: usize> Conv<N> {
    const NAME: &'static str = if N == 1 { "Conv1d" } else { "Conv2d" };

    /// A convolution of stride 1 without padding, with a bias, drawn uniformly within `1 / sqrt(fan_in)`.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(in_channels: i64, out_channels: i64, kernel_size: impl Sizes<N>) -> Result<Self> {
        Self::builder(in_channels, out_channels, kernel_size).build()
    }

    /// A convolution with options.
    pub fn builder(in_channels: i64, out_channels: i64, kernel_size: impl Sizes<N>) -> ConvBuilder<N> {
        ConvBuilder {
            in_channels,
            out_channels,
            kernel_size: kernel_size.sizes(),
            stride: [1; N],
            padding: [0; N],
            dilation: [1; N],
            groups: 1,
            bias: true,
        }
    }

    fn convolve(&self, input: &Tensor) -> Result<Tensor> {
        let plain = || {
            let output = self.convolve_by(input, &self.weight, self.bias.as_deref());
            explain(self, output, input, |shape| self.misfit(shape))
        };
        match self.compute.get() {
            Compute::Quantized(layer) if self.misfit(&input.size()).is_none() => {
                let own = (&*self.weight, self.bias.as_deref());
                layer.convolve(input, own, N, |input, weight| Ok(self.convolve_by(input, weight, None)?))
            }
            Compute::Measured(observer) => {
                let output = plain()?;
                observer.inputs(&[input])?;
                observer.output(&output)?;
                Ok(output)
            }
            Compute::Unmeasured(layer) => Err(layer.error()),
            _ => plain(),
        }
    }

    fn convolve_by(
        &self,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor, tch::TchError> {
        let ConvBuilder { stride, padding, dilation, groups, .. } = &self.options;
        if N == 1 {
            input.f_conv1d(weight, bias, stride, padding, dilation, *groups)
        } else {
            input.f_conv2d(weight, bias, stride, padding, dilation, *groups)
        }
    }

    fn misfit(&self, shape: &[i64]) -> Option<(String, String)> {
        let ConvBuilder { in_channels, kernel_size, padding, dilation, .. } = &self.options;
        let spatial = shape.len().checked_sub(N).map_or(shape, |start| &shape[start..]);
        let expected = if shape.len() != N + 1 && shape.len() != N + 2 {
            format!("{} or {} dimensions, [batch, channels, *], are needed", N + 1, N + 2)
        } else if shape[shape.len() - N - 1] != *in_channels {
            format!("dimension {} holds the channels and must be {in_channels}", shape.len() - N - 1)
        } else if (0..N).any(|i| spatial[i] + 2 * padding[i] < dilation[i] * (kernel_size[i] - 1) + 1) {
            format!("with padding {padding:?} it is smaller than the kernel {kernel_size:?}")
        } else {
            return None;
        };
        Some((format!("{self:?}"), expected))
    }
}

impl<const N: usize> Forward for Conv<N> {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            Parameter::unshard_all([Some(&self.weight), self.bias.as_ref()])?;
            Ok(self.convolve(input)?)
        })
    }
}

impl<const N: usize> fmt::Debug for Conv<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConvBuilder { in_channels, out_channels, kernel_size, stride, padding, dilation, groups, .. } =
            &self.options;
        write!(f, "{}({in_channels}, {out_channels}, kernel_size={kernel_size:?}", Self::NAME)?;
        for (name, values, default) in
            [("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)]
        {
            if *values != [default; N] {
                write!(f, ", {name}={values:?}")?;
            }
        }
        if *groups != 1 {
            write!(f, ", groups={groups}")?;
        }
        write!(f, "{})", no_bias(&self.bias))
    }
}

/// Options of a [`Conv1d`] or [`Conv2d`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct ConvBuilder<const N: usize> {
    in_channels: i64,
    out_channels: i64,
    kernel_size: [i64; N],
    stride: [i64; N],
    padding: [i64; N],
    dilation: [i64; N],
    groups: i64,
    bias: bool,
}

impl<const N: usize> ConvBuilder<N> {
    setters! {
        /// Steps between the places of the kernel (default 1).
        stride: impl Sizes<N> = stride.sizes();
        /// Zeros added on both sides of each dimension (default 0).
        padding: impl Sizes<N> = padding.sizes();
        /// Steps between the elements of the kernel (default 1).
        dilation: impl Sizes<N> = dilation.sizes();
        /// Splits the channels into groups that do not see each other (default 1); must divide both channel counts.
        groups: i64;
        /// Whether a bias is added (default `true`).
        bias: bool;
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1, the padding is negative, or
    /// `groups` does not divide the channels.
    pub fn build(self) -> Result<Conv<N>> {
        let name = Conv::<N>::NAME;
        let Self { in_channels, out_channels, groups, .. } = self;
        at_least(
            name,
            1,
            [
                ("in_channels", &[in_channels][..]),
                ("out_channels", &[out_channels]),
                ("kernel_size", &self.kernel_size),
                ("stride", &self.stride),
                ("dilation", &self.dilation),
                ("groups", &[groups]),
            ],
        )?;
        at_least(name, 0, [("padding", &self.padding[..])])?;
        divides(name, ("groups", groups), ("in_channels", in_channels))?;
        divides(name, ("groups", groups), ("out_channels", out_channels))?;
        let shape = [&[out_channels, in_channels / groups][..], &self.kernel_size].concat();
        let weight = Parameter::new(empty(&shape)?);
        let bias = if self.bias { Some(Parameter::new(empty(&[out_channels])?)) } else { None };
        init::linear_(&weight, bias.as_deref())?;
        Ok(Conv { weight, bias, options: self, compute: ComputeMode::default() })
    }
}
