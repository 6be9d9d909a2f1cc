//! The convolutional network of PyTorch's MNIST example.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::sizes::Sizes;
use crate::error::{ConfigError, Result};
use crate::nn::functional::max_pool2d;
use crate::nn::{Callable, Conv2d, Dropout, Forward, Linear, Module, ModuleExt, within_call};

/// The convolutional net of PyTorch's MNIST example.
///
/// Settings of [`ConvNet`].
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ConvNetConfig {
    /// Number of classes, the size of the output.
    #[default(10)]
    pub num_classes: i64,
    /// Probability with which a feature is dropped after the convolutions.
    #[default(0.25)]
    pub conv_dropout: f64,
    /// Probability with which a feature is dropped before the last layer.
    #[default(0.5)]
    pub fc_dropout: f64,
}

impl ConvNetConfig {
    /// Whether all settings can be used.
    ///
    /// # Errors
    /// All that cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut sizes = Sizes::default();
        sizes.size("num_classes", self.num_classes);
        sizes.dropout("conv_dropout", self.conv_dropout);
        sizes.dropout("fc_dropout", self.fc_dropout);
        sizes.finish(128.0 * self.num_classes as f64)
    }
}

/// Two convolutions, a max-pool and two linear layers, with dropout, as in
/// [PyTorch's MNIST example](https://github.com/pytorch/examples/tree/main/mnist): 1,199,882 parameters.
///
/// Input `[batch, 1, 28, 28]`, output logits `[batch, num_classes]` (the example's log-softmax is left to the loss).
///
/// ```
/// use voltaic::models::{ConvNet, ConvNetConfig};
/// use voltaic::nn::{Forward, ModuleExt};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = ConvNet::new(ConvNetConfig { fc_dropout: 0.4, ..Default::default() })?;
/// # let digits = Tensor::zeros([2, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(net.forward(&digits)?.size(), [2, 10]);
/// assert_eq!(net.num_parameters(true), 1_199_882);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct ConvNet {
    conv1: Conv2d,
    conv2: Conv2d,
    dropout1: Dropout,
    dropout2: Dropout,
    fc1: Linear,
    fc2: Linear,
}

impl ConvNet {
    /// Makes the network with PyTorch's initial weights.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1, or a dropout no probability.
    pub fn new(config: ConvNetConfig) -> Result<Self> {
        let net = Self {
            conv1: Conv2d::new(1, 32, 3)?,
            conv2: Conv2d::new(32, 64, 3)?,
            dropout1: Dropout::new(config.conv_dropout)?,
            dropout2: Dropout::new(config.fc_dropout)?,
            fc1: Linear::new(64 * 12 * 12, 128)?,
            fc2: Linear::new(128, config.num_classes)?,
        };
        net.to_channels_last()?;
        Ok(net)
    }
}

impl Forward for ConvNet {
    fn forward(&self, digits: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, digits, |digits| {
            let x = self.conv1.call(digits)?.f_relu_()?;
            let x = max_pool2d(&self.conv2.call(&x)?.f_relu_()?, 2)?;
            let x = self.dropout1.call(&x.f_flatten(1, -1)?)?; // flat, so that the masks are PyTorch's
            let x = self.fc1.call(&x)?.f_relu_()?;
            self.fc2.call(&self.dropout2.call(&x)?)
        })
    }
}
