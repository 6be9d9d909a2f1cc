//! What the trainer itself costs per step: `cargo bench --bench overhead`.
//!
//! An MLP 784-256-10 is trained on batches of 64, on one thread, with the fused AdamW kernel, by a bare loop of tch
//! calls and by the trainer. The two take turns in blocks within one run, so that whatever else the machine does
//! falls on both. Printed is, over the pairs of neighbouring blocks, the median (and quartiles) of the difference
//! between the median steps of the two; then the mean of the difference between their mean steps without the most
//! extreme tenth of the pairs, which includes the row that a logger writes now and then. Also printed: memory taken
//! from the system, allocations on Rust's heap, and what a `DataLoader` costs.

#[path = "../tests/hpu/heap.rs"]
mod heap;

use std::cell::RefCell;
use std::hint::black_box;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;
use std::{env, error};

use measure::micro::{self, Target, quartiles};
use rand::rngs::StdRng;
use tch::{Device, Kind, Reduction, Tensor};
use voltaic::data::{DataLoader, Dataset, EpochRange, Loaders, TensorDataset};
use voltaic::ffi::{self, SharedTensor};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, Linear, Module, ModuleExt, Parameter};
use voltaic::optim::{AdamW, BuildOptimizer, Optimizer, Optimizers, ParamGroupSpec};
use voltaic::trainer::{Trainer, TrainerBuilder};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;
type Pair = (Tensor, Tensor);

/// Layers and batch of a network.
#[derive(Clone, Copy)]
struct Size {
    inputs: i64,
    hidden: i64,
    batch: i64,
}

const MLP: Size = Size { inputs: 784, hidden: 256, batch: 64 };
/// So small that the kernels' scatter does not hide what is measured.
const TINY: Size = Size { inputs: 8, hidden: 8, batch: 1 };
const CLASSES: i64 = 10;

/// Set in the process that measures: its standard error is not a terminal, as the progress bar's default needs.
const CHILD: &str = "VOLTAIC_BENCH_CHILD";
const TARGET_US: f64 = 20.0;
/// What the default callbacks and loggers may cost more than the bare trainer, rows of the logger included.
const DEFAULTS_TARGET_US: f64 = 50.0;
/// Steps of a block; the first of each finds its caches cold and does not count.
const BLOCK: usize = 11;
const PAIRS: usize = 250;
/// Parts of the pairs whose mean is taken apart, for the spread; each has the rows that loggers write now and then.
const GROUPS: usize = 5;
const WARM_UP_BLOCKS: usize = 10;

/// Microseconds and heap allocations of each step of a block.
type Block = Vec<(f64, u64)>;

/// The bare loop with weights of its own, and the record of both loops.
struct Turns {
    params: Vec<(String, Parameter)>,
    optimizer: Box<dyn Optimizer>,
    batches: Vec<Pair>,
    bare: Vec<Block>,
    trainer: Vec<Block>,
    current: Block,
    /// Start of the trainer's step in progress, and heap allocations until then.
    started: Option<(Instant, u64)>,
    /// Blocks that the pool had from the system when the warm-up was over, and when the last turn was.
    system_allocs: [u64; 2],
}

impl Turns {
    fn new(size: Size) -> Result<Self> {
        let batches = batches(size)?;
        let params = [Linear::new(size.inputs, size.hidden)?, Linear::new(size.hidden, CLASSES)?]
            .iter()
            .enumerate()
            .flat_map(|(i, layer)| {
                layer.named_parameters().into_iter().map(move |(fqn, p)| (format!("{i}.{fqn}"), p.clone()))
            })
            .collect::<Vec<_>>();
        let optimizer = AdamW::new(1e-4).build(vec![ParamGroupSpec::new(params.clone())])?;
        let (bare, trainer, current) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { params, optimizer, batches, bare, trainer, current, started: None, system_allocs: [0; 2] })
    }

    /// Called at the start of each of the trainer's steps: ends the step before it, and lets the bare loop have its
    /// turn after each block.
    fn tick(&mut self) -> anyhow::Result<()> {
        if let Some((started, allocs)) = self.started {
            self.current.push((micros(started), heap::allocs() - allocs));
        }
        if self.current.len() == BLOCK {
            self.trainer.push(std::mem::take(&mut self.current));
            self.system_allocs[1] = ffi::host_pool().stats().total_system_allocs;
            if self.trainer.len() == WARM_UP_BLOCKS {
                self.system_allocs[0] = self.system_allocs[1];
            }
            let block = (0..BLOCK).map(|step| self.bare_step(step)).collect::<anyhow::Result<_>>()?;
            self.bare.push(block);
        }
        self.started = Some((Instant::now(), heap::allocs()));
        Ok(())
    }

    fn bare_step(&mut self, step: usize) -> anyhow::Result<(f64, u64)> {
        let (started, allocs) = (Instant::now(), heap::allocs());
        let (x, y) = &self.batches[step % self.batches.len()];
        let [w1, b1, w2, b2] = self.params.as_slice() else { anyhow::bail!("an MLP has four parameters") };
        let hidden = x.f_linear(&w1.1, Some(&*b1.1))?.f_relu()?;
        let logits = hidden.f_linear(&w2.1, Some(&*b2.1))?;
        let loss = logits.f_cross_entropy_loss::<Tensor>(y, None, Reduction::Mean, -100, 0.0)?;
        self.optimizer.zero_grad()?;
        loss.f_backward()?;
        self.optimizer.step()?;
        drop((hidden, logits, loss));
        Ok((micros(started), heap::allocs() - allocs))
    }
}

/// The same network for the trainer.
#[derive(Module)]
struct Mlp {
    fc1: Linear,
    fc2: Linear,
    #[module(skip)]
    turns: RefCell<Turns>,
    #[module(skip)]
    log: Log,
}

#[derive(Clone, Copy)]
enum Log {
    Nothing,
    Step,
    StepAndEpoch,
}

/// A row of the table: name, network, what is logged, how the trainer is built.
type Variant<'a> = (&'a str, Size, Log, Build<'a>);
type Build<'a> = &'a dyn Fn(TrainerBuilder) -> TrainerBuilder;

impl LightningModule for Mlp {
    type Batch = Pair;

    fn training_step(&self, (x, y): &Pair, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.turns.borrow_mut().tick()?;
        let hidden = self.fc1.forward(x)?.f_relu()?;
        let loss = cross_entropy(&self.fc2.forward(&hidden)?, y)?;
        match self.log {
            Log::Nothing => {}
            Log::Step => drop(ctx.log("train_loss", &loss)),
            Log::StepAndEpoch => drop(ctx.log("train_loss", &loss).on_epoch(true).prog_bar(true)),
        }
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(1e-4).into()
    }
}

/// Batches that are ready: handing one out costs nothing but the loader's own bookkeeping.
struct Ready {
    batches: Vec<(SharedTensor, SharedTensor)>,
    len: usize,
}

impl Ready {
    fn new(batches: &[Pair], len: usize) -> Self {
        let share = |(x, y): &Pair| (SharedTensor::new(x), SharedTensor::new(y));
        Self { batches: batches.iter().map(share).collect(), len }
    }
}

impl Dataset for Ready {
    type Batch = Pair;

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, indices: &[usize], _rng: &mut StdRng) -> anyhow::Result<Pair> {
        let (x, y) = &self.batches[indices[0] % self.batches.len()];
        Ok((x.get().shallow_clone(), y.get().shallow_clone()))
    }
}

fn main() -> ExitCode {
    let done = if env::var_os(CHILD).is_some() { measure() } else { measure_in_child() };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure_in_child() -> Result<()> {
    let child = Command::new(env::current_exe()?)
        .env(CHILD, "1")
        .stdout(Stdio::inherit())
        .stderr(Stdio::piped())
        .spawn()?
        .wait_with_output()?;
    match child.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&child.stderr).into_owned().into()),
    }
}

fn measure() -> Result<()> {
    tch::set_num_threads(1);
    ffi::install_host_pool()?;
    ffi::set_engine_multithreading(false)?;
    let bare = |t: TrainerBuilder| {
        t.logger(false).enable_checkpointing(false).enable_progress_bar(false).enable_model_summary(false)
    };
    println!(
        "{:<36}{:>10}{:>10}  {:<22}{:>10}{:>9}{:>9}",
        "per step, us", "bare loop", "trainer", "difference (quartiles)", "of means", "heap", "system"
    );
    let steps = (PAIRS + WARM_UP_BLOCKS) * BLOCK + 1;
    let mut measured_rows = Vec::new();
    let rows: [Variant; 7] = [
        ("MLP 784-256-10: bare trainer", MLP, Log::Nothing, &bare),
        ("  with ctx.log", MLP, Log::Step, &bare),
        ("  with ctx.log, also over the epoch", MLP, Log::StepAndEpoch, &bare),
        ("  default callbacks and loggers", MLP, Log::StepAndEpoch, &|t| t),
        ("MLP 8-8-10, batch 1: bare trainer", TINY, Log::Nothing, &bare),
        ("  with ctx.log, also over the epoch", TINY, Log::StepAndEpoch, &bare),
        ("  default callbacks and loggers", TINY, Log::StepAndEpoch, &|t| t),
    ];
    for (name, size, log, build) in rows {
        let loader = DataLoader::new(Ready::new(&batches(size)?, steps)).unbatched().build()?;
        let measured = run(loader, size, log, build)?;
        measured.print(name);
        measured_rows.push((name, measured));
    }
    record(&measured_rows)?;
    println!(
        "heap: allocations of Rust per step beyond the bare loop's; system: blocks of memory that libtorch"
    );
    println!("took from the system in {} steps of both loops after the warm-up", 2 * PAIRS * BLOCK);

    println!("\nDataLoader, 784 floats x {}, shuffled, in memory", MLP.batch);
    for num_workers in [0, 1] {
        let x = Tensor::f_rand([steps as i64 * MLP.batch / 8, MLP.inputs], (Kind::Float, Device::Cpu))?;
        let y = Tensor::f_randint(CLASSES, [x.size()[0]], (Kind::Int64, Device::Cpu))?;
        let loader = || {
            let dataset = TensorDataset::new((x.shallow_clone(), y.shallow_clone()))?;
            DataLoader::new(dataset)
                .batch_size(MLP.batch as usize)
                .shuffle(true)
                .num_workers(num_workers)
                .build()
        };
        println!("  num_workers={num_workers}: {:.1} us per batch by itself", alone(&loader()?)?);
        run(loader()?, MLP, Log::Nothing, &bare)?
            .print(&format!("  bare trainer, num_workers={num_workers}"));
    }
    println!("  ready batches: {:.1} us per batch by itself", {
        alone(&DataLoader::new(Ready::new(&batches(MLP)?, steps)).unbatched().build()?)?
    });
    println!("\nhost pool: {}", ffi::host_pool().stats());
    Ok(())
}

/// The numbers that have targets.
fn record(rows: &[(&str, Row)]) -> Result<()> {
    for (name, row) in &rows[..3] {
        let what = format!("{}, more per step than a bare loop", name.trim());
        let record =
            micro::Row::of("overhead", what, "us", row.differences.clone(), Target::AtMost(TARGET_US));
        record.record()?;
    }
    // the defaults and the bare trainer before them, of both networks
    for (network, defaults, bare) in [("MLP 784-256-10", 3, 0), ("MLP 8-8-10, batch 1", 6, 4)] {
        let what = format!(
            "{network}: default callbacks and loggers, more per step than the bare trainer (of means)"
        );
        let more =
            rows[defaults].1.group_means.iter().map(|mean| mean - rows[bare].1.mean_difference).collect();
        micro::Row::of("overhead", what, "us", more, Target::AtMost(DEFAULTS_TARGET_US)).record()?;
    }
    Ok(())
}

fn batches(size: Size) -> Result<Vec<Pair>> {
    let batch = || -> Result<Pair> {
        let x = Tensor::f_rand([size.batch, size.inputs], (Kind::Float, Device::Cpu))?;
        Ok((x, Tensor::f_randint(CLASSES, [size.batch], (Kind::Int64, Device::Cpu))?))
    };
    (0..16).map(|_| batch()).collect()
}

/// Trains with the trainer and the bare loop in turns.
fn run(loader: DataLoader<Pair>, size: Size, log: Log, build: Build) -> Result<Row> {
    let folder = tempfile::tempdir()?;
    let turns = RefCell::new(Turns::new(size)?);
    let mut net = Mlp {
        fc1: Linear::new(size.inputs, size.hidden)?,
        fc2: Linear::new(size.hidden, CLASSES)?,
        turns,
        log,
    };
    let steps = (PAIRS + WARM_UP_BLOCKS) * BLOCK + 1;
    let builder = Trainer::builder().default_root_dir(folder.path()).max_steps(steps as i64);
    build(builder).build()?.fit(&mut net, &mut Loaders::new().train(loader))?;
    Ok(Row::of(&net.turns.borrow()))
}

/// Microseconds per batch of a loader that nobody waits for.
fn alone(loader: &DataLoader<Pair>) -> Result<f64> {
    let mut times = Vec::new();
    for epoch in 0..5 {
        let mut batches = loader.iter(EpochRange::epoch(epoch))?;
        drop(black_box(batches.next()));
        let started = Instant::now();
        let mut count = 0;
        for batch in batches {
            drop(black_box(batch?));
            count += 1;
        }
        times.push(micros(started) / f64::from(count));
    }
    Ok(quartiles(times)[1])
}

struct Row {
    bare: f64,
    trainer: f64,
    /// Of the median steps of each pair of blocks.
    differences: Vec<f64>,
    mean_difference: f64,
    /// The same of each group of pairs.
    group_means: Vec<f64>,
    heap: f64,
    system: u64,
}

impl Row {
    fn of(turns: &Turns) -> Self {
        let blocks = || turns.bare.iter().zip(&turns.trainer).skip(WARM_UP_BLOCKS);
        let over =
            |value: &dyn Fn(&Block, &Block) -> f64| quartiles(blocks().map(|(b, t)| value(b, t)).collect());
        let heap = |block: &Block| quartiles(block.iter().skip(1).map(|step| step.1 as f64).collect())[1];
        let mean_differences: Vec<f64> = blocks().map(|(b, t)| mean_us(t) - mean_us(b)).collect();
        Self {
            bare: over(&|bare, _| median_us(bare))[1],
            trainer: over(&|_, trainer| median_us(trainer))[1],
            differences: blocks().map(|(bare, trainer)| median_us(trainer) - median_us(bare)).collect(),
            mean_difference: trimmed_mean(mean_differences.clone()),
            group_means: mean_differences
                .chunks(mean_differences.len().div_ceil(GROUPS).max(1))
                .map(|group| trimmed_mean(group.to_vec()))
                .collect(),
            heap: over(&|bare, trainer| heap(trainer) - heap(bare))[1],
            system: turns.system_allocs[1] - turns.system_allocs[0],
        }
    }

    fn print(&self, name: &str) {
        let [low, middle, high] = quartiles(self.differences.clone());
        println!(
            "{name:<36}{:>10.1}{:>10.1}  {:<22}{:>10.1}{:>9}{:>9}",
            self.bare,
            self.trainer,
            format!("{middle:.1} ({low:.1} to {high:.1})"),
            self.mean_difference,
            self.heap,
            self.system
        );
    }
}

fn micros(started: Instant) -> f64 {
    started.elapsed().as_nanos() as f64 / 1e3
}

fn median_us(block: &Block) -> f64 {
    quartiles(block.iter().skip(1).map(|step| step.0).collect())[1]
}

fn mean_us(block: &Block) -> f64 {
    block.iter().skip(1).map(|step| step.0).sum::<f64>() / (block.len() - 1) as f64
}

fn trimmed_mean(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let kept = &values[values.len() / 20..values.len() - values.len() / 20];
    kept.iter().sum::<f64>() / kept.len() as f64
}
