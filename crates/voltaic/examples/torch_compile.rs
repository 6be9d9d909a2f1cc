//! "Using torch.compile".

#[macro_use]
mod support;

use support::{Short, report};
use voltaic::data::MnistData;
use voltaic::graph::CompileBackend;
use voltaic::models::{Classifier, Mlp, MlpConfig};
use voltaic::prelude::*;

fn main() -> Result<()> {
    support::run(blocks![using_torch_compile, compile_by_the_trainer, without_compile])
}

/// Block 001-25.
fn using_torch_compile() -> Result<()> {
    let (mut model_to_train, mut model_to_eval) = (model()?, model()?);
    let compiled_train_model = voltaic::compile(&model_to_train, "aot_hpu_training_backend")?;
    let compiled_eval_model = voltaic::compile(&model_to_eval, "aot_hpu_inference_backend")?;

    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).short().build()?;
    trainer.fit(&mut model_to_train, &mut MnistData::default())?;
    report(&trainer)?;
    trainer.test(&mut model_to_eval, &mut MnistData::default())?;

    for (name, compiled) in [("training", compiled_train_model), ("evaluation", compiled_eval_model)] {
        let fused: usize = compiled.plan_stats().iter().map(|plan| plan.num_fused).sum();
        println!("{name}: {} calls replayed, {fused} operators fused", compiled.stats().hits);
    }
    Ok(())
}

/// The trainer compiles whole training steps, with backward and the optimizer step.
fn compile_by_the_trainer() -> Result<()> {
    let (mut model_to_train, _) = (model()?, model()?); // the same random numbers as above
    let builder = Trainer::builder().accelerator("hpu").devices(1).short();
    let mut trainer = builder.compile(CompileBackend::HpuBackend).build()?;
    trainer.fit(&mut model_to_train, &mut MnistData::default())?;
    report(&trainer)?;
    println!("{} steps replayed", trainer.graph_report().replayed_steps);
    Ok(())
}

/// What both are compared with.
fn without_compile() -> Result<()> {
    let (mut model_to_train, _) = (model()?, model()?);
    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).short().build()?;
    trainer.fit(&mut model_to_train, &mut MnistData::default())?;
    report(&trainer)
}

fn model() -> Result<Classifier<Mlp>> {
    Ok(Classifier::new(Mlp::new(MlpConfig::default())?))
}
