//! ResNet-18 for small pictures.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::sizes::Sizes;
use crate::error::{ConfigError, Result};
use crate::nn::init::{self, FanMode, Nonlinearity};
use crate::nn::{BatchNorm2d, Callable, Conv2d, Forward, Linear, Module, ModuleExt, Sequential, within_call};

/// ResNet-18 with the stem for small images of CIFAR.
///
/// Settings of [`ResNet18`].
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ResNet18Config {
    /// Number of classes, the size of the output.
    #[default(10)]
    pub num_classes: i64,
    /// Channels of the picture: 3 for colours, 1 for grey.
    #[default(3)]
    pub in_channels: i64,
    /// Channels of the first stage; each later stage doubles them.
    #[default(64)]
    pub width: i64,
}

impl ResNet18Config {
    /// Whether all settings can be used.
    ///
    /// # Errors
    /// All that cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut sizes = Sizes::default();
        sizes.size("num_classes", self.num_classes);
        sizes.size("in_channels", self.in_channels);
        sizes.size("width", self.width);
        let (classes, width) = (self.num_classes as f64, self.width as f64);
        sizes.finish((9.0 * self.in_channels as f64 + 2727.0 * width + 8.0 * classes) * width)
    }
}

/// ResNet-18 ([He et al., 2015](https://arxiv.org/abs/1512.03385)) with the stem for 32 x 32 pictures: a 3 x 3
/// convolution of stride 1 and no max-pool. 11,173,962 parameters, with torchvision's names and initial values.
///
/// Input `[batch, in_channels, height, width]`, output logits `[batch, num_classes]`. In memory the channels are last, for
/// speed; shapes and checkpoints are as usual.
///
/// ```
/// use voltaic::models::{ResNet18, ResNet18Config};
/// use voltaic::nn::Forward;
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = ResNet18::new(ResNet18Config { width: 8, ..Default::default() })?;
/// # let pictures = Tensor::zeros([2, 3, 32, 32], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(net.forward(&pictures)?.size(), [2, 10]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct ResNet18 {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Sequential,
    layer2: Sequential,
    layer3: Sequential,
    layer4: Sequential,
    fc: Linear,
}

impl ResNet18 {
    /// Makes the network; convolutions are drawn as by torchvision, for ReLU and by their outputs.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(config: ResNet18Config) -> Result<Self> {
        let ResNet18Config { num_classes, in_channels, width } = config;
        let net = Self {
            conv1: Conv2d::builder(in_channels, width, 3).padding(1).bias(false).build()?,
            bn1: BatchNorm2d::new(width)?,
            layer1: stage(width, width, 1)?,
            layer2: stage(width, 2 * width, 2)?,
            layer3: stage(2 * width, 4 * width, 2)?,
            layer4: stage(4 * width, 8 * width, 2)?,
            fc: Linear::new(8 * width, num_classes)?,
        };
        for kernel in net.parameters().iter().filter(|parameter| parameter.dim() == 4) {
            init::kaiming_normal_(kernel, Nonlinearity::Relu, FanMode::FanOut)?;
        }
        net.to_channels_last()?;
        Ok(net)
    }
}

impl Forward for ResNet18 {
    fn forward(&self, pictures: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, pictures, |pictures| {
            let mut x = self.bn1.call(&self.conv1.call(pictures)?)?.f_relu_()?;
            for layer in [&self.layer1, &self.layer2, &self.layer3, &self.layer4] {
                x = layer.call(&x)?;
            }
            let x = x.f_adaptive_avg_pool2d([1, 1])?.f_flatten(1, -1)?;
            self.fc.call(&x)
        })
    }
}

/// Two blocks; the first changes the number of channels and, by its stride, the size.
fn stage(in_channels: i64, out_channels: i64, stride: i64) -> Result<Sequential> {
    Ok(Sequential::new().add(BasicBlock::new(in_channels, out_channels, stride)?).add(BasicBlock::new(
        out_channels,
        out_channels,
        1,
    )?))
}

/// Two convolutions, added to their input.
#[derive(Module, Debug)]
struct BasicBlock {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    downsample: Option<Sequential>,
}

impl BasicBlock {
    fn new(in_channels: i64, out_channels: i64, stride: i64) -> Result<Self> {
        let conv = |from, kernel_size, stride| {
            let padding = kernel_size / 2;
            Conv2d::builder(from, out_channels, kernel_size)
                .stride(stride)
                .padding(padding)
                .bias(false)
                .build()
        };
        let downsample = if stride != 1 || in_channels != out_channels {
            Some(Sequential::new().add(conv(in_channels, 1, stride)?).add(BatchNorm2d::new(out_channels)?))
        } else {
            None
        };
        Ok(Self {
            conv1: conv(in_channels, 3, stride)?,
            bn1: BatchNorm2d::new(out_channels)?,
            conv2: conv(out_channels, 3, 1)?,
            bn2: BatchNorm2d::new(out_channels)?,
            downsample,
        })
    }
}

impl Forward for BasicBlock {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let y = self.bn1.call(&self.conv1.call(x)?)?.f_relu_()?;
        let mut y = self.bn2.call(&self.conv2.call(&y)?)?;
        let shortcut = match &self.downsample {
            Some(downsample) => downsample.call(x)?,
            None => x.shallow_clone(),
        };
        Ok(y.f_add_(&shortcut)?.f_relu_()?)
    }
}
