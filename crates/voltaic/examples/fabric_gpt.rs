//! nanoGPT's training loop, written by hand: a character GPT on Shakespeare with two ranks.

#[macro_use]
mod support;

use std::path::Path;

use anyhow::{Context, ensure};
use support::this_program;
use voltaic::data::{EpochRange, ShakespeareData, ShakespeareDataConfig};
use voltaic::models::{Gpt, GptConfig};
use voltaic::optim::GradientClip;
use voltaic::prelude::*;
use voltaic::trainer::Fabric;

const MAX_ITERS: u64 = 30;
const WARMUP_ITERS: u64 = 10;
const ACCUMULATE: u64 = 2;
const EVAL_INTERVAL: u64 = 10;
const CKPT: &str = "ckpt";

fn main() -> Result<()> {
    support::run_with(blocks![ddp, zero2, zero3, resumed], blocks![interrupted])
}

fn ddp() -> Result<()> {
    train("ddp", MAX_ITERS)
}

fn zero2() -> Result<()> {
    train("zero2", MAX_ITERS)
}

fn zero3() -> Result<()> {
    train("zero3", MAX_ITERS)
}

/// Trains two thirds of the way.
fn interrupted() -> Result<()> {
    train("zero2", 2 * EVAL_INTERVAL)
}

/// The same as `zero2`, with a process that ends before, and one that resumes.
fn resumed() -> Result<()> {
    if !Path::new(CKPT).exists() {
        ensure!(this_program().arg("interrupted").status()?.success()); // before the ranks of this program start
    }
    train("zero2", MAX_ITERS)
}

fn train(strategy: &str, max_iters: u64) -> Result<()> {
    let mut fabric = Fabric::builder().accelerator("cpu").devices(2).strategy(strategy).launch()?;
    let config =
        ShakespeareDataConfig { batch_size: 12, context_length: 64, ..ShakespeareDataConfig::default() };
    let mut data = ShakespeareData::new(config);
    data.setup(Stage::Fit)?;
    let gpt = Gpt::new(GptConfig { n_layer: 2, n_embd: 64, ..GptConfig::tiny() })?;
    let (mut gpt, mut optimizer) =
        fabric.setup(gpt, AdamW::new(1e-3).betas((0.9, 0.99)).weight_decay(0.1))?;
    let train = fabric.setup_dataloaders(data.train_dataloader()?.context("there is no text")?)?;
    let mut iter: u64 = 0;
    if Path::new(CKPT).exists() {
        iter = fabric.load(CKPT, (&mut gpt, &mut optimizer))?;
    }
    let mut batches = train.iter(EpochRange::epoch(0).from_batch((iter * ACCUMULATE) as usize))?;
    while iter < max_iters {
        optimizer.set_lr(1e-3 * ((iter + 1) as f64 / WARMUP_ITERS as f64).min(1.0));
        let mut lossf = 0.0;
        for micro_step in 1..=ACCUMULATE {
            let (tokens, targets) = batches.next().transpose()?.context("the epoch has no more batches")?;
            let loss = fabric.forward(&gpt, |gpt| gpt.loss(&tokens, &targets))?;
            fabric.no_backward_sync(micro_step < ACCUMULATE, |fabric| {
                fabric.backward(&gpt, &(&loss / ACCUMULATE as f64))
            })?;
            lossf += loss.double_value(&[]) / ACCUMULATE as f64;
        }
        fabric.clip_gradients(&mut optimizer, GradientClip::Norm(1.0))?;
        fabric.step(&mut optimizer)?;
        optimizer.zero_grad()?;
        iter += 1;
        if iter.is_multiple_of(EVAL_INTERVAL) {
            fabric.print(format!("{strategy} iter {iter}: loss {lossf:.4}"));
            fabric.save(CKPT, (&mut gpt, &mut optimizer), &iter)?;
        }
    }
    fabric.finish(gpt)?;
    Ok(())
}
