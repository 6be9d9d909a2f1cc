//! "Customize Mixed Precision Using Autocast": the plugin, and regions of your own.

#[macro_use]
mod support;

use support::{LitClassifier, Short, report};
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::models::Classifier;
use voltaic::precision::{HpuPrecisionPlugin, autocast, autocast_enabled, with_autocast};
use voltaic::prelude::*;

const BATCH_SIZE: usize = 64;

fn main() -> Result<()> {
    support::run(blocks![hpu_precision_plugin, torch_autocast, decorated, enabled])
}

/// Block 000-2.
fn hpu_precision_plugin() -> Result<()> {
    // Initialize a trainer with HPU accelerator for HPU strategy for single device,
    // with HPU precision plugin for autocast
    let mut trainer = Trainer::builder()
        .accelerator(HpuAccelerator::from_env()?)
        .devices(1)
        .plugins([HpuPrecisionPlugin::new("bf16-mixed")])
        .short()
        .build()?;

    // Init our model
    let mut model = LitClassifier::new()?;
    // Init the data
    let mut dm = MnistData::default().batch_size(BATCH_SIZE);

    // Train the model ⚡
    trainer.fit(&mut model, &mut dm)?;
    report(&trainer)
}

/// Block 000-3: autocast for a region, which ends where the guard is dropped.
#[derive(Module)]
struct AutocastModelCM {
    l1: Linear,
}

/// Block 000-3.
impl Forward for AutocastModelCM {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let _autocast = autocast(Device::Hpu(0), Kind::BFloat16)?;
        self.l1.forward(&input.f_flatten(1, -1)?)
    }
}

/// Block 000-3: autocast for a whole call. Rust has no decorators that wrap a method.
#[derive(Module)]
struct AutocastModelDecorator {
    l1: Linear,
}

/// Block 000-3.
impl Forward for AutocastModelDecorator {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        with_autocast(Device::Hpu(0), Kind::BFloat16, || self.l1.forward(&input.f_flatten(1, -1)?))?
    }
}

/// Block 000-3. The models are plain modules there, which `fit` does not take; [`Classifier`] adds the steps.
fn torch_autocast() -> Result<()> {
    // Initialize a trainer with HPU accelerator for HPU strategy for single device,
    // with mixed precision using overridden HMP settings
    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).short().build()?;

    // Init our model
    let mut model = Classifier::new(AutocastModelCM { l1: Linear::new(28 * 28, 10)? });
    // Init the data
    let mut dm = MnistData::default().batch_size(BATCH_SIZE);

    // Train the model ⚡
    trainer.fit(&mut model, &mut dm)?;
    println!("logits are {:?}", logits(model.net())?.kind());
    report(&trainer)
}

/// The same with the other model.
fn decorated() -> Result<()> {
    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).short().build()?;
    let mut model = Classifier::new(AutocastModelDecorator { l1: Linear::new(28 * 28, 10)? });
    trainer.fit(&mut model, &mut MnistData::default().batch_size(BATCH_SIZE))?;
    println!("logits are {:?}", logits(model.net())?.kind());
    report(&trainer)
}

/// "Fine tuning with `enabled`": a part of a region without casts.
fn enabled() -> Result<()> {
    Trainer::builder().accelerator("hpu").devices(1).short().build()?; // sets the device up
    let model = AutocastModelCM { l1: Linear::new(28 * 28, 10)? };
    model.to_device(Device::Hpu(0))?;
    let _autocast = autocast(Device::Hpu(0), Kind::BFloat16)?;
    let x = logits(&model)?;
    let lower = x.f_matmul(&x.f_tr()?)?;
    let full = {
        let _off = autocast_enabled(Device::Hpu(0), Kind::BFloat16, false)?;
        let x = x.f_to_kind(Kind::Float)?;
        x.f_matmul(&x.f_tr()?)?
    };
    println!("inside {:?}, where it is off {:?}", lower.kind(), full.kind());
    Ok(())
}

fn logits(model: &impl Forward) -> Result<Tensor> {
    let images = Tensor::rand([2, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
    model.forward(&voltaic::data::Batch::move_to(images, Device::Hpu(0))?)
}
