//! What most programs need: `use voltaic::prelude::*`.
//!
//! `Result` is `anyhow`'s: it is what steps and hooks return, and what a `main` can return. A function of voltaic has a `Result` of
//! its own, which `?` converts: `Ok(mse_loss(&output, &target)?)`. `Context` and `bail!` of anyhow make errors of yours.
//!
//! The methods of `StdRng` are there, too: `StdRng::seed_from_u64(42)`, `rng.random_range(0..10)`.

pub use anyhow::{Context, Result, bail};
pub use rand::{RngExt as _, SeedableRng as _};
pub use tch::{Kind, Reduction, Tensor, no_grad};

pub use crate::accelerator::Accelerator;
pub use crate::callback::{
    Callback, DeviceStatsMonitor, EarlyStopping, EarlyStoppingConfig, LearningRateMonitor, ModelCheckpoint,
    ModelCheckpointConfig, Timer,
};
pub use crate::checkpoint::Checkpoint;
pub use crate::data::{
    Batch, DataLoader, DataModule, Dataset, Loaders, SharedTensor, Stage, StdRng, TensorDataset, random_split,
};
pub use crate::device::Device;
pub use crate::module::{HookContext, LightningModule, StepContext};
pub use crate::nn::functional::{accuracy, binary_cross_entropy_with_logits, cross_entropy, mse_loss};
pub use crate::nn::{
    BatchNorm2d, Buffer, Callable, Conv2d, Dropout, Embedding, Forward, Gru, LayerNorm, Linear, Lstm, Module,
    ModuleExt, PackedSequence, Parameter, Relu, Sequential, checkpoint,
};
pub use crate::optim::{Adam, AdamW, Optimizers, ParamGroupSpec, Sgd, StepLr};
pub use crate::trainer::{Trainer, TrainerConfig, seed_everything};
