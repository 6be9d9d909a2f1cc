//! The transposed convolution, which enlarges its input.

use std::fmt;

use tch::Tensor;

use crate::config::setters;
use crate::error::Result;
use crate::nn::calls::call::within_call;
use crate::nn::check::{Sizes, at_least, divides, empty, explain, refuse};
use crate::nn::init;
use crate::nn::layers::linear::no_bias;
use crate::nn::module::{Forward, Module};
use crate::nn::parameter::Parameter;

/// Transposed convolution over two dimensions, as `torch.nn.ConvTranspose2d`: the gradient of a
/// [`Conv2d`](crate::nn::Conv2d) with respect to its input.
///
/// Input `[batch, in_channels, height, width]`, output `[batch, out_channels, *]`; the batch dimension may be missing.
/// `size_out = (size_in - 1) stride - 2 padding + dilation (kernel_size - 1) + output_padding + 1`.
///
/// ```
/// use voltaic::nn::{ConvTranspose2d, Forward};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let enlarge = ConvTranspose2d::builder(16, 8, 4).stride(2).padding(1).build()?;
/// # let features = Tensor::zeros([2, 16, 7, 7], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(enlarge.forward(&features)?.size(), [2, 8, 14, 14]);
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
pub struct ConvTranspose2d {
    /// Shape `[in_channels, out_channels / groups, *kernel_size]`.
    pub weight: Parameter,
    /// Shape `[out_channels]`.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: ConvTranspose2dBuilder,
}

impl ConvTranspose2d {
    /// A transposed convolution of stride 1 without padding, with a bias.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(in_channels: i64, out_channels: i64, kernel_size: impl Sizes<2>) -> Result<Self> {
        Self::builder(in_channels, out_channels, kernel_size).build()
    }

    /// A transposed convolution with options.
    pub fn builder(
        in_channels: i64,
        out_channels: i64,
        kernel_size: impl Sizes<2>,
    ) -> ConvTranspose2dBuilder {
        ConvTranspose2dBuilder {
            in_channels,
            out_channels,
            kernel_size: kernel_size.sizes(),
            stride: [1; 2],
            padding: [0; 2],
            output_padding: [0; 2],
            dilation: [1; 2],
            groups: 1,
            bias: true,
        }
    }
}

impl Forward for ConvTranspose2d {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            Parameter::unshard_all([Some(&self.weight), self.bias.as_ref()])?;
            let options = &self.options;
            let output = input.f_conv_transpose2d(
                &self.weight,
                self.bias.as_deref(),
                options.stride,
                options.padding,
                options.output_padding,
                options.groups,
                options.dilation,
            );
            Ok(explain(self, output, input, |shape| {
                let expected = if shape.len() != 3 && shape.len() != 4 {
                    "3 or 4 dimensions, [batch, channels, height, width], are needed".to_owned()
                } else if shape[shape.len() - 3] != options.in_channels {
                    format!(
                        "dimension {} holds the channels and must be {}",
                        shape.len() - 3,
                        options.in_channels
                    )
                } else {
                    return None;
                };
                Some((format!("{self:?}"), expected))
            })?)
        })
    }
}

impl fmt::Debug for ConvTranspose2d {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConvTranspose2dBuilder { in_channels, out_channels, kernel_size, stride, .. } = &self.options;
        write!(
            f,
            "ConvTranspose2d({in_channels}, {out_channels}, kernel_size={kernel_size:?}, stride={stride:?}{})",
            no_bias(&self.bias)
        )
    }
}

/// Options of a [`ConvTranspose2d`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct ConvTranspose2dBuilder {
    in_channels: i64,
    out_channels: i64,
    kernel_size: [i64; 2],
    stride: [i64; 2],
    padding: [i64; 2],
    output_padding: [i64; 2],
    dilation: [i64; 2],
    groups: i64,
    bias: bool,
}

impl ConvTranspose2dBuilder {
    setters! {
        /// Steps in the output between neighbours of the input (default 1).
        stride: impl Sizes<2> = stride.sizes();
        /// Rows and columns cut from each side of the output (default 0).
        padding: impl Sizes<2> = padding.sizes();
        /// Rows and columns added at the lower and right side of the output (default 0); below stride or dilation.
        output_padding: impl Sizes<2> = output_padding.sizes();
        /// Steps between the elements of the kernel (default 1).
        dilation: impl Sizes<2> = dilation.sizes();
        /// Splits the channels into groups that do not see each other (default 1); must divide both channel counts.
        groups: i64;
        /// Whether a bias is added (default `true`).
        bias: bool;
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1, a padding is negative or too
    /// large, or `groups` does not divide the channels.
    pub fn build(self) -> Result<ConvTranspose2d> {
        const NAME: &str = "ConvTranspose2d";
        let Self { in_channels, out_channels, groups, .. } = self;
        at_least(
            NAME,
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
        at_least(NAME, 0, [("padding", &self.padding[..]), ("output_padding", &self.output_padding)])?;
        divides(NAME, ("groups", groups), ("in_channels", in_channels))?;
        divides(NAME, ("groups", groups), ("out_channels", out_channels))?;
        if (0..2).any(|i| self.output_padding[i] >= self.stride[i].max(self.dilation[i])) {
            return refuse(
                NAME,
                format!("output_padding is {:?} with stride {:?}", self.output_padding, self.stride),
                "give an output_padding below the stride or the dilation".to_owned(),
            );
        }
        let [height, width] = self.kernel_size;
        let weight = Parameter::new(empty(&[in_channels, out_channels / groups, height, width])?);
        let bias = if self.bias { Some(Parameter::new(empty(&[out_channels])?)) } else { None };
        init::linear_(&weight, bias.as_deref())?;
        Ok(ConvTranspose2d { weight, bias, options: self })
    }
}
