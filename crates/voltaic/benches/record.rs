//! What the record of operations costs in a training step of two ranks: `cargo bench --bench record`.
//!
//! An MLP 784-256-10 is trained by two ranks with ddp on batches of 64, one thread each. Blocks of steps with the record and without
//! it take turns within one run, on both ranks alike. Printed is the ratio of the median steps of neighbouring blocks, and then the
//! difference that the record makes to one small operation.

use std::process::ExitCode;
use std::time::Instant;

use measure::micro::{Row, Target};
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::distributed::{ProcessGroup, ReduceOp, keep_record};
use voltaic::models::{Classifier, Mlp, MlpConfig};
use voltaic::module::HookContext;
use voltaic::trainer::Trainer;
use voltaic::{Kind, Module, Tensor};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BATCH: i64 = 64;
/// Steps of a block.
const BLOCK: usize = 20;
const PAIRS: usize = 150;
/// Operations of a block, and pairs of them.
const OPERATIONS: usize = 2000;
const OPERATION_PAIRS: usize = 100;

/// Median steps of the blocks, in microseconds.
#[derive(Default)]
struct Turns {
    started: Option<Instant>,
    block: Vec<f64>,
    with: Vec<f64>,
    without: Vec<f64>,
}

impl Callback for Turns {
    fn on_train_batch_start(
        &mut self,
        _ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.started = Some(Instant::now());
        Ok(())
    }

    fn on_train_batch_end(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let took = self.started.take().map_or(f64::NAN, |started| started.elapsed().as_secs_f64() * 1e6);
        self.block.push(took);
        if self.block.len() == BLOCK {
            let mut block = std::mem::take(&mut self.block);
            block.sort_by(f64::total_cmp);
            let is_kept = self.with.len() == self.without.len();
            if is_kept { &mut self.with } else { &mut self.without }.push(block[BLOCK / 2]);
            keep_record(!is_kept);
        }
        Ok(())
    }

    fn on_train_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        keep_record(true);
        let pairs = self.with.iter().zip(&self.without);
        let ratios: Vec<f64> = pairs.map(|(with, without)| with / without).collect();
        if ctx.is_global_zero() {
            let [_, middle, _] = measure::micro::quartiles(self.without.clone());
            println!("a step without the record takes {middle:.0} us");
            let what = "step of two ranks with the record of operations / without";
            Row::of("record", what, "", ratios, Target::AtMost(1.01)).record()?;
        }
        let Some(group) = ctx.process_group() else { return Ok(()) };
        let differences = operations(group)?;
        if ctx.is_global_zero() {
            Row::of("record", "the record of one operation", "us", differences, Target::AtMost(1.0))
                .record()?;
        }
        Ok(())
    }
}

/// What one operation takes longer with the record, by pairs of blocks.
fn operations(group: &ProcessGroup) -> voltaic::Result<Vec<f64>> {
    let tensor = Tensor::zeros([4, 4], (Kind::Float, tch::Device::Cpu));
    let block = |keeps: bool| {
        keep_record(keeps);
        group.barrier()?;
        let started = Instant::now();
        (0..OPERATIONS).try_for_each(|_| group.all_reduce(&tensor, ReduceOp::Sum))?;
        Ok::<_, voltaic::Error>(started.elapsed().as_secs_f64() * 1e6 / OPERATIONS as f64)
    };
    let differences = (0..OPERATION_PAIRS).map(|_| Ok(block(true)? - block(false)?)).collect();
    keep_record(true);
    differences
}

fn measure() -> Result<()> {
    let samples = BATCH * 2 * (BLOCK * 2 * PAIRS) as i64 / 20; // 20 epochs
    let images = Tensor::zeros([samples, 784], (Kind::Float, tch::Device::Cpu));
    let labels = Tensor::zeros([samples], (Kind::Int64, tch::Device::Cpu));
    let loader = DataLoader::new(TensorDataset::new((images, labels))?).batch_size(BATCH as usize).build()?;
    let builder = Trainer::builder().devices(2).strategy("ddp").accelerator("cpu").max_epochs(20);
    let builder = builder
        .default_root_dir(std::env::temp_dir())
        .logger(false)
        .enable_checkpointing(false)
        .enable_progress_bar(false);
    let mut trainer = builder.enable_model_summary(false).callback(Turns::default()).build()?;
    tch::set_num_threads(1);
    let mut net = Classifier::new(Mlp::new(MlpConfig::default())?);
    Ok(trainer.fit(&mut net, &mut Loaders::new().train(loader))?)
}

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
