//! `trainer.profiler`: where the time of a run goes; with a model whose loaders are its own.

#[macro_use]
mod support;

use support::Short;
use voltaic::prelude::*;
use voltaic::profiler::AdvancedProfilerConfig;

fn main() -> Result<()> {
    support::run(blocks![simple, advanced])
}

/// Lightning's `BoringModel`: it needs no data beside it.
#[derive(Module)]
struct BoringModel {
    layer: Linear,
}

impl LightningModule for BoringModel {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> Result<Tensor> {
        let output = {
            let _action = ctx.profile("forward")?; // an action of its own in the report, until it is dropped
            self.layer.forward(batch)?
        };
        let loss = output.f_square()?.f_mean(Kind::Float)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Sgd::new(0.1).into())
    }

    fn train_dataloader(&mut self) -> Result<Option<DataLoader<Tensor>>> {
        let samples = Tensor::f_randn([640, 32], (Kind::Float, tch::Device::Cpu))?;
        Ok(Some(DataLoader::new(TensorDataset::new(samples)?).batch_size(8).shuffle(true).build()?))
    }
}

/// The report goes to standard error when the fit ends. It is there as text, too.
fn simple() -> Result<()> {
    let mut model = BoringModel { layer: Linear::new(32, 2)? };
    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).short().profiler("simple").build()?;

    trainer.fit_module(&mut model)?;
    let summary = trainer.profiler_summary().unwrap_or_default();
    println!("{}", summary.lines().find(|row| row.contains("  forward")).unwrap_or_default());
    Ok(())
}

/// How the time of each action is spread, and what is within what; written to `fit-report.txt` and `fit-report.json`.
fn advanced() -> Result<()> {
    let profiler = AdvancedProfilerConfig {
        dirpath: Some(".".into()),
        filename: Some("report".to_owned()),
        dump_stats: true,
        ..AdvancedProfilerConfig::default()
    };
    let mut model = BoringModel { layer: Linear::new(32, 2)? };
    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).short().profiler(profiler).build()?;

    trainer.fit_module(&mut model)?;
    for row in std::fs::read_to_string("fit-report.txt")?.lines().take(12) {
        println!("{row}");
    }
    Ok(())
}
