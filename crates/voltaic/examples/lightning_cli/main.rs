//! "Using LightningCLI": the command line of a program with its own model, and a recipe for each configuration.
//!
//! Without arguments every recipe runs, each in a process of its own. With a verb this program is the command:
//!
//!     cargo run --example lightning_cli -- fit --config crates/voltaic/examples/lightning_cli/accelerator_hpu.yaml
//!     cargo run --example lightning_cli -- fit --help

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

use std::env;
use std::process::ExitCode;

use anyhow::ensure;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic::cli::{self, FromConfig, Registry};
use voltaic::data::MnistData;
use voltaic::precision::is_autocast_enabled;
use voltaic::prelude::*;

const BLOCKS: &[support::Block] = blocks![
    accelerator_auto,
    accelerator_hpu,
    strategy_auto,
    strategy_hpu_single,
    strategy_hpu_parallel,
    plugin_precision,
    plugin_checkpoint_io,
    accelerator_instance,
    strategy_instance,
    instances_on_the_command_line,
];

fn main() -> ExitCode {
    let is_block = |name: String| BLOCKS.iter().any(|(known, _)| *known == name);
    if !env::args().nth(1).is_none_or(is_block) {
        return cli::run(
            Registry::new().model::<LitClassifier>("LitClassifier").data::<MnistData>("MnistData"),
        );
    }
    match support::run(BLOCKS) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:?}");
            ExitCode::FAILURE
        }
    }
}

/// Digits from a hidden layer.
#[derive(Module)]
struct LitClassifier {
    l1: Linear,
    l2: Linear,
    #[module(skip)]
    lr: f64,
}

/// The keys below `model`: `--model.lr=0.01`.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct LitClassifierConfig {
    /// Width of the hidden layer.
    width: i64,
    /// Learning rate.
    lr: f64,
}

impl Default for LitClassifierConfig {
    fn default() -> Self {
        Self { width: 64, lr: 0.005 }
    }
}

impl FromConfig for LitClassifier {
    type Config = LitClassifierConfig;

    fn from_config(config: LitClassifierConfig) -> Result<Self> {
        let LitClassifierConfig { width, lr } = config;
        Ok(Self { l1: Linear::new(28 * 28, width)?, l2: Linear::new(width, 10)?, lr })
    }
}

impl Forward for LitClassifier {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.l2.forward(&self.l1.forward(&x.f_flatten(1, -1)?)?.f_relu()?)
    }
}

impl LightningModule for LitClassifier {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let loss = cross_entropy(&self.forward(x)?, y)?;
        if ctx.global_step() == 0 && ctx.process_group().is_none_or(|group| group.rank() == 0) {
            println!("trains on {}, autocast {}", Device::of(x)?, is_autocast_enabled(Device::of(x)?)?);
        }
        ctx.log("train_loss", &loss).prog_bar(true);
        Ok(loss)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<()> {
        ctx.log("val_acc", accuracy(&self.forward(x)?, y)?).prog_bar(true).sync_dist(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(AdamW::new(self.lr).into())
    }

    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.is_global_zero() {
            let ranks = ctx.process_group().map_or(1, |group| group.world_size());
            println!("{} steps, world_size {ranks}", ctx.global_step());
        }
        Ok(())
    }
}

/// Runs this program as the command: `fit` with a recipe that stands beside it, and options.
fn fit(recipe: &str, options: &[&str]) -> Result<()> {
    let recipe = format!("{}/examples/lightning_cli/{recipe}", env!("CARGO_MANIFEST_DIR"));
    let status = support::this_program().args(["fit", "--config", &recipe]).args(options).status()?;
    ensure!(status.success(), "fit failed: {status}");
    Ok(())
}

/// Section: Using LightningCLI, accelerator "auto". Takes Gaudi cards if there are any, and never emulated ones.
fn accelerator_auto() -> Result<()> {
    fit("accelerator_auto.yaml", &[])
}

/// Section: Using LightningCLI, accelerator "hpu".
fn accelerator_hpu() -> Result<()> {
    fit("accelerator_hpu.yaml", &[])
}

/// Section: Using LightningCLI, strategy "auto": for two cards `hpu_parallel`.
fn strategy_auto() -> Result<()> {
    fit("strategy_auto.yaml", &[])
}

/// Section: Using LightningCLI, strategy "hpu_single".
fn strategy_hpu_single() -> Result<()> {
    fit("strategy_hpu_single.yaml", &[])
}

/// Section: Using LightningCLI, strategy "hpu_parallel".
fn strategy_hpu_parallel() -> Result<()> {
    fit("strategy_hpu_parallel.yaml", &[])
}

/// Section: Using LightningCLI, a class instance of `HPUPrecisionPlugin`.
fn plugin_precision() -> Result<()> {
    fit("plugin_precision.yaml", &[])
}

/// Section: Using LightningCLI, a class instance of `HPUCheckpointIO`.
fn plugin_checkpoint_io() -> Result<()> {
    fit("plugin_checkpoint_io.yaml", &[])
}

/// Section: Using LightningCLI, Limitations with HPU: a class instance of an accelerator, which works here.
fn accelerator_instance() -> Result<()> {
    fit("accelerator_instance.yaml", &[])
}

/// Section: Using LightningCLI, Limitations with HPU: a class instance of a strategy, which works here.
fn strategy_instance() -> Result<()> {
    fit("strategy_instance.yaml", &[])
}

/// Section: Using LightningCLI: all of these as options, on a recipe that chooses the CPU.
fn instances_on_the_command_line() -> Result<()> {
    let options = [
        "--trainer.accelerator=lightning_habana.pytorch.accelerator.HPUAccelerator",
        "--trainer.devices=2",
        "--trainer.strategy=lightning_habana.pytorch.strategies.HPUParallelStrategy",
        "--trainer.strategy.bucket_cap_mb=50",
        "--trainer.plugins=lightning_habana.pytorch.plugins.precision.HPUPrecisionPlugin",
        "--trainer.plugins.precision=bf16-mixed",
        "--trainer.plugins+=HPUCheckpointIO",
    ];
    fit("accelerator_auto.yaml", &options)
}
