//! What most programs need: `use voltaic::prelude::*`.
//!
//! `Result` is `anyhow`'s: it is what steps and hooks return, and what a `main` can return.

pub use anyhow::Result;
pub use tch::{Kind, Tensor};

pub use crate::callback::{
    Callback, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelCheckpointConfig,
    Timer,
};
pub use crate::data::{Batch, DataLoader, DataModule, Dataset, Loaders, Stage, TensorDataset};
pub use crate::device::Device;
pub use crate::module::{HookContext, LightningModule, StepContext};
pub use crate::nn::functional::{accuracy, cross_entropy};
pub use crate::nn::{
    BatchNorm2d, Buffer, Callable, Conv2d, Dropout, Embedding, Forward, LayerNorm, Linear, Module, ModuleExt,
    Parameter,
};
pub use crate::optim::{Adam, AdamW, Optimizers, Sgd, StepLr};
pub use crate::trainer::{Trainer, TrainerConfig, seed_everything};
