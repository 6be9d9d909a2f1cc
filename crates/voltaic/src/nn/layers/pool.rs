//! Pools over height and width, and flattening.

use tch::Tensor;

use crate::config::setters;
use crate::error::Result;
use crate::nn::calls::call::within_call;
use crate::nn::check::{Sizes, at_least, explain, refuse};
use crate::nn::module::{Forward, Module};

/// The largest value under each window, as `torch.nn.MaxPool2d`.
///
/// Input `[batch, channels, height, width]`; the batch dimension may be missing. The stride is the window's size
/// unless given.
///
/// ```
/// use voltaic::nn::{Forward, MaxPool2d};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let halve = MaxPool2d::new(2)?;
/// let overlapping = MaxPool2d::builder(3).stride(2).padding(1).build()?;
/// # let images = Tensor::zeros([8, 3, 28, 28], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(overlapping.forward(&halve.forward(&images)?)?.size(), [8, 3, 7, 7]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct MaxPool2d {
    #[module(skip)]
    options: MaxPool2dBuilder,
}

impl MaxPool2d {
    /// Windows of this size, side by side.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the size is below 1.
    pub fn new(kernel_size: impl Sizes<2>) -> Result<Self> {
        Self::builder(kernel_size).build()
    }

    /// Windows with options.
    pub fn builder(kernel_size: impl Sizes<2>) -> MaxPool2dBuilder {
        let kernel_size = kernel_size.sizes();
        MaxPool2dBuilder {
            kernel_size,
            stride: kernel_size,
            padding: [0; 2],
            dilation: [1; 2],
            ceil_mode: false,
        }
    }
}

impl Forward for MaxPool2d {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            let MaxPool2dBuilder { kernel_size, stride, padding, dilation, ceil_mode } = self.options;
            let output = input.f_max_pool2d(kernel_size, stride, padding, dilation, ceil_mode);
            let reach = [0, 1].map(|i| dilation[i] * (kernel_size[i] - 1) + 1);
            Ok(explain(self, output, input, |shape| misfit(shape, "MaxPool2d", kernel_size, reach, padding))?)
        })
    }
}

/// Options of a [`MaxPool2d`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct MaxPool2dBuilder {
    kernel_size: [i64; 2],
    stride: [i64; 2],
    padding: [i64; 2],
    dilation: [i64; 2],
    ceil_mode: bool,
}

impl MaxPool2dBuilder {
    setters! {
        /// Steps between windows (default: their size).
        stride: impl Sizes<2> = stride.sizes();
        /// Rows and columns of minus infinity added on each side (default 0); at most half the window.
        padding: impl Sizes<2> = padding.sizes();
        /// Steps between the elements of a window (default 1).
        dilation: impl Sizes<2> = dilation.sizes();
        /// Whether a window that fits only in part counts (default `false`).
        ceil_mode: bool;
    }

    /// Makes the pool.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1 or the padding too large.
    pub fn build(self) -> Result<MaxPool2d> {
        check("MaxPool2d", self.kernel_size, self.stride, self.padding)?;
        at_least("MaxPool2d", 1, [("dilation", &self.dilation[..])])?;
        Ok(MaxPool2d { options: self })
    }
}

/// The mean under each window, as `torch.nn.AvgPool2d`.
///
/// Input `[batch, channels, height, width]`; the batch dimension may be missing. The stride is the window's size
/// unless given.
#[derive(Module, Debug)]
pub struct AvgPool2d {
    #[module(skip)]
    options: AvgPool2dBuilder,
}

impl AvgPool2d {
    /// Windows of this size, side by side.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the size is below 1.
    pub fn new(kernel_size: impl Sizes<2>) -> Result<Self> {
        Self::builder(kernel_size).build()
    }

    /// Windows with options.
    pub fn builder(kernel_size: impl Sizes<2>) -> AvgPool2dBuilder {
        let kernel_size = kernel_size.sizes();
        AvgPool2dBuilder {
            kernel_size,
            stride: kernel_size,
            padding: [0; 2],
            ceil_mode: false,
            count_include_pad: true,
        }
    }
}

impl Forward for AvgPool2d {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            let AvgPool2dBuilder { kernel_size, stride, padding, ceil_mode, count_include_pad } =
                self.options;
            let output = input.f_avg_pool2d(kernel_size, stride, padding, ceil_mode, count_include_pad, None);
            Ok(explain(self, output, input, |shape| {
                misfit(shape, "AvgPool2d", kernel_size, kernel_size, padding)
            })?)
        })
    }
}

/// Options of an [`AvgPool2d`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct AvgPool2dBuilder {
    kernel_size: [i64; 2],
    stride: [i64; 2],
    padding: [i64; 2],
    ceil_mode: bool,
    count_include_pad: bool,
}

impl AvgPool2dBuilder {
    setters! {
        /// Steps between windows (default: their size).
        stride: impl Sizes<2> = stride.sizes();
        /// Rows and columns of zeros added on each side (default 0); at most half the window.
        padding: impl Sizes<2> = padding.sizes();
        /// Whether a window that fits only in part counts (default `false`).
        ceil_mode: bool;
        /// Whether the padding's zeros count in the mean (default `true`).
        count_include_pad: bool;
    }

    /// Makes the pool.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1 or the padding too large.
    pub fn build(self) -> Result<AvgPool2d> {
        check("AvgPool2d", self.kernel_size, self.stride, self.padding)?;
        Ok(AvgPool2d { options: self })
    }
}

/// The mean of windows chosen so that the output has a given size, as `torch.nn.AdaptiveAvgPool2d`.
///
/// Input `[batch, channels, height, width]`, output `[batch, channels, *output_size]`; the batch dimension may be
/// missing.
#[derive(Module, Debug)]
pub struct AdaptiveAvgPool2d {
    output_size: [i64; 2],
}

impl AdaptiveAvgPool2d {
    /// A pool to this height and width; 1 is the mean of the whole picture.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the size is below 1.
    pub fn new(output_size: impl Sizes<2>) -> Result<Self> {
        let output_size = output_size.sizes();
        at_least("AdaptiveAvgPool2d", 1, [("output_size", &output_size[..])])?;
        Ok(Self { output_size })
    }
}

impl Forward for AdaptiveAvgPool2d {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            let output = input.f_adaptive_avg_pool2d(self.output_size);
            Ok(explain(self, output, input, |shape| {
                misfit(shape, "AdaptiveAvgPool2d", self.output_size, [0; 2], [0; 2])
            })?)
        })
    }
}

/// Joins a run of dimensions into one, as `torch.nn.Flatten`.
#[derive(Module, Debug, Clone, Copy)]
pub struct Flatten {
    start_dim: i64,
    end_dim: i64,
}

impl Flatten {
    /// Joins all dimensions but the first: `[batch, *]` becomes `[batch, features]`.
    pub fn new() -> Self {
        Self::range(1, -1)
    }

    /// Joins the dimensions from `start_dim` to `end_dim`, both included; negative ones count from the last.
    pub fn range(start_dim: i64, end_dim: i64) -> Self {
        Self { start_dim, end_dim }
    }
}

impl Default for Flatten {
    fn default() -> Self {
        Self::new()
    }
}

impl Forward for Flatten {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.f_flatten(self.start_dim, self.end_dim)?))
    }
}

fn check(layer: &'static str, kernel_size: [i64; 2], stride: [i64; 2], padding: [i64; 2]) -> Result<()> {
    at_least(layer, 1, [("kernel_size", &kernel_size[..]), ("stride", &stride)])?;
    at_least(layer, 0, [("padding", &padding[..])])?;
    if (0..2).any(|i| 2 * padding[i] > kernel_size[i]) {
        let what = format!("padding is {padding:?} for a window of {kernel_size:?}");
        return refuse(layer, what, "give at most half the window".to_owned());
    }
    Ok(())
}

/// What is wrong with the shape of a pool's input; `reach` is how far a window spans.
fn misfit(
    shape: &[i64],
    layer: &str,
    size: [i64; 2],
    reach: [i64; 2],
    padding: [i64; 2],
) -> Option<(String, String)> {
    let expected = match shape {
        [.., height, width] if shape.len() == 3 || shape.len() == 4 => {
            if height + 2 * padding[0] >= reach[0] && width + 2 * padding[1] >= reach[1] {
                return None;
            }
            format!("with padding {padding:?} it is smaller than the window {size:?}")
        }
        _ => "3 or 4 dimensions, [batch, channels, height, width], are needed".to_owned(),
    };
    Some((format!("{layer}({size:?})"), expected))
}
