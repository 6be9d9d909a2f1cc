//! Ready-made models: small enough to read in a minute, and to copy from.
//!
//! Each is a `#[derive(Module)]` struct of layers, a serde config with the defaults of the paper or program it comes
//! from, `new(config)`, and [`Forward`](crate::nn::Forward). All but [`Gpt`] take `[batch, channels, height, width]`
//! and return logits `[batch, num_classes]`; [`Classifier`] gives those their training and evaluation steps.

mod classifier;
mod conv_net;
mod gpt;
mod gpt_steps;
mod lenet;
mod mlp;
mod resnet;
mod sizes;

pub use classifier::Classifier;
pub use conv_net::{ConvNet, ConvNetConfig};
pub use gpt::{Gpt, GptConfig};
pub use lenet::{LeNet, LeNetConfig};
pub use mlp::{Mlp, MlpConfig};
pub use resnet::{ResNet18, ResNet18Config};
