//! What tensors of changing lengths cost: `cargo bench --bench lengths`.
//!
//! Each step of a language model has another length, so hardly any tensor has the size of one of the step before. Printed
//! are the most memory that a process has, and the time of a step, with the host pool and with libtorch's own allocator.
//! Each measurement is a process of its own; the two take turns within one run.

use std::process::Command;
use std::time::Instant;
use std::{env, error, fs, io};

use measure::micro::{Row, Target, quartiles};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tch::{Device, Kind, Tensor};
use voltaic::ffi;

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Set in the processes that measure, to the number of the case.
const CHILD: &str = "VOLTAIC_BENCH_CHILD";
const MIB: f64 = (1 << 20) as f64;
/// What a process may have more than with libtorch's own allocator, of the memory in use.
const MEMORY_TARGET: f64 = 1.25;
/// A step's time with the pool, of that with libtorch's own allocator.
const TIME_TARGET: f64 = 1.0;

/// A model, by what a step keeps until its end.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    layers: usize,
    width: i64,
    batch: i64,
    max_len: i64,
    /// Whether one length is taken for all steps.
    fixed: bool,
    steps: usize,
    rounds: usize,
}

const CASES: [Case; 3] = [
    Case {
        name: "956 MiB",
        layers: 12,
        width: 512,
        batch: 8,
        max_len: 512,
        fixed: false,
        steps: 30,
        rounds: 3,
    },
    Case {
        name: "96 MiB",
        layers: 3,
        width: 256,
        batch: 4,
        max_len: 512,
        fixed: false,
        steps: 200,
        rounds: 5,
    },
    Case {
        name: "96 MiB, one length",
        layers: 3,
        width: 256,
        batch: 4,
        max_len: 512,
        fixed: true,
        steps: 200,
        rounds: 5,
    },
];

fn main() -> Result<()> {
    if let Ok(case) = env::var(CHILD) {
        return measure(&CASES[case.parse::<usize>()?]);
    }
    println!(
        "{:<20}{:>10}{:>12}{:>12}{:>12}{:>12}{:>8}",
        "live at most", "", "peak, MiB", "libtorch's", "ms/step", "libtorch's", "ratio"
    );
    for (number, case) in CASES.iter().enumerate() {
        let (mut pool, mut own) = (Vec::new(), Vec::new());
        for _ in 0..case.rounds {
            pool.push(in_child(number, "1")?);
            own.push(in_child(number, "0")?);
        }
        let column =
            |runs: &[[f64; 3]], index: usize| quartiles(runs.iter().map(|run| run[index]).collect())[1];
        let of_own = |index: usize| -> Vec<f64> {
            pool.iter().zip(&own).map(|(pool, own)| pool[index] / own[index]).collect()
        };
        println!(
            "{:<20}{:>10.0}{:>12.0}{:>12.0}{:>12.2}{:>12.2}",
            case.name,
            column(&pool, 0),
            column(&pool, 1),
            column(&own, 1),
            column(&pool, 2),
            column(&own, 2)
        );
        for (what, index, target) in
            [("peak of memory", 1, MEMORY_TARGET), ("time of a step", 2, TIME_TARGET)]
        {
            let what = format!("{} live, {what}, of that with libtorch's allocator", case.name);
            Row::of("lengths", what, "", of_own(index), Target::AtMost(target)).record()?;
        }
    }
    Ok(())
}

/// Live MiB, peak MiB and milliseconds per step.
fn in_child(case: usize, switch: &str) -> Result<[f64; 3]> {
    let mut child = Command::new(env::current_exe()?);
    child.env(CHILD, case.to_string()).env("VOLTAIC_HOST_POOL", switch).env("OMP_NUM_THREADS", "1");
    let output = child.output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()).into());
    }
    let numbers: Vec<f64> =
        String::from_utf8(output.stdout)?.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().map_err(|numbers| format!("no three numbers: {numbers:?}").into())
}

fn measure(case: &Case) -> Result<()> {
    tch::set_num_threads(1);
    ffi::install_host_pool()?;
    let mut rng = StdRng::seed_from_u64(7);
    let mut times = Vec::new();
    let mut live = 0;
    for _ in 0..case.steps {
        let len = if case.fixed { case.max_len } else { rng.random_range(case.max_len / 8..=case.max_len) };
        let start = Instant::now();
        live = step(case, len)?.max(live);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.drain(..times.len() / 5);
    println!("{} {} {}", live as f64 / MIB, peak_mib()?, times.iter().sum::<f64>() / times.len() as f64);
    Ok(())
}

/// What a transformer's step allocates: activations of each layer that live until the gradients, temporary tensors beside
/// them, then gradients while the activations go. Returns the most bytes that lived at a time.
fn step(case: &Case, len: i64) -> Result<usize> {
    let Case { layers, width, batch, .. } = *case;
    let (mut live, mut most) = (0, 0);
    let make = |shape: &[i64]| -> Result<Tensor> { Ok(Tensor::f_ones(shape, (Kind::Float, Device::Cpu))?) };
    let bytes = |tensor: &Tensor| tensor.numel() * 4;
    let mut kept: Vec<Tensor> = Vec::new();
    for _ in 0..layers {
        for shape in [
            &[batch, len, 3 * width][..],
            &[batch, 4, len, len],
            &[batch, len, width],
            &[batch, len, 2 * width],
        ] {
            let tensor = make(shape)?;
            live += bytes(&tensor);
            kept.push(tensor);
        }
        let temporary = make(&[batch, len, 2 * width])?;
        most = most.max(live + bytes(&temporary));
    }
    while let Some(tensor) = kept.pop() {
        let gradient = make(&tensor.size())?;
        most = most.max(live + bytes(&gradient));
        live -= bytes(&tensor);
    }
    Ok(most)
}

/// Highest resident memory of this process.
fn peak_mib() -> Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? / 1024.0)
}
