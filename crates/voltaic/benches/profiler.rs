//! What a profile costs: `cargo bench --bench profiler`.
//!
//! Training steps of GPT-mini (forward, backward, fused AdamW) on one thread, on the CPU and on the emulated HPU, while
//! nothing is recorded and while operators, devices and kernels are, with the ranges that a run has. The two take turns in
//! blocks within one run; what counts is the time that the thread computes, not what other programs take. Printed are the
//! median (and quartiles) of recorded over plain steps, the size of a trace of ten
//! steps, and what the checks of a run without a profiler come to: their number in a step times the time of one.

use std::error;
use std::hint::black_box;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use measure::micro::{Row, Target, quartiles};
use tch::{Kind, Tensor};
use voltaic::Device;
use voltaic::accelerator::{HpuEmulator, HpuSettings};
use voltaic::ffi::{self, Kineto, KinetoOptions, ProfileRange, Recorded};
use voltaic::models::{Gpt, GptConfig};
use voltaic::nn::ModuleExt;
use voltaic::optim::{AdamW, Optimizer, Optimizers};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Pairs of blocks that count, after one that does not.
const PAIRS: usize = 9;
const STEPS: usize = 2;
/// What a recorded step may take of a plain one.
const RATIO: f64 = 1.25;
const TRACE_MIB: f64 = 50.0;
/// What checks may cost a run without a profiler, in percent.
const OFF_PERCENT: f64 = 1.0;

struct Training {
    net: Gpt,
    optimizer: Box<dyn Optimizer>,
    x: Tensor,
    y: Tensor,
}

impl Training {
    fn on(device: Device) -> Result<Self> {
        let net = Gpt::new(GptConfig { vocab_size: 256, ..GptConfig::mini() })?;
        net.to_device(device)?;
        let optimizers: Optimizers = AdamW::new(1e-4).into();
        let optimizer = optimizers.build(&net)?.remove(0).optimizer;
        let tokens =
            || Tensor::randint(256, [2, 128], (Kind::Int64, tch::Device::Cpu)).to_device(device.into());
        Ok(Self { net, optimizer, x: tokens(), y: tokens() })
    }

    fn step(&mut self) -> Result<()> {
        self.optimizer.zero_grad()?;
        let forward = ProfileRange::begin("[pl][profile]training_step")?;
        let loss = self.net.loss(&self.x, &self.y)?;
        drop(forward);
        let backward = ProfileRange::begin("[pl][profile]backward")?;
        loss.f_backward()?;
        drop(backward);
        let _update = ProfileRange::begin("[pl][profile]optimizer_step")?;
        self.optimizer.step()?;
        Ok(())
    }

    fn block(&mut self) -> Result<f64> {
        let started = computed_us()?;
        for _ in 0..STEPS {
            self.step()?;
        }
        Ok((computed_us()? - started) / STEPS as f64)
    }
}

/// Microseconds for which this thread has computed.
fn computed_us() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text.split(' ').next().ok_or("an empty schedstat")?.parse::<f64>()? / 1e3)
}

fn options(memory: bool) -> KinetoOptions {
    let recorded = Recorded { devices: true, memory, kernels: true };
    KinetoOptions { recorded, ..KinetoOptions::default() }
}

/// Nanoseconds of one look at a flag that says that nothing is recorded.
fn check_ns() -> f64 {
    static FLAG: AtomicI32 = AtomicI32::new(0);
    const CHECKS: u32 = 10_000_000;
    let started = Instant::now();
    for _ in 0..CHECKS {
        if black_box(&FLAG).load(Ordering::Relaxed) != 0 {
            black_box(());
        }
    }
    started.elapsed().as_nanos() as f64 / f64::from(CHECKS)
}

fn measure(name: &str, device: Device, memory: bool) -> Result<()> {
    let mut training = Training::on(device)?;
    for _ in 0..3 {
        training.step()?;
    }
    let (mut plain, mut ratios) = (Vec::new(), Vec::new());
    for pair in 0..=PAIRS {
        // either may be the first: what else the machine does comes and goes
        let early = if pair % 2 == 0 { Some(training.block()?) } else { None };
        let recording = Kineto::start(options(memory))?;
        training.step()?; // warms up, as a schedule does
        let on = training.block()?;
        drop(recording);
        let off = match early {
            Some(off) => off,
            None => {
                training.step()?;
                training.block()?
            }
        };
        if pair > 0 {
            plain.push(off);
            ratios.push(on / off);
        }
    }
    let folder = std::env::temp_dir().join(format!("voltaic-bench-profiler-{}.json", std::process::id()));
    let recording = Kineto::start(options(true))?;
    for _ in 0..10 {
        training.step()?;
    }
    let profile = recording.stop(Some(&folder))?;
    let own = std::fs::metadata(&folder)?.len() as f64;
    std::fs::remove_file(&folder)?;
    // each activity is up to four events of a trace, each change of memory up to two
    let added = 650.0 * profile.activities.len() as f64 + 400.0 * profile.memory.len() as f64;
    let mib = (own + added) / f64::from(1 << 20);
    // an operator asks twice on an HPU, each change of memory and each kernel once
    let checks = (2 * profile.activities.len() + profile.memory.len()) as f64 / 10.0;
    let step_us = quartiles(plain.clone())[1];
    let off_ns = checks * check_ns();
    let off_percent = 100.0 * off_ns / 1e3 / step_us;
    let [low, middle, high] = quartiles(ratios.clone());
    println!(
        "{name:<24}{step_us:>12.1}  {:<24}{mib:>10.1}{checks:>9.0}{off_ns:>10.0}{off_percent:>12.4}",
        format!("{middle:.3} ({low:.3} to {high:.3})")
    );
    let row =
        |what, unit, values, target| Row::of("profiler", format!("{name}: {what}"), unit, values, target);
    row("recorded over plain step", "", ratios, Target::AtMost(RATIO)).record()?;
    row("trace of ten steps", "MiB", vec![mib], Target::AtMost(TRACE_MIB)).record()?;
    row("checks without a profiler", "%", vec![off_percent], Target::AtMost(OFF_PERCENT)).record()?;
    Ok(())
}

fn main() -> Result<()> {
    tch::set_num_threads(1);
    ffi::install_host_pool()?;
    ffi::install_kernels()?;
    ffi::set_engine_multithreading(false)?; // backward is on this thread
    HpuEmulator::init(HpuSettings::default())?;
    println!(
        "{:<24}{:>12}  {:<24}{:>10}{:>9}{:>10}{:>12}",
        "GPT-mini, 2 x 128", "step us", "recorded / plain", "MiB of 10", "checks", "off, ns", "off, %"
    );
    measure("cpu", Device::Cpu, false)?;
    measure("hpu", Device::Hpu(0), true)?;
    Ok(())
}
