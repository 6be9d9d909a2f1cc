//! Going on from a checkpoint within an epoch, and with the files of PyTorch Lightning.

#[macro_use]
mod support;

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};
use support::{Short, report, this_program};
use voltaic::checkpoint::{AsyncCheckpointIo, read_torch, write_torch};
use voltaic::data::{MnistData, MnistDataConfig, MnistSet};
use voltaic::prelude::*;
use voltaic::trainer::{TrainerBuilder, from_lightning, to_lightning};

fn main() -> Result<()> {
    let blocks =
        blocks![resume_within_an_epoch, in_the_background, killed_and_resumed, to_lightning_and_back];
    support::run_with(blocks, blocks![long_run])
}

/// Its dropout draws random numbers in each step.
#[derive(Module)]
struct Net {
    fc1: Linear,
    dropout: Dropout,
    fc2: Linear,
}

impl Net {
    fn new() -> Result<Self> {
        Ok(Self { fc1: Linear::new(784, 64)?, dropout: Dropout::new(0.2)?, fc2: Linear::new(64, 10)? })
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let hidden = self.fc1.forward(&x.f_flatten(1, -1)?)?.f_relu()?;
        let loss = cross_entropy(&self.fc2.forward(&self.dropout.forward(&hidden)?)?, y)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Adam::new(0.001).into())
    }
}

/// One epoch of 60 batches.
fn one_epoch() -> TrainerBuilder {
    Trainer::builder().accelerator("hpu").devices(1).short().limit_val_batches(0)
}

/// The third run goes on where the second was stopped, and has the losses of the first.
fn resume_within_an_epoch() -> Result<()> {
    let mut whole = one_epoch().build()?;
    whole.fit(&mut Net::new()?, &mut MnistData::default())?;
    report(&whole)?;

    seed_everything(1)?; // as at the start of the first run
    let mut stopped = one_epoch().max_steps(23).build()?;
    stopped.fit(&mut Net::new()?, &mut MnistData::default())?;
    report(&stopped)?;

    seed_everything(99)?; // does not matter: the random numbers go on from the checkpoint
    let mut resumed = one_epoch().build()?;
    resumed.ckpt_path("last").fit(&mut Net::new()?, &mut MnistData::default())?;
    report(&resumed)
}

fn every_ten_steps() -> Result<ModelCheckpoint> {
    let config =
        ModelCheckpointConfig { every_n_train_steps: Some(10), save_top_k: -1, ..Default::default() };
    Ok(ModelCheckpoint::new(config)?)
}

/// Checkpoints are written by a thread while training goes on.
fn in_the_background() -> Result<()> {
    let builder = one_epoch().checkpoint_io(AsyncCheckpointIo::new()).callback(every_ten_steps()?);
    let mut trainer = builder.build()?;
    trainer.fit(&mut Net::new()?, &mut MnistData::default())?;
    report(&trainer)
}

/// Three epochs: from the start, or from the last checkpoint if there is one.
fn long_run() -> Result<()> {
    let builder = one_epoch().max_epochs(3).limit_train_batches(1.0).callback(every_ten_steps()?);
    let mut data = MnistData::new(MnistDataConfig { set: MnistSet::Subset, ..MnistDataConfig::default() });
    let mut trainer = builder.build()?;
    trainer.ckpt_path("last").fit(&mut Net::new()?, &mut data)?;
    report(&trainer)
}

/// `kill -9` does not harm checkpoints: started again, the run goes on from the last one that is complete.
fn killed_and_resumed() -> Result<()> {
    let mut run = this_program().arg("long_run").spawn()?;
    let third = Path::new("lightning_logs/version_0/checkpoints/epoch=0-step=30.ckpt");
    while !third.exists() && run.try_wait()?.is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    run.kill()?; // while it trains, or writes the next one
    println!("killed: {}", run.wait()?);

    ensure!(this_program().arg("long_run").status()?.success(), "the resumed run failed");
    Ok(())
}

/// What `voltaic convert own.ckpt lightning.ckpt` and `voltaic convert lightning.ckpt back.ckpt` do.
fn to_lightning_and_back() -> Result<()> {
    let mut trainer = one_epoch().build()?;
    trainer.fit(&mut Net::new()?, &mut MnistData::default())?;
    let own = trainer.last_model_path().context("the fit saved a checkpoint")?;

    // In Python: trainer.fit(model, ckpt_path="lightning.ckpt")
    let lightning = to_lightning(&Checkpoint::load(&own)?)?;
    write_torch(&lightning.value, Path::new("lightning.ckpt"))?;

    let back = from_lightning(&read_torch(Path::new("lightning.ckpt"))?, None, false)?;
    back.value.save(Path::new("back.ckpt"))?;
    for note in lightning.notes.iter().chain(&back.notes) {
        println!("left out: {note}");
    }

    let mut trainer = one_epoch().max_epochs(2).build()?;
    trainer.ckpt_path("back.ckpt").fit(&mut Net::new()?, &mut MnistData::default())?;
    report(&trainer)
}
