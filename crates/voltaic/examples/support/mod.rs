//! What the programs share: each block runs in a process of its own, as a script of the documents does.
#![allow(dead_code, reason = "each program uses a part of it")]

use std::env;
use std::process::{Command, exit};

use anyhow::{Context, bail};
use voltaic::prelude::*;
use voltaic::trainer::TrainerBuilder;

/// A block of a program, by the name of its function.
pub type Block = (&'static str, fn() -> Result<()>);

/// The blocks of a program: `blocks![on_one_hpu, on_several]`.
macro_rules! blocks {
    ($($block:ident),* $(,)?) => { &[$((stringify!($block), $block as fn() -> voltaic::prelude::Result<()>)),*] as &[support::Block] };
}

/// What `main` does: runs the block that the first argument names, or all of them one after the other, each in a process
/// of its own. Every block begins with the same random numbers.
pub fn run(blocks: &[Block]) -> Result<()> {
    run_with(blocks, &[])
}

/// [`run`], with blocks that only other blocks start.
pub fn run_with(blocks: &[Block], started: &[Block]) -> Result<()> {
    let filter =
        tracing_subscriber::EnvFilter::new(env::var("RUST_LOG").unwrap_or_else(|_| "warn".to_owned()));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .init();
    let Some(name) = env::args().nth(1) else { return run_all(blocks) };
    let Some((_, block)) = blocks.iter().chain(started).find(|(known, _)| *known == name) else {
        let known: Vec<&str> = blocks.iter().map(|(name, _)| *name).collect();
        bail!("there is no block `{name}`; there are {}", known.join(", "));
    };
    seed_everything(1)?;
    block()
}

fn run_all(blocks: &[Block]) -> Result<()> {
    for (name, _) in blocks {
        println!("== {name}");
        let status = this_program().arg(name).status()?;
        if !status.success() {
            eprintln!("{name} failed: {status}");
            exit(1);
        }
    }
    Ok(())
}

/// This program, to be started once more.
pub fn this_program() -> Command {
    Command::new(env::current_exe().unwrap_or_else(|_| env::args().next().unwrap_or_default().into()))
}

/// A run that takes seconds; Lightning's default is 1000 epochs.
pub trait Short {
    /// One epoch of 60 batches, every loss in `metrics.csv`, and a quiet terminal.
    #[must_use]
    fn short(self) -> Self;
}

impl Short for TrainerBuilder {
    fn short(self) -> Self {
        self.max_epochs(1)
            .limit_train_batches(60)
            .limit_val_batches(4)
            .limit_test_batches(4)
            .num_sanity_val_steps(0)
            .log_every_n_steps(1_u64)
            .enable_progress_bar(false)
            .enable_model_summary(false)
    }
}

/// The model of the documents' MNIST examples: one layer, whose step they do not print.
#[derive(Module)]
pub struct LitClassifier {
    l1: Linear,
}

impl LitClassifier {
    pub fn new() -> Result<Self> {
        Ok(Self { l1: Linear::new(28 * 28, 10)? })
    }
}

impl Forward for LitClassifier {
    /// Images `[batch, 1, 28, 28]` to logits `[batch, 10]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.l1.forward(&x.f_flatten(1, -1)?)?.f_relu()?)
    }
}

impl LightningModule for LitClassifier {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let loss = cross_entropy(&self.forward(x)?, y)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<()> {
        let logits = self.forward(x)?;
        ctx.log("val_loss", cross_entropy(&logits, y)?).sync_dist(true);
        ctx.log("val_acc", accuracy(&logits, y)?).sync_dist(true);
        Ok(())
    }

    fn test_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<()> {
        let logits = self.forward(x)?;
        ctx.log("test_loss", cross_entropy(&logits, y)?).sync_dist(true);
        ctx.log("test_acc", accuracy(&logits, y)?).sync_dist(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Adam::new(0.02).into())
    }
}

/// The network of the documents' blocks on graphs, which do not print it.
#[derive(Module)]
pub struct NetHpuGraphs {
    fc1: Linear,
    fc2: Linear,
}

impl NetHpuGraphs {
    pub fn new() -> Result<Self> {
        Ok(Self { fc1: Linear::new(28 * 28, 64)?, fc2: Linear::new(64, 10)? })
    }
}

impl Forward for NetHpuGraphs {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&self.fc1.forward(&x.f_flatten(1, -1)?)?.f_relu()?)
    }
}

/// Prints what a fit came to, on rank 0: `strategy`, ranks, steps and the last loss.
pub fn report(trainer: &Trainer) -> Result<()> {
    if trainer.is_global_zero() {
        let loss = trainer.metric("train_loss").context("the step logs train_loss")?;
        let (strategy, world) = (trainer.strategy(), trainer.world());
        println!(
            "{strategy}, world_size {}, {} steps, train_loss {loss:.6}",
            world.world_size,
            trainer.global_step()
        );
    }
    Ok(())
}
