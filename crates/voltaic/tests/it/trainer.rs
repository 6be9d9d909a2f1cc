//! The trainer through its public API, on a model small enough to reason about.

use std::path::Path;

use tempfile::TempDir;
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Dropout, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::trainer::{Trainer, TrainerBuilder, seed_everything};
use voltaic::{Kind, Module, Tensor};

use crate::rng::seeded;

/// Two layers with dropout, so that a wrong random state shows.
#[derive(Module)]
pub struct Net {
    fc1: Linear,
    dropout: Dropout,
    fc2: Linear,
}

impl Net {
    pub fn new() -> Self {
        Self {
            fc1: Linear::new(8, 16).unwrap(),
            dropout: Dropout::new(0.3).unwrap(),
            fc2: Linear::new(16, 1).unwrap(),
        }
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = self.dropout.forward(&self.fc1.forward(x)?.relu())?;
        Ok(self.fc2.forward(&hidden)?.f_mse_loss(y, tch::Reduction::Mean)?)
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.loss(x, y)?;
        ctx.log("train_loss", &loss).on_epoch(true).prog_bar(true);
        Ok(loss)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", self.loss(x, y)?);
        Ok(())
    }

    fn test_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("test_loss", self.loss(x, y)?);
        Ok(())
    }

    fn predict_step(&self, (x, _): &Self::Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.fc2.forward(&self.fc1.forward(x)?.relu())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(AdamW::new(1e-2).into())
    }
}

pub fn loader(samples: i64, shuffle: bool) -> DataLoader<(Tensor, Tensor)> {
    let options = (Kind::Float, tch::Device::Cpu);
    let x = Tensor::arange(samples * 8, options).sin().reshape([samples, 8]);
    let y = x.sum_dim_intlist(1, true, Kind::Float);
    DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4).shuffle(shuffle).build().unwrap()
}

pub fn loaders() -> Loaders<(Tensor, Tensor)> {
    Loaders::new()
        .train(loader(26, true))
        .val(loader(6, false))
        .test(loader(6, false))
        .predict(loader(6, false))
}

pub fn quiet(root: &Path) -> TrainerBuilder {
    Trainer::builder().default_root_dir(root).enable_progress_bar(false).enable_model_summary(false)
}

pub fn weights(net: &Net) -> Vec<f32> {
    net.parameters().iter().flat_map(|p| Vec::<f32>::try_from(p.flatten(0, -1)).unwrap()).collect()
}

/// Remembers the loss of each batch, bit for bit.
#[derive(Default, Clone)]
pub struct Losses(pub std::sync::Arc<std::sync::Mutex<Vec<u64>>>);

impl Callback for Losses {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let loss = ctx.loss().unwrap().double_value(&[]);
        self.0.lock().unwrap().push(loss.to_bits());
        Ok(())
    }
}

impl Losses {
    pub fn take(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[test]
fn fit_trains_logs_and_saves() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    seed_everything(1).unwrap();
    let mut net = Net::new();
    let mut trainer = quiet(root.path()).max_epochs(3).log_every_n_steps(2u64).build().unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    assert_eq!((trainer.current_epoch(), trainer.global_step()), (3, 21));
    let run = root.path().join("lightning_logs/version_0");
    assert_eq!(trainer.log_dir(), run);
    assert!(run.join("checkpoints/epoch=2-step=21.ckpt").exists());
    assert_eq!(trainer.best_model_path().unwrap(), run.join("checkpoints/epoch=2-step=21.ckpt"));
    let csv = std::fs::read_to_string(run.join("metrics.csv")).unwrap();
    assert_eq!(csv.lines().next().unwrap(), "epoch,step,train_loss_epoch,train_loss_step,val_loss");
    assert_eq!(csv.lines().count(), 1 + 10 + 3 + 3, "{csv}");
    assert!(run.join("curves.png").exists());
    assert!(trainer.metric("train_loss_epoch").unwrap() < 10.0);
}

#[test]
fn evaluation_uses_all_samples_once_and_changes_nothing() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let mut net = Net::new();
    let before = weights(&net);
    let mut trainer = quiet(root.path()).logger(false).build().unwrap();
    let metrics = trainer.test(&mut net, &mut loaders()).unwrap();
    assert_eq!(metrics.len(), 1);
    let (x, y): (Vec<Tensor>, Vec<Tensor>) = {
        let range = voltaic::data::EpochRange::epoch(0);
        loader(6, false).iter(range).unwrap().map(Result::unwrap).unzip()
    };
    let expected = net.fc2.forward(&net.fc1.forward(&Tensor::cat(&x, 0)).unwrap().relu()).unwrap();
    let expected = expected.mse_loss(&Tensor::cat(&y, 0), tch::Reduction::Mean).double_value(&[]);
    assert!((metrics[0].1 - expected).abs() < 1e-6, "{metrics:?} {expected}");
    let predictions = trainer.predict(&mut net, &mut loaders()).unwrap();
    assert_eq!(predictions[0].iter().map(|p| p.size()[0]).collect::<Vec<_>>(), [4, 2]);
    assert_eq!(before, weights(&net));
}
