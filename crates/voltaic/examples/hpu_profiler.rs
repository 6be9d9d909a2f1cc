//! "Using HPUProfiler": default, distributed and custom profiling, and "Visualizing Profiled Operations".

#[macro_use]
mod support;

use support::{LitClassifier, Short, report};
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::prelude::*;
use voltaic::profiler::{HpuProfiler, HpuProfilerConfig};

fn main() -> Result<()> {
    support::run(blocks![default_profiling, distributed_profiling, custom_profiling, tensorboard])
}

/// Block 001-1. At the end of fit there is a JSON trace in the folder of the run.
fn default_profiling() -> Result<()> {
    let mut trainer = Trainer::builder()
        .accelerator(HpuAccelerator::from_env()?)
        .devices(1)
        .profiler(HpuProfilerConfig::default())
        .short()
        .build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}

/// Block 001-2. Each rank writes a report, `fit-perf-logs-<rank>.txt`, and a trace.
fn distributed_profiling() -> Result<()> {
    let profiler =
        HpuProfilerConfig { filename: Some("perf-logs".to_owned()), ..HpuProfilerConfig::default() };
    let accelerator = HpuAccelerator::from_env()?;
    let mut trainer =
        Trainer::builder().profiler(profiler).accelerator(accelerator).devices(2).short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}

// Reference profiler in LightningModule
/// Block 001-3.
#[derive(Module)]
struct MyModel {
    l1: Linear,
    #[module(skip)]
    profiler: HpuProfiler,
}

/// Block 001-3.
impl MyModel {
    // To profile in any part of your code, use the self.profiler.profile() function
    fn custom_processing_step_basic(&self, data: Tensor) -> Result<Tensor> {
        let _range = self.profiler.profile("my_custom_action")?;
        println!("do something");
        Ok(data)
    }

    // Alternatively, use self.profiler.start("my_custom_action")
    // and self.profiler.stop("my_custom_action") functions
    // to enclose the part of code to be profiled.
    fn custom_processing_step_granular(&self, data: Tensor) -> Result<Tensor> {
        self.profiler.start("my_custom_action")?;
        println!("do something");
        self.profiler.stop("my_custom_action")?;
        Ok(data)
    }
}

impl LightningModule for MyModel {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let x = self.custom_processing_step_basic(x.f_flatten(1, -1)?)?;
        let logits = self.custom_processing_step_granular(self.l1.forward(&x)?)?;
        let loss = cross_entropy(&logits, y)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Adam::new(0.02).into())
    }
}

// Pass profiler instance to LightningModule
/// Block 001-3.
fn custom_profiling() -> Result<()> {
    let profiler = HpuProfiler::new(&HpuProfilerConfig::default())?;
    let mut model = MyModel { l1: Linear::new(28 * 28, 10)?, profiler: profiler.clone() };
    let builder = Trainer::builder().accelerator(HpuAccelerator::from_env()?).devices(1);
    let mut trainer = builder.with_profiler(profiler).short().limit_val_batches(0).build()?;

    trainer.fit(&mut model, &mut MnistData::default())?;
    report(&trainer)
}

/// Blocks 001-4 and 001-5: the trace goes into a folder that TensorBoard's profile plugin reads.
///
///     python -um pip install tensorboard torch-tb-profiler
///     tensorboard --logdir ./tensorboard --port 6006
fn tensorboard() -> Result<()> {
    let profiler = HpuProfilerConfig { dirpath: Some("tensorboard".into()), ..HpuProfilerConfig::default() };
    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).profiler(profiler).short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    println!("tensorboard --logdir ./tensorboard --port 6006, then http://localhost:6006/#pytorch_profiler");
    Ok(())
}
