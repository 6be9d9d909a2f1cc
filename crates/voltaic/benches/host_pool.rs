//! What the host memory pool gains: `cargo bench --bench host_pool`.
//!
//! Prints the time of an allocation and of training steps of two conv nets, with blocks cached, with the cache
//! switched off (each allocation asks the system), and with libtorch's own allocator. The first two alternate in
//! one process; the third needs processes of its own, which take turns with processes that have the pool. One thread,
//! medians of its CPU time, so that other programs on the machine disturb less.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;
use std::{env, error, fs, io};

use measure::micro::{Row, Target, quartiles};
use tch::nn::{Optimizer, OptimizerConfig, SequentialT};
use tch::{Device, Kind, Reduction, Tensor, nn};
use voltaic::ffi::{self, Pool};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Set in the processes that measure the pool beside libtorch's own allocator.
const CHILD: &str = "VOLTAIC_BENCH_CHILD";
const ROUNDS: usize = 15;
/// Pairs of processes, with the pool and without.
const PROCESSES: usize = 3;
/// What an allocation and its free take, in nanoseconds.
const PAIR_NS: f64 = 20.0;
/// A step's time with the pool, of that with libtorch's own allocator.
const STEP_RATIO: f64 = 1.0;
/// Channels and batch size.
const NETS: [(i64, i64); 2] = [(16, 32), (32, 64)];

fn main() -> Result<()> {
    tch::set_num_threads(1);
    if env::var_os(CHILD).is_some() {
        ffi::install_host_pool()?;
        for (channels, batch) in NETS {
            let mut net = ConvNet::new(channels, batch)?;
            println!("{}", quartiles((0..ROUNDS).map(|_| net.steps_ms()).collect::<Result<_>>()?)[1]);
        }
        return Ok(());
    }
    ffi::install_host_pool()?;
    print_latency()?;
    println!("\n{:<18}{:>12}{:>12}{:>16}   ms per step", "conv net", "pool", "cache off", "libtorch's own");
    let turns: Vec<[Vec<f64>; 2]> =
        (0..PROCESSES).map(|_| Ok([in_child("1")?, in_child("0")?])).collect::<Result<_>>()?;
    for (row, (channels, batch)) in NETS.into_iter().enumerate() {
        let (on, off) = cached_and_not(channels, batch)?;
        let name = format!("{channels}ch batch {batch}");
        let own = quartiles(turns.iter().map(|[_, own]| own[row]).collect())[1];
        println!("{name:<18}{on:>12.2}{off:>12.2}{own:>16.2}");
        let ratios = turns.iter().map(|[pool, own]| pool[row] / own[row]).collect();
        let what = format!("conv net {name}: a step, of one with libtorch's allocator");
        Row::of("host_pool", what, "", ratios, Target::AtMost(STEP_RATIO)).record()?;
    }
    println!("\nhost pool: {}", ffi::host_pool().stats());
    Ok(())
}

/// Milliseconds per step of both nets in a process with the pool or without.
fn in_child(switch: &str) -> Result<Vec<f64>> {
    let output =
        Command::new(env::current_exe()?).env(CHILD, "1").env("VOLTAIC_HOST_POOL", switch).output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()).into());
    }
    let times: Vec<f64> =
        String::from_utf8(output.stdout)?.lines().filter_map(|line| line.parse().ok()).collect();
    if times.len() == NETS.len() { Ok(times) } else { Err(format!("times of all nets: {times:?}").into()) }
}

fn cached_and_not(channels: i64, batch: i64) -> Result<(f64, f64)> {
    let mut net = ConvNet::new(channels, batch)?;
    let (mut on, mut off) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for (caching, times) in [(true, &mut on), (false, &mut off)] {
            ffi::host_pool().set_caching(caching);
            net.steps_ms()?; // fills the cache again
            times.push(net.steps_ms()?);
        }
    }
    ffi::host_pool().set_caching(true);
    Ok((quartiles(on)[1], quartiles(off)[1]))
}

fn print_latency() -> Result<()> {
    println!(
        "{:<18}{:>12}{:>12}{:>16}   ns per pair",
        "allocate + free", "pool", "cache off", "empty tensor"
    );
    for (name, bytes) in [("64 B", 64), ("4 KiB", 4 << 10), ("256 KiB", 256 << 10), ("4 MiB", 4 << 20)] {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new(1, None)));
        let (mut on, mut off, mut empty) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            pool.set_caching(true);
            on.push(pair_ns(10_000, || pool_pair(pool, bytes)));
            pool.set_caching(false);
            off.push(pair_ns(1_000, || pool_pair(pool, bytes)));
            empty.push(pair_ns(1_000, || {
                drop(black_box(Tensor::empty([bytes as i64], (Kind::Uint8, Device::Cpu))));
            }));
        }
        let [pool, off, empty] = [on.clone(), off, empty].map(|times| quartiles(times)[1]);
        println!("{name:<18}{pool:>12.1}{off:>12.1}{empty:>16.1}");
        let what = format!("{name}: an allocation and its free");
        Row::of("host_pool", what, "ns", on, Target::AtMost(PAIR_NS)).record()?;
    }
    Ok(())
}

fn pool_pair(pool: &'static Pool, bytes: usize) {
    if let Some(block) = pool.allocate(black_box(bytes)) {
        // SAFETY: the block was just allocated, nothing refers to it, and it is released once.
        unsafe { Pool::release(black_box(block)) };
    }
}

fn pair_ns(pairs: u32, mut pair: impl FnMut()) -> f64 {
    pair();
    let start = Instant::now();
    for _ in 0..pairs {
        pair();
    }
    start.elapsed().as_nanos() as f64 / f64::from(pairs)
}

/// CPU time of this thread, as the kernel's scheduler counts it.
fn cpu_ns() -> Result<f64> {
    let stat = fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(stat.split_whitespace().next().unwrap_or_default().parse()?)
}

/// Two convolutions with batch norm on 32 x 32 images, AdamW.
struct ConvNet {
    net: SequentialT,
    optimizer: Optimizer,
    images: Tensor,
    labels: Tensor,
}

impl ConvNet {
    fn new(channels: i64, batch: i64) -> Result<Self> {
        let vars = nn::VarStore::new(Device::Cpu);
        let root = vars.root();
        let same = nn::ConvConfig { padding: 1, ..Default::default() };
        let net = nn::seq_t()
            .add(nn::conv2d(&root / "conv1", 3, channels, 3, same))
            .add(nn::batch_norm2d(&root / "norm1", channels, Default::default()))
            .add_fn(|x| x.relu())
            .add(nn::conv2d(&root / "conv2", channels, channels, 3, same))
            .add(nn::batch_norm2d(&root / "norm2", channels, Default::default()))
            .add_fn(|x| x.relu().max_pool2d_default(2).flatten(1, -1))
            .add(nn::linear(&root / "fc", channels * 16 * 16, 10, Default::default()));
        let optimizer = nn::AdamW::default().build(&vars, 1e-3)?;
        let images = Tensor::rand([batch, 3, 32, 32], (Kind::Float, Device::Cpu));
        let labels = Tensor::randint(10, [batch], (Kind::Int64, Device::Cpu));
        Ok(Self { net, optimizer, images, labels })
    }

    /// Milliseconds per step, over a few steps.
    fn steps_ms(&mut self) -> Result<f64> {
        const STEPS: u32 = 4;
        let start = cpu_ns()?;
        for _ in 0..STEPS {
            let logits = nn::ModuleT::forward_t(&self.net, &self.images, true);
            let loss = logits.cross_entropy_loss::<Tensor>(&self.labels, None, Reduction::Mean, -100, 0.);
            self.optimizer.backward_step(&loss);
        }
        Ok((cpu_ns()? - start) / 1e6 / f64::from(STEPS))
    }
}
