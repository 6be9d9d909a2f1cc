//! A run that is killed while it saves: a module whose checkpoints take a while to write.

use std::path::Path;

use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig, SaveLast};
use voltaic::nn::Parameter;
use voltaic::optim::AdamW;
use voltaic::{Kind, Module, Tensor};

/// Weights in a checkpoint; AdamW's state is twice as many.
pub const BALLAST: i64 = 1 << 17;
pub const LR: f64 = 1.0 / 1024.0;

/// So many weights that a checkpoint takes a while to write; with batches of ones each step takes `LR` from each.
#[derive(Module)]
pub struct Heavy {
    pub ballast: Parameter,
}

impl Heavy {
    pub fn new() -> Self {
        Self { ballast: Parameter::new(Tensor::zeros([BALLAST], (Kind::Float, tch::Device::Cpu))) }
    }
}

lightning_module!(Heavy, Tensor, AdamW::new(LR).weight_decay(0.0), |net, batch, _| Ok(net
    .ballast
    .f_sum(Kind::Float)?
    * batch.f_mean(Kind::Float)?));

/// Saves after each step, by one name, and a copy as the last one.
pub fn saver(folder: &Path) -> ModelCheckpoint {
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.to_path_buf()),
        filename: Some("newest".to_owned()),
        every_n_train_steps: Some(1),
        save_last: SaveLast::Copy(true),
        enable_version_counter: false,
        ..Default::default()
    };
    ModelCheckpoint::new(config).unwrap()
}
