//! What replaying a training step costs beside running it: `cargo bench --bench graph`.
//!
//! A whole step (forward, backward, fused AdamW) of several networks runs on one thread, as code and as a replay of the
//! same code. The two take turns in blocks within one run, so that whatever else the machine does falls on both. Printed
//! is, over the pairs of neighbouring blocks, the median (and quartiles) of eager time over replay time, and what
//! capturing cost. Both sides are fed from the same batches. Replays should be faster the more of a step is calls.

use std::error;
use std::process::ExitCode;
use std::time::Instant;

use measure::micro::{Row, Target, quartiles};
use tch::{Device, Kind, Tensor};
use voltaic::ffi;
use voltaic::graph::HpuGraph;
use voltaic::models::{Gpt, GptConfig, LeNet, LeNetConfig, ResNet18, ResNet18Config};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, Linear, Module, Relu, Sequential};
use voltaic::optim::{AdamW, Optimizer, Optimizers};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;
type Loss<M> = fn(&M, &Tensor, &Tensor) -> anyhow::Result<Tensor>;

/// Pairs of blocks that count, after one that does not.
const PAIRS: usize = 30;
/// A block takes about so many microseconds of eager steps, and at least three steps.
const BLOCK_US: f64 = 20_000.0;

/// A network with its optimizer.
struct Side<M> {
    net: M,
    optimizer: Box<dyn Optimizer>,
    loss: Loss<M>,
}

impl<M: Module> Side<M> {
    fn new(net: M, loss: Loss<M>) -> Result<Self> {
        let optimizers: Optimizers = AdamW::new(1e-4).into();
        let optimizer = optimizers.build(&net)?.remove(0).optimizer;
        Ok(Self { net, optimizer, loss })
    }

    fn step(&mut self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        self.optimizer.zero_grad()?;
        let loss = (self.loss)(&self.net, x, y)?;
        loss.f_backward()?;
        self.optimizer.step()?;
        Ok(loss.f_detach()?)
    }
}

fn measure<M: Module>(
    name: &str,
    make: fn() -> Result<M>,
    loss: Loss<M>,
    batch: &dyn Fn() -> (Tensor, Tensor),
    (least, max_us): (f64, Option<f64>),
) -> Result<()> {
    let batches: Vec<(Tensor, Tensor)> = (0..8).map(|_| batch()).collect();
    let (mut eager, mut graphed) = (Side::new(make()?, loss)?, Side::new(make()?, loss)?);
    let whole_step = HpuGraph::new();
    for (x, y) in &batches[..3] {
        drop(eager.step(x, y)?);
        drop(graphed.step(x, y)?);
    }
    let (x, y) = &batches[3];
    let started = Instant::now();
    let once = eager.step(x, y);
    let eager_us = micros(started);
    drop(once);
    let started = Instant::now();
    let (static_x, static_y) = (x.copy(), y.copy());
    whole_step.capture_begin()?;
    whole_step.mark_user_inputs(&[&static_x, &static_y])?;
    let static_loss = graphed.step(&static_x, &static_y)?;
    whole_step.capture_end()?;
    let capture_ms = (micros(started) - eager_us) / 1e3;
    let steps = ((BLOCK_US / eager_us) as usize).max(3);
    let mut ratios = Vec::new();
    let (mut eager_times, mut replay_times) = (Vec::new(), Vec::new());
    for pair in 0..=PAIRS {
        let started = Instant::now();
        for step in 0..steps {
            let (x, y) = &batches[step % batches.len()];
            drop(eager.step(x, y)?);
        }
        let eager_us = micros(started) / steps as f64;
        let started = Instant::now();
        for step in 0..steps {
            let (x, y) = &batches[step % batches.len()];
            whole_step.replay_with(&[x, y])?;
        }
        let replay_us = micros(started) / steps as f64;
        if pair > 0 {
            ratios.push(eager_us / replay_us);
            eager_times.push(eager_us);
            replay_times.push(replay_us);
        }
    }
    let stats = whole_step.stats().next().unwrap_or_default();
    let moved: u64 = whole_step.replay_stats().map(|stats| stats.moved_results + stats.pool_blocks).sum();
    let [low, middle, high] = quartiles(ratios.clone());
    println!(
        "{name:<26}{:>11.1}{:>11.1}  {:<22}{:>9.1}{:>7}{:>7}{:>10}{:>7}",
        quartiles(eager_times)[1],
        quartiles(replay_times.clone())[1],
        format!("{middle:.2} ({low:.2} to {high:.2})"),
        capture_ms,
        stats.num_nodes,
        stats.num_calls,
        stats.arena_bytes / 1024,
        moved,
    );
    drop(static_loss);
    let row = |what, unit, values, target| Row::of("graph", format!("{name}: {what}"), unit, values, target);
    if let Some(most_us) = max_us {
        row("a replayed step", "us", replay_times, Target::AtMost(most_us)).record()?;
    }
    row("eager over replay", "", ratios, Target::AtLeast(least)).record()?;
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    tch::set_num_threads(1);
    ffi::install_host_pool()?;
    ffi::set_engine_multithreading(false)?;
    println!(
        "{:<26}{:>11}{:>11}  {:<22}{:>9}{:>7}{:>7}{:>10}{:>7}",
        "per step",
        "eager us",
        "replay us",
        "ratio (quartiles)",
        "capt. ms",
        "nodes",
        "calls",
        "arena KiB",
        "misses"
    );
    measure(
        "MLP 64-64-10, batch 8",
        || Ok(Sequential::new().add(Linear::new(64, 64)?).add(Relu).add(Linear::new(64, 10)?)),
        classify,
        &|| images(&[8, 64]),
        (2.0, Some(50.0)),
    )?;
    measure(
        "transformer d=32, 2 x 16",
        || {
            let config = GptConfig {
                vocab_size: 256,
                block_size: 16,
                n_layer: 1,
                n_head: 2,
                n_embd: 32,
                ..GptConfig::tiny()
            };
            Ok(Gpt::new(GptConfig { dropout: 0.1, ..config })?)
        },
        |net, x, y| net.loss(x, y),
        &|| text(2, 16),
        (1.5, None),
    )?;
    measure(
        "LeNet, batch 64",
        || Ok(LeNet::new(LeNetConfig::default())?),
        classify,
        &|| images(&[64, 1, 28, 28]),
        (1.0, None),
    )?;
    measure(
        "ResNet-18, batch 8",
        || Ok(ResNet18::new(ResNet18Config::default())?),
        classify,
        &|| images(&[8, 3, 32, 32]),
        (1.0, None),
    )?;
    measure(
        "GPT-mini, 2 x 128",
        || Ok(Gpt::new(GptConfig { vocab_size: 256, ..GptConfig::mini() })?),
        |net, x, y| net.loss(x, y),
        &|| text(2, 128),
        (1.0, None),
    )?;
    println!("misses: blocks that kernels took from the pool, and results that were copied, in all replays");
    Ok(())
}

fn classify<M: Forward>(net: &M, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
    Ok(cross_entropy(&net.forward(x)?, y)?)
}

fn images(size: &[i64]) -> (Tensor, Tensor) {
    (
        Tensor::rand(size, (Kind::Float, Device::Cpu)),
        Tensor::randint(10, [size[0]], (Kind::Int64, Device::Cpu)),
    )
}

fn text(batch: i64, time: i64) -> (Tensor, Tensor) {
    let tokens = || Tensor::randint(256, [batch, time], (Kind::Int64, Device::Cpu));
    (tokens(), tokens())
}

fn micros(started: Instant) -> f64 {
    started.elapsed().as_nanos() as f64 / 1e3
}
