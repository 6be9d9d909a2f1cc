//! Activations as modules, for [`Sequential`](crate::nn::Sequential). In your own `forward` a method of the tensor
//! does the same: `x.relu()`.

use tch::Tensor;

use crate::nn::calls::call::within_call;
use crate::nn::compute::{Compute, ComputeMode};
use crate::nn::module::{Forward, Module};

/// Returns its input, as `torch.nn.Identity`.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct Identity;

impl Forward for Identity {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.shallow_clone()))
    }
}

/// max(0, x), as `torch.nn.ReLU`.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct Relu;

impl Forward for Relu {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.f_relu()?))
    }
}

/// x times the distribution function of the normal distribution, as `torch.nn.GELU`
/// ([Hendrycks and Gimpel, 2016](https://arxiv.org/abs/1606.08415)).
#[derive(Module, Debug, Clone, Copy)]
pub struct Gelu {
    approximate: &'static str,
}

impl Gelu {
    /// The exact form.
    pub fn new() -> Self {
        Self { approximate: "none" }
    }

    /// The approximation by tanh, as `torch.nn.GELU(approximate="tanh")`.
    pub fn tanh() -> Self {
        Self { approximate: "tanh" }
    }
}

impl Default for Gelu {
    fn default() -> Self {
        Self::new()
    }
}

impl Forward for Gelu {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.f_gelu(self.approximate)?))
    }
}

/// x times its logistic function, as `torch.nn.SiLU`.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct Silu;

impl Forward for Silu {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.f_silu()?))
    }
}

/// Hyperbolic tangent, as `torch.nn.Tanh`.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct Tanh;

impl Forward for Tanh {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.f_tanh()?))
    }
}

/// The logistic function 1 / (1 + exp(-x)), as `torch.nn.Sigmoid`.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct Sigmoid;

impl Forward for Sigmoid {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.f_sigmoid()?))
    }
}

/// exp(x) divided by its sum along one dimension, as `torch.nn.Softmax`.
#[derive(Module, Debug)]
pub struct Softmax {
    dim: i64,
    /// In which numbers it computes.
    pub(in crate::nn) compute: ComputeMode,
}

impl Softmax {
    /// Softmax along `dim`; negative dimensions count from the last.
    pub fn new(dim: i64) -> Self {
        Self { dim, compute: ComputeMode::default() }
    }
}

impl Forward for Softmax {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| match self.compute.get() {
            Compute::Quantized(layer) => Ok(layer.softmax(input, self.dim)?),
            Compute::Measured(observer) => {
                observer.inputs(&[input])?;
                let output = input.f_softmax(self.dim, None)?;
                observer.output(&output)?;
                Ok(output)
            }
            Compute::Unmeasured(layer) => Err(layer.error().into()),
            Compute::Plain | Compute::Fp8(_) => Ok(input.f_softmax(self.dim, None)?),
        })
    }
}

/// x above zero, a fraction of it below, as `torch.nn.LeakyReLU`.
#[derive(Module, Debug, Clone, Copy)]
pub struct LeakyRelu {
    negative_slope: f64,
}

impl LeakyRelu {
    /// Leaky ReLU with this slope below zero.
    pub fn new(negative_slope: f64) -> Self {
        Self { negative_slope }
    }
}

impl Default for LeakyRelu {
    /// Slope 0.01.
    fn default() -> Self {
        Self::new(0.01)
    }
}

impl Forward for LeakyRelu {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            // tch's leaky_relu has no slope. The backward kernel computes `grad` where x > 0 and `slope * grad` elsewhere:
            // with x as the gradient that is the function itself, and its derivative in `grad` is the right one.
            Ok(input.f_leaky_relu_backward(input, self.negative_slope, false)?)
        })
    }
}
