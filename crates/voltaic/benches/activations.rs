//! What activation checkpointing saves and costs: `cargo bench --bench activations`.
//!
//! Trains gpt-mini (6 blocks of 384 channels, 4 x 256 tokens) by the trainer: plain, with each block checkpointed, the same with the
//! results of products and attention kept, and with as many blocks kept as half of the plain run's memory for activations allows. Printed
//! are the bytes that a forward pass leaves for the backward pass, and the time of a step, beside PyTorch's shares of both. The ways take
//! turns within one run, with one thread.

use std::error;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use measure::micro::{Row, Target};
use measure::peer::torch_parts;
use tch::{Kind, Tensor};
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::ffi;
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::HookContext;
use voltaic::nn::Module;
use voltaic::trainer::{ActivationCheckpointingConfig, MemorySize, Trainer};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

const MIB: f64 = (1 << 20) as f64;
const STEPS: usize = 12;
/// Left out at the beginning of a run.
const WARM_UP: usize = 3;
const ROUNDS: usize = 3;

/// What a run found.
#[derive(Default)]
struct Found {
    before: usize,
    begin: Option<Instant>,
    bytes: Vec<usize>,
    secs: Vec<f64>,
}

struct Measure(Arc<Mutex<Found>>);

impl Measure {
    fn note(&self, change: impl FnOnce(&mut Found)) -> anyhow::Result<()> {
        change(&mut *self.0.lock().map_err(|_| anyhow::anyhow!("a measurement has failed"))?);
        Ok(())
    }
}

impl Callback for Measure {
    fn on_train_batch_start(&mut self, _: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
        self.note(|found| {
            (found.before, found.begin) = (ffi::host_pool().stats().in_use, Some(Instant::now()));
        })
    }

    /// After the forward pass, with the gradients of the last step, which were there before it, too.
    fn on_before_zero_grad(&mut self, _: &mut HookContext, _: &dyn Module) -> anyhow::Result<()> {
        self.note(|found| found.bytes.push(ffi::host_pool().stats().in_use.saturating_sub(found.before)))
    }

    fn on_train_batch_end(&mut self, _: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
        self.note(|found| {
            let secs = found.begin.take().map(|begin| begin.elapsed().as_secs_f64());
            found.secs.extend(secs);
        })
    }
}

/// MiB between forward and backward, and seconds of the steps.
fn run(precision: &str, way: Option<&ActivationCheckpointingConfig>) -> Result<(f64, Vec<f64>)> {
    ffi::manual_seed(1)?;
    let config = GptConfig { dropout: 0.0, ..GptConfig::mini() };
    let tokens = Tensor::randint(config.vocab_size, [4 * STEPS as i64, 257], (Kind::Int64, tch::Device::Cpu));
    let data = (tokens.narrow(1, 0, 256).contiguous(), tokens.narrow(1, 1, 256).contiguous());
    let loader = DataLoader::new(TensorDataset::new(data)?).batch_size(4).build()?;
    let found = Arc::new(Mutex::new(Found::default()));
    let mut builder = Trainer::builder()
        .accelerator("cpu")
        .precision(precision)
        .max_epochs(1)
        .logger(false)
        .enable_checkpointing(false)
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .callback(Measure(found.clone()));
    if let Some(settings) = way {
        builder = builder.activation_checkpointing(settings.clone());
    }
    builder.build()?.fit(&mut Gpt::new(config)?, &mut Loaders::new().train(loader))?;
    let found = found.lock().map_err(|_| "a measurement has failed")?;
    let bytes = found.bytes.iter().skip(WARM_UP).max().copied().unwrap_or_default();
    Ok((bytes as f64 / MIB, found.secs[WARM_UP.min(found.secs.len())..].to_vec()))
}

/// Of the runs of a step, that which other programs disturbed least.
fn fastest(of: &[f64]) -> f64 {
    of.iter().copied().fold(f64::INFINITY, f64::min)
}

/// PyTorch's share of memory and of time with each block checkpointed, by what its rounds printed.
fn peer(precision: &str, lines: &[Vec<String>]) -> Result<[f64; 2]> {
    let of = |way: &str| -> Result<[f64; 2]> {
        let (mut bytes, mut secs) = (f64::NAN, Vec::new());
        for line in lines.iter().filter(|line| line[0] == precision && line[1] == way) {
            bytes = line[2].parse()?;
            for word in &line[3..] {
                secs.push(word.parse()?);
            }
        }
        Ok([bytes, fastest(&secs)])
    };
    let (plain, checkpointed) = (of("plain")?, of("each block")?);
    println!(
        "{precision:<10} PyTorch      {:>7.1} MiB plain, {:.1} with each block checkpointed; {:.1} and {:.1} ms a step",
        plain[0], checkpointed[0], plain[1], checkpointed[1]
    );
    Ok([checkpointed[0] / plain[0], checkpointed[1] / plain[1]])
}

fn main() -> Result<()> {
    tch::set_num_threads(1);
    for precision in ["32-true", "bf16-mixed"] {
        let block = ActivationCheckpointingConfig { modules: vec!["Block".to_owned()], ..Default::default() };
        let ((plain, _), (least, _)) = (run(precision, None)?, run(precision, Some(&block))?);
        let half = MemorySize::Bytes(((plain / 2.0 - least) * MIB) as u64); // a budget is for what is kept beside that
        let save = ["matmul", "attention"].map(str::to_owned).to_vec();
        let ways = [
            ("plain", None),
            ("each block", Some(block.clone())),
            ("but products", Some(ActivationCheckpointingConfig { save, ..block.clone() })),
            ("half kept", Some(ActivationCheckpointingConfig { budget: Some(half), ..block })),
        ];
        let mut found: Vec<(f64, Vec<f64>)> = vec![(0.0, Vec::new()); ways.len()];
        let mut lines = Vec::new();
        for _ in 0..ROUNDS {
            for (number, (_, way)) in ways.iter().enumerate() {
                let (bytes, secs) = run(precision, way.as_ref())?;
                found[number].0 = bytes;
                found[number].1.extend(secs);
            }
            lines.extend(torch_parts("activations")?);
        }
        let plain = (found[0].0, fastest(&found[0].1));
        let ratios: Vec<[f64; 2]> =
            found.into_iter().map(|(bytes, secs)| [bytes / plain.0, fastest(&secs) / plain.1]).collect();
        for ((name, _), [bytes, secs]) in ways.iter().zip(&ratios) {
            println!(
                "{precision:<10} {name:<12} {:>7.1} MiB ({bytes:.2} of plain) {:>7.1} ms a step ({secs:.2} times)",
                bytes * plain.0,
                secs * plain.1 * 1e3,
            );
        }
        let shares = peer(precision, &lines)?;
        let row = |what: &str, ratio: f64, most: f64| {
            Row::of("activations", format!("{precision}: {what}"), "", vec![ratio], Target::AtMost(most))
                .record()
        };
        row(
            "memory with each block checkpointed, of plain, of PyTorch's share",
            ratios[1][0] / shares[0],
            1.0,
        )?;
        row("time with each block checkpointed, of plain", ratios[1][1], 1.25)?;
        row(
            "time with each block checkpointed, of plain, of PyTorch's share",
            ratios[1][1] / shares[1],
            1.0,
        )?;
        row("time with half of the memory, of plain", ratios[3][1], 1.15)?;
    }
    Ok(())
}
