//! LeNet-5 for digits of 28 x 28 pixels.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::sizes::Sizes;
use crate::error::{ConfigError, Result};
use crate::nn::functional::max_pool2d;
use crate::nn::{Callable, Conv2d, Forward, Linear, Module, within_call};

/// LeNet-5 for digits of 28 x 28 pixels.
///
/// Settings of [`LeNet`].
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LeNetConfig {
    /// Number of classes, the size of the output.
    #[default(10)]
    pub num_classes: i64,
}

impl LeNetConfig {
    /// Whether all settings can be used.
    ///
    /// # Errors
    /// All that cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut sizes = Sizes::default();
        sizes.size("num_classes", self.num_classes);
        sizes.finish(84.0 * self.num_classes as f64)
    }
}

/// LeNet-5 ([LeCun et al., 1998](https://doi.org/10.1109/5.726791)) with ReLU and max-pools: 61,706 parameters.
///
/// Input `[batch, 1, 28, 28]`, output logits `[batch, num_classes]`.
///
/// ```
/// use voltaic::models::{LeNet, LeNetConfig};
/// use voltaic::nn::{Forward, ModuleExt};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = LeNet::new(LeNetConfig::default())?;
/// # let digits = Tensor::zeros([2, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(net.forward(&digits)?.size(), [2, 10]);
/// assert_eq!(net.num_parameters(true), 61_706);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct LeNet {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    fc2: Linear,
    fc3: Linear,
}

impl LeNet {
    /// Makes the network with PyTorch's initial weights.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(config: LeNetConfig) -> Result<Self> {
        Ok(Self {
            conv1: Conv2d::builder(1, 6, 5).padding(2).build()?,
            conv2: Conv2d::new(6, 16, 5)?,
            fc1: Linear::new(16 * 5 * 5, 120)?,
            fc2: Linear::new(120, 84)?,
            fc3: Linear::new(84, config.num_classes)?,
        })
    }
}

impl Forward for LeNet {
    fn forward(&self, digits: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, digits, |digits| {
            let x = max_pool2d(&self.conv1.call(digits)?.f_relu_()?, 2)?;
            let x = max_pool2d(&self.conv2.call(&x)?.f_relu_()?, 2)?.f_flatten(1, -1)?;
            let x = self.fc1.call(&x)?.f_relu_()?;
            let x = self.fc2.call(&x)?.f_relu_()?;
            self.fc3.call(&x)
        })
    }
}
