//! A network with one hidden layer.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::sizes::Sizes;
use crate::error::{ConfigError, Result};
use crate::nn::{Callable, Forward, Linear, Module, within_call};

/// A perceptron with one hidden layer.
///
/// Settings of [`Mlp`].
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MlpConfig {
    /// Number of values of one sample; a picture of 28 x 28 pixels has 784.
    #[default(784)]
    pub in_features: i64,
    /// Size of the hidden layer.
    #[default(256)]
    pub hidden_features: i64,
    /// Number of classes, the size of the output.
    #[default(10)]
    pub num_classes: i64,
}

impl MlpConfig {
    /// Whether all settings can be used.
    ///
    /// # Errors
    /// All that cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut sizes = Sizes::default();
        sizes.size("in_features", self.in_features);
        sizes.size("hidden_features", self.hidden_features);
        sizes.size("num_classes", self.num_classes);
        sizes.finish((self.in_features as f64 + self.num_classes as f64) * self.hidden_features as f64)
    }
}

/// Two linear layers with ReLU between them.
///
/// Input `[batch, *]`, flattened to `[batch, in_features]`; output logits `[batch, num_classes]`.
///
/// ```
/// use voltaic::models::{Mlp, MlpConfig};
/// use voltaic::nn::Forward;
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = Mlp::new(MlpConfig::default())?;
/// # let digits = Tensor::zeros([2, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(net.forward(&digits)?.size(), [2, 10]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Mlp {
    fc1: Linear,
    fc2: Linear,
}

impl Mlp {
    /// Makes the network with PyTorch's initial weights.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(config: MlpConfig) -> Result<Self> {
        Ok(Self {
            fc1: Linear::new(config.in_features, config.hidden_features)?,
            fc2: Linear::new(config.hidden_features, config.num_classes)?,
        })
    }
}

impl Forward for Mlp {
    fn forward(&self, samples: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, samples, |samples| {
            let x = self.fc1.call(&samples.f_flatten(1, -1)?)?.f_relu_()?;
            self.fc2.call(&x)
        })
    }
}
