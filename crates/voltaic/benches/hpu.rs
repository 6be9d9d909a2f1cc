//! What the emulated HPU costs: `cargo bench --bench hpu`.
//!
//! Prints the time of small operators and of training steps on the CPU and on the emulated device, which takes the same
//! kernels. Both alternate in one process; one thread, medians. It says nothing about a real card.

use std::error;
use std::hint::black_box;
use std::time::Instant;

use measure::micro::{Row, Target, quartiles};
use tch::{Device, Kind, Tensor};
use voltaic::accelerator::{HpuEmulator, HpuSettings};
use voltaic::ffi;
use voltaic::models::{Gpt, GptConfig, LeNet, LeNetConfig, ResNet18, ResNet18Config};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, ModuleExt};
use voltaic::optim::{AdamW, Optimizer, Optimizers};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

const ROUNDS: usize = 25;
/// What a call may cost more on the emulated device, in nanoseconds, and what one without a direct way to its kernel may.
const CALL_NS: f64 = 150.0;
const BOXED_CALL_NS: f64 = 250.0;
/// A training step's time, of that on the CPU.
const STEP_RATIO: f64 = 1.05;
const CPU: Device = Device::Cpu;
/// How tch names hpu:0.
const HPU: Device = Device::Cuda(64);

fn main() -> Result<()> {
    tch::set_num_threads(1);
    ffi::install_host_pool()?;
    HpuEmulator::init(HpuSettings::default())?;
    print_operators()?;
    println!("\n{:<24}{:>10}{:>10}{:>8}   ms per training step", "model", "cpu", "hpu", "ratio");
    print_steps("lenet, batch 64", || LeNet::new(LeNetConfig::default()), [64, 1, 28, 28], 10)?;
    print_steps("resnet18, batch 32", || ResNet18::new(ResNet18Config::default()), [32, 3, 32, 32], 1)?;
    print_gpt()?;
    Ok(())
}

fn print_operators() -> Result<()> {
    println!("{:<24}{:>10}{:>10}{:>8}   ns per call", "operator", "cpu", "hpu", "more");
    let row = |name: &str, call: &dyn Fn(&Tensor, &Tensor) -> Tensor, size: &[i64], most_ns| {
        let inputs =
            |device| (Tensor::rand(size, (Kind::Float, device)), Tensor::rand(size, (Kind::Float, device)));
        let [cpu, hpu] = [CPU, HPU].map(inputs);
        let nanos = |(a, b): &(Tensor, Tensor)| {
            let start = Instant::now();
            for _ in 0..2000 {
                let _ = black_box(call(a, b));
            }
            start.elapsed().as_nanos() as f64 / 2000.0
        };
        let (mut on_cpu, mut on_hpu) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            on_cpu.push(nanos(&cpu));
            on_hpu.push(nanos(&hpu));
        }
        let more: Vec<f64> = on_hpu.iter().zip(&on_cpu).map(|(hpu, cpu)| hpu - cpu).collect();
        let (cpu, hpu) = (quartiles(on_cpu)[1], quartiles(on_hpu)[1]);
        println!("{name:<24}{cpu:>10.0}{hpu:>10.0}{:>+8.0}", hpu - cpu);
        let what = format!("{name}: a call more than on the CPU");
        Row::of("hpu", what, "ns", more, Target::AtMost(most_ns)).record()
    };
    row("add, 16 elements", &|a, b| a + b, &[16], CALL_NS)?;
    row("relu, 16 elements", &|a, _| a.relu(), &[16], CALL_NS)?;
    row("atan2, 16 elements", &|a, b| a.atan2(b), &[16], BOXED_CALL_NS)?;
    row("mm, 16 x 16", &|a, b| a.mm(b), &[16, 16], CALL_NS)?;
    row("softmax, 16 x 16", &|a, _| a.softmax(-1, Kind::Float), &[16, 16], CALL_NS)?;
    row("select", &|a, _| a.select(0, 1), &[16, 16], CALL_NS)?;
    Ok(())
}

/// A network with its optimizer and one batch, on a device.
struct Training<M> {
    net: M,
    optimizer: Box<dyn Optimizer>,
    batch: (Tensor, Tensor),
}

impl<M: ModuleExt> Training<M> {
    fn new(net: M, device: voltaic::Device, batch: (Tensor, Tensor)) -> Result<Self> {
        net.to_device(device)?;
        let optimizer =
            Optimizers::from(AdamW::new(1e-3)).build(net.as_dyn())?.pop().ok_or("one optimizer")?.optimizer;
        Ok(Self { net, optimizer, batch })
    }

    fn step_ms(&mut self, loss: impl Fn(&M, &Tensor, &Tensor) -> anyhow::Result<Tensor>) -> Result<f64> {
        let start = Instant::now();
        let loss = loss(&self.net, &self.batch.0, &self.batch.1)?;
        self.optimizer.zero_grad()?;
        loss.f_backward()?;
        self.optimizer.step()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}

fn print_steps<M: ModuleExt + Forward>(
    name: &str,
    net: impl Fn() -> voltaic::Result<M>,
    size: [i64; 4],
    steps: usize,
) -> Result<()> {
    let batch = |device| {
        (Tensor::rand(size, (Kind::Float, device)), Tensor::randint(10, [size[0]], (Kind::Int64, device)))
    };
    let mut cpu = Training::new(net()?, voltaic::Device::Cpu, batch(CPU))?;
    let mut hpu = Training::new(net()?, voltaic::Device::Hpu(0), batch(HPU))?;
    let loss = |net: &M, x: &Tensor, y: &Tensor| Ok(cross_entropy(&net.forward(x)?, y)?);
    print_ratio(name, steps, || cpu.step_ms(loss), || hpu.step_ms(loss))
}

fn print_gpt() -> Result<()> {
    let config = GptConfig::mini();
    let (vocabulary, length) = (config.vocab_size, config.block_size);
    let batch = |device| {
        let tokens = Tensor::randint(vocabulary, [4, length + 1], (Kind::Int64, device));
        (tokens.narrow(1, 0, length), tokens.narrow(1, 1, length))
    };
    let mut cpu = Training::new(Gpt::new(config.clone())?, voltaic::Device::Cpu, batch(CPU))?;
    let mut hpu = Training::new(Gpt::new(config)?, voltaic::Device::Hpu(0), batch(HPU))?;
    let loss = |net: &Gpt, x: &Tensor, y: &Tensor| net.loss(x, y);
    print_ratio("gpt-mini, batch 4", 1, || cpu.step_ms(loss), || hpu.step_ms(loss))
}

fn print_ratio(
    name: &str,
    steps: usize,
    mut cpu: impl FnMut() -> Result<f64>,
    mut hpu: impl FnMut() -> Result<f64>,
) -> Result<()> {
    let (mut on_cpu, mut on_hpu, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (mut sum_cpu, mut sum_hpu) = (0.0, 0.0);
        for _ in 0..steps {
            sum_cpu += cpu()?;
            sum_hpu += hpu()?;
        }
        on_cpu.push(sum_cpu / steps as f64);
        on_hpu.push(sum_hpu / steps as f64);
        ratios.push(sum_hpu / sum_cpu);
    }
    let ratio = quartiles(ratios.clone())[1];
    println!("{name:<24}{:>10.2}{:>10.2}{ratio:>8.3}", quartiles(on_cpu)[1], quartiles(on_hpu)[1]);
    let what = format!("{name}: a step, of one on the CPU");
    Ok(Row::of("hpu", what, "", ratios, Target::AtMost(STEP_RATIO)).record()?)
}
