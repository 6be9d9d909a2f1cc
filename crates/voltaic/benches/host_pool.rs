//! What the host memory pool gains: `cargo bench --bench host_pool`.
//!
//! Prints the time of an allocation and of training steps of two conv nets, with blocks cached, with the cache
//! switched off (each allocation asks the system), and with libtorch's own allocator. The first two alternate in
//! one process; the third needs processes of its own, before and after. One thread, medians of its CPU time, so
//! that other programs on the machine disturb less.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;
use std::{env, error, fs, io};

use tch::nn::{Optimizer, OptimizerConfig, SequentialT};
use tch::{Device, Kind, Reduction, Tensor, nn};
use voltaic::ffi::{self, Pool};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Set in the processes that measure libtorch's own allocator.
const CHILD: &str = "VOLTAIC_BENCH_CHILD";
const ROUNDS: usize = 15;
/// Channels and batch size.
const NETS: [(i64, i64); 2] = [(16, 32), (32, 64)];

fn main() -> Result<()> {
    tch::set_num_threads(1);
    if env::var_os(CHILD).is_some() {
        for (channels, batch) in NETS {
            let mut net = ConvNet::new(channels, batch)?;
            println!("{}", median((0..ROUNDS).map(|_| net.steps_ms()).collect::<Result<_>>()?));
        }
        return Ok(());
    }
    ffi::install_host_pool()?;
    print_latency();
    println!("\n{:<18}{:>12}{:>12}{:>16}   ms per step", "conv net", "pool", "cache off", "libtorch's own");
    let mut own = vec![libtorch_own()?];
    let nets = NETS.map(|(channels, batch)| cached_and_not(channels, batch));
    own.push(libtorch_own()?);
    for (row, ((channels, batch), times)) in NETS.into_iter().zip(nets).enumerate() {
        let (on, off) = times?;
        let own = own.iter().filter_map(|turn| turn.get(row)).fold(f64::INFINITY, |a, &b| a.min(b));
        println!("{:<18}{on:>12.2}{off:>12.2}{own:>16.2}", format!("{channels}ch batch {batch}"));
    }
    println!("\nhost pool: {}", ffi::host_pool().stats());
    Ok(())
}

/// Milliseconds per step of both nets in a process without the pool.
fn libtorch_own() -> Result<Vec<f64>> {
    let output = Command::new(env::current_exe()?).env(CHILD, "1").env("VOLTAIC_HOST_POOL", "0").output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()).into());
    }
    Ok(String::from_utf8(output.stdout)?.lines().filter_map(|line| line.parse().ok()).collect())
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
    Ok((median(on), median(off)))
}

fn print_latency() {
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
        println!("{name:<18}{:>12.1}{:>12.1}{:>16.1}", median(on), median(off), median(empty));
    }
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

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
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
