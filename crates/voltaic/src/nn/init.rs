//! Initial values: fills tensors in place with the formulas of
//! [`torch.nn.init`](https://docs.pytorch.org/docs/2.11/nn.init.html), drawing from the default generator of the
//! tensor's device, so that the same seed gives the values that PyTorch draws.
//!
//! All functions leave the autograd history alone. They take a [`Parameter`](crate::nn::Parameter) as well as a tensor:
//!
//! ```
//! use voltaic::nn::{Linear, init};
//!
//! # fn main() -> voltaic::Result<()> {
//! let head = Linear::new(64, 10)?;
//! init::normal_(&head.weight, 0.0, 0.02)?;
//! # Ok(())
//! # }
//! ```

use std::cell::Cell;
use std::f64::consts::SQRT_2;

use tch::Tensor;

use super::deferred;
use crate::error::Result;
use crate::nn::check::refuse;

/// Which side of a weight keeps the variance of what flows through it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FanMode {
    /// The inputs: activations keep their variance in the forward pass.
    FanIn,
    /// The outputs: gradients keep their variance in the backward pass.
    FanOut,
}

/// The activation that follows a weight; it decides the gain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Nonlinearity {
    /// None: gain 1.
    Linear,
    /// The logistic function: gain 1.
    Sigmoid,
    /// Hyperbolic tangent: gain 5/3.
    Tanh,
    /// max(0, x): gain sqrt(2).
    Relu,
    /// Leaky ReLU of this slope `a` below zero: gain sqrt(2 / (1 + a²)).
    LeakyRelu(f64),
    /// SELU: gain 3/4.
    Selu,
}

impl Nonlinearity {
    /// The factor by which the standard deviation grows, as `torch.nn.init.calculate_gain`.
    pub fn gain(self) -> f64 {
        match self {
            Self::Linear | Self::Sigmoid => 1.0,
            Self::Tanh => 5.0 / 3.0,
            Self::Relu => SQRT_2,
            Self::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
            Self::Selu => 0.75,
        }
    }
}

thread_local!(static DRAWS: Cell<bool> = const { Cell::new(true) });

/// Makes modules whose weights are loaded or set right after it: what their layers would draw is 0, on this thread and
/// until `make` returns, and the generators stay as they are. Larger networks are made faster so.
///
/// ```
/// use voltaic::nn::{Linear, init};
///
/// # fn main() -> voltaic::Result<()> {
/// let layer = init::without_draws(|| Linear::new(4096, 4096))?;
/// assert_eq!(layer.weight.abs().max().double_value(&[]), 0.0);
/// # Ok(())
/// # }
/// ```
///
/// Source: `torch.nn.utils.skip_init`; Lightning's `init_module(empty_init=True)`, which leaves memory as it was.
pub fn without_draws<R>(make: impl FnOnce() -> R) -> R {
    struct Reset(bool);
    impl Drop for Reset {
        fn drop(&mut self) {
            DRAWS.set(self.0);
        }
    }
    let _reset = Reset(DRAWS.replace(false));
    make()
}

pub use super::deferred::deferred;

/// Draws from the uniform distribution over `[low, high)`.
///
/// # Errors
/// If libtorch refuses, such as for an integer tensor.
pub fn uniform_(tensor: &Tensor, low: f64, high: f64) -> Result<()> {
    draw(tensor, move |tensor| tensor.f_uniform_(low, high))
}

/// Draws from the normal distribution.
///
/// # Errors
/// If libtorch refuses, such as for an integer tensor or a negative `std`.
pub fn normal_(tensor: &Tensor, mean: f64, std: f64) -> Result<()> {
    draw(tensor, move |tensor| tensor.f_normal_(mean, std))
}

/// Draws from the normal distribution, cut off outside `[low, high]` (by inverting its distribution function).
///
/// # Errors
/// If libtorch refuses, such as for an integer tensor.
pub fn trunc_normal_(tensor: &Tensor, mean: f64, std: f64, low: f64, high: f64) -> Result<()> {
    let cdf = |x: f64| -> Result<f64> {
        let erf = Tensor::f_from_slice(&[(x - mean) / std / SQRT_2])?.f_erf()?;
        Ok((1.0 + erf.f_double_value(&[0])?) / 2.0)
    };
    if !DRAWS.get() {
        return zeros_(tensor);
    }
    let (lower, upper) = (cdf(low)?, cdf(high)?);
    uniform_(tensor, 2.0 * lower - 1.0, 2.0 * upper - 1.0)?;
    fill(tensor, |tensor| tensor.f_erfinv_())?;
    fill(tensor, move |tensor| tensor.f_mul_scalar_(std * SQRT_2))?;
    fill(tensor, move |tensor| tensor.f_add_scalar_(mean))?;
    fill(tensor, move |tensor| tensor.f_clamp_(low, high))
}

/// Fills with one value.
///
/// # Errors
/// If libtorch refuses the value for the tensor's dtype.
pub fn constant_(tensor: &Tensor, value: f64) -> Result<()> {
    replace(tensor, move |tensor| tensor.f_fill_(value))
}

/// Fills with 0.
///
/// # Errors
/// If libtorch refuses, such as for a tensor that may not be written.
pub fn zeros_(tensor: &Tensor) -> Result<()> {
    replace(tensor, |tensor| tensor.f_zero_())
}

/// Draws from the uniform distribution of variance `gain² * 2 / (fan_in + fan_out)`
/// ([Glorot and Bengio, 2010](https://proceedings.mlr.press/v9/glorot10a.html)).
///
/// # Errors
/// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the tensor has fewer than two dimensions.
pub fn xavier_uniform_(tensor: &Tensor, gain: f64) -> Result<()> {
    let bound = 3.0_f64.sqrt() * xavier_std("xavier_uniform_", tensor, gain)?;
    uniform_(tensor, -bound, bound)
}

/// Draws from the normal distribution of variance `gain² * 2 / (fan_in + fan_out)`
/// ([Glorot and Bengio, 2010](https://proceedings.mlr.press/v9/glorot10a.html)).
///
/// # Errors
/// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the tensor has fewer than two dimensions.
pub fn xavier_normal_(tensor: &Tensor, gain: f64) -> Result<()> {
    normal_(tensor, 0.0, xavier_std("xavier_normal_", tensor, gain)?)
}

/// Draws from the uniform distribution of variance `gain² / fan`
/// ([He et al., 2015](https://arxiv.org/abs/1502.01852)).
///
/// # Errors
/// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the tensor has fewer than two dimensions.
pub fn kaiming_uniform_(tensor: &Tensor, nonlinearity: Nonlinearity, mode: FanMode) -> Result<()> {
    let bound = 3.0_f64.sqrt() * kaiming_std("kaiming_uniform_", tensor, nonlinearity, mode)?;
    uniform_(tensor, -bound, bound)
}

/// Draws from the normal distribution of variance `gain² / fan`
/// ([He et al., 2015](https://arxiv.org/abs/1502.01852)).
///
/// # Errors
/// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the tensor has fewer than two dimensions.
pub fn kaiming_normal_(tensor: &Tensor, nonlinearity: Nonlinearity, mode: FanMode) -> Result<()> {
    normal_(tensor, 0.0, kaiming_std("kaiming_normal_", tensor, nonlinearity, mode)?)
}

/// Number of inputs that one output of a weight sees, and of outputs that one input reaches, the weight being
/// `[out, in, kernel...]`: `torch.nn.init._calculate_fan_in_and_fan_out`.
///
/// # Errors
/// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if the tensor has fewer than two dimensions.
pub fn fan_in_and_fan_out(tensor: &Tensor) -> Result<(i64, i64)> {
    fans("fan_in_and_fan_out", tensor)
}

/// The initial values of PyTorch's linear and convolutional layers: weight and bias both uniform within
/// `1 / sqrt(fan_in)`. The weight is drawn first.
pub(super) fn linear_(weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    kaiming_uniform_(weight, Nonlinearity::LeakyRelu(5.0_f64.sqrt()), FanMode::FanIn)?;
    if let Some(bias) = bias {
        let bound = 1.0 / (fan_in_and_fan_out(weight)?.0 as f64).sqrt();
        uniform_(bias, -bound, bound)?;
    }
    Ok(())
}

type Changed = Result<Tensor, tch::TchError>;

/// Changes each number by itself.
fn fill(tensor: &Tensor, change: impl Fn(&mut Tensor) -> Changed + Send + Sync + 'static) -> Result<()> {
    deferred::change(tensor, false, move |tensor| apply(tensor, &change))
}

/// Gives all numbers values that do not depend on those that they have.
fn replace(tensor: &Tensor, change: impl Fn(&mut Tensor) -> Changed + Send + Sync + 'static) -> Result<()> {
    deferred::change(tensor, true, move |tensor| apply(tensor, &change))
}

/// Replaces all numbers by drawn ones, which do not depend on how the tensor lies in memory.
fn draw(tensor: &Tensor, change: impl Fn(&mut Tensor) -> Changed + Send + Sync + 'static) -> Result<()> {
    if !DRAWS.get() {
        return zeros_(tensor);
    }
    deferred::change(tensor, true, move |tensor| {
        if tensor.is_contiguous() {
            return apply(tensor, &change);
        }
        let dense = Tensor::f_empty(tensor.size(), (tensor.kind(), tensor.device()))?;
        apply(&dense, &change)?;
        apply(tensor, &|tensor| {
            tensor.f_copy_(&dense)?;
            Ok(tensor.shallow_clone())
        })
    })
}

fn apply(tensor: &Tensor, change: &dyn Fn(&mut Tensor) -> Changed) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let _ = change(&mut tensor.shallow_clone())?;
    Ok(())
}

fn fans(function: &'static str, tensor: &Tensor) -> Result<(i64, i64)> {
    match tensor.size().as_slice() {
        [fan_out, fan_in, kernel @ ..] => {
            let receptive_field: i64 = kernel.iter().product();
            Ok((fan_in * receptive_field, fan_out * receptive_field))
        }
        shape => refuse(
            function,
            format!("a tensor of shape {shape:?} has no fan in and fan out"),
            "give a weight of two or more dimensions, or use normal_ or uniform_".to_owned(),
        ),
    }
}

fn xavier_std(function: &'static str, tensor: &Tensor, gain: f64) -> Result<f64> {
    let (fan_in, fan_out) = fans(function, tensor)?;
    Ok(gain * (2.0 / (fan_in + fan_out) as f64).sqrt())
}

fn kaiming_std(
    function: &'static str,
    tensor: &Tensor,
    nonlinearity: Nonlinearity,
    mode: FanMode,
) -> Result<f64> {
    let (fan_in, fan_out) = fans(function, tensor)?;
    let fan = match mode {
        FanMode::FanIn => fan_in,
        FanMode::FanOut => fan_out,
    };
    Ok(nonlinearity.gain() / (fan as f64).sqrt())
}
