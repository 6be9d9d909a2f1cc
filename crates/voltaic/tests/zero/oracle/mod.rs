//! Random runs of the public API beside a loop in plain tch (`expected.rs`), in one process, which uses nothing of voltaic: the same
//! weights, validation losses and numbers of steps, also after a restart from a checkpoint or a failure.
//!
//! `VOLTAIC_FUZZ=7 cargo test -p voltaic --test zero oracle::` runs the case of a seed, `VOLTAIC_FUZZ=100..200` those of many, with
//! `VOLTAIC_FUZZ_ON=1` beyond the first that fails; `make stress` runs more of them.

mod expected;
mod moved;
mod net;
mod own_loop;
mod plan;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Context, ensure};
use voltaic::Module;
use voltaic::callback::{
    Callback, EmaWeightAveragingConfig, EpochStart, ModelCheckpoint, ModelCheckpointConfig,
    OnExceptionCheckpoint, OnExceptionCheckpointConfig, StochasticWeightAveraging,
    StochasticWeightAveragingConfig, WeightAveraging, WeightAveragingConfig,
};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::HookContext;
use voltaic::optim::PerGroup;
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::trainer::{GraphMode, TrainerBuilder};
use voltaic::{Kind, Tensor};

use crate::fuzz::{End, SaveEnd, cases};
use crate::models::Batch;
use crate::random_runs::SaveAt;
use crate::ranks::{silent, weights};
use expected::{DECAY, Outcome, data, first, train};
use net::Net;
use plan::{Average, Hook, Plan, Restart};

/// Notes `val_loss` of each validation.
struct ValLosses(Arc<Mutex<Vec<f64>>>);

impl Callback for ValLosses {
    fn on_validation_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.lock().unwrap().extend(ctx.metric("val_loss"));
        Ok(())
    }
}

/// Batches in their order.
fn loaders(plan: &Plan) -> Loaders<Batch> {
    let [train, val] = data(plan);
    let of = |data: Batch, batch_size: usize| {
        DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(batch_size).build().unwrap()
    };
    let loaders = Loaders::new().train(of(train, plan.batch_size));
    if plan.val_every.is_some() { loaders.val(of(val, 2)) } else { loaders }
}

fn add_average(plan: &Plan, builder: TrainerBuilder) -> TrainerBuilder {
    match plan.average {
        Average::None => builder,
        Average::Ema => {
            let config = EmaWeightAveragingConfig { decay: DECAY, ..Default::default() };
            builder.callback(WeightAveraging::ema(config).unwrap())
        }
        Average::Equal => builder.callback(WeightAveraging::new(WeightAveragingConfig::default())),
        Average::Swa => {
            let config = StochasticWeightAveragingConfig {
                swa_lrs: PerGroup::All(plan.lr()),
                swa_epoch_start: EpochStart::Epoch(plan.swa_start as u64),
                save: true,
                ..Default::default()
            };
            builder.callback(StochasticWeightAveraging::from_config(config).unwrap())
        }
    }
}

/// DeepSpeed's settings, if the strategy is one of its stages.
fn deepspeed(plan: &Plan, folder: &Path) -> Option<DeepSpeedStrategy> {
    let stage: u8 = plan.strategy.strip_prefix("deepspeed")?.parse().unwrap();
    let (optimizer, params, ratio) = plan.offload;
    let (backend, buffers, param_buffers) = plan.aio;
    let nvme_path = folder.join("nvme");
    let mut zero = serde_json::json!({
        "stage": stage,
        "offload_optimizer": {
            "device": optimizer, "ratio": ratio, "pin_memory": ratio < 1.0, "nvme_path": nvme_path,
            "buffer_count": buffers, "pipeline_read": plan.pipeline.0, "pipeline_write": plan.pipeline.1,
        },
    });
    if stage == 3 {
        zero["offload_param"] = serde_json::json!({
            "device": params, "nvme_path": nvme_path, "buffer_count": param_buffers, "max_in_cpu": 0,
        });
        zero["sub_group_size"] = 50.into();
        zero["stage3_param_persistence_threshold"] = if ratio < 1.0 { 0.into() } else { 100_000.into() };
    }
    Some(DeepSpeedStrategy::settings(serde_json::json!({
        "zero_allow_untested_optimizer": true,
        "zero_optimization": zero,
        "aio": {"backend": backend, "min_bytes": 1},
        "activation_checkpointing": {"cpu_checkpointing": plan.on_host},
    })))
}

fn builder(plan: &Plan, folder: &Path) -> TrainerBuilder {
    let mut builder = silent(plan.ranks, plan.strategy, folder);
    if let Some(strategy) = deepspeed(plan, folder) {
        builder = builder.strategy(strategy);
    }
    builder = builder.accelerator(plan.accelerator).precision(plan.precision);
    builder = builder.max_epochs(plan.epochs as i64).num_sanity_val_steps(0);
    if !plan.is_manual {
        builder = builder.accumulate_grad_batches(plan.window as u64);
    }
    if let Some(modules) = plan.checkpointed {
        builder = builder.activation_checkpointing([modules]);
    }
    if plan.is_graphed {
        builder = builder.graph(GraphMode::Step);
    }
    if let Some(profiler) = plan.profiler {
        builder = builder.profiler(profiler);
    }
    if let Some(max_norm) = plan.clip {
        builder = builder.gradient_clip_val(max_norm);
    }
    builder = match plan.val_every {
        None => builder.limit_val_batches(0),
        Some(0) => builder,
        Some(every) => builder.val_check_interval(every as i32),
    };
    add_average(plan, builder)
}

/// Adds what saves the checkpoint of the restart; returns its path.
fn add_checkpoint(plan: &Plan, folder: &Path, builder: TrainerBuilder) -> (TrainerBuilder, Option<PathBuf>) {
    let path = folder.join("saved.ckpt");
    let builder = match plan.restart {
        Restart::None => return (builder, None),
        Restart::Batch(step) => {
            builder.callback(SaveAt { step, batches: plan.batches, path: path.clone(), name: "saved" })
        }
        Restart::LastEpoch => builder.callback(SaveEnd(End::Epoch, path.clone())),
        Restart::TrainEnd => builder.callback(SaveEnd(End::Training, path.clone())),
        Restart::ModelCheckpoint => {
            let config = ModelCheckpointConfig {
                dirpath: Some(folder.into()),
                filename: Some("{epoch}".into()),
                save_top_k: -1,
                ..Default::default()
            };
            let builder = builder.enable_checkpointing(true);
            let last = folder.join(format!("epoch={}.ckpt", plan.epochs - 1));
            return (builder.callback(ModelCheckpoint::new(config).unwrap()), Some(last));
        }
        Restart::Failure(..) => {
            let config = OnExceptionCheckpointConfig { dirpath: folder.into(), filename: "saved".into() };
            builder.callback(OnExceptionCheckpoint::new(config).unwrap())
        }
    };
    (builder, Some(path))
}

/// An error if a fit has not ended as the plan says. False if its hook was not called any more.
fn check_end(plan: &Plan, done: voltaic::Result<()>) -> anyhow::Result<bool> {
    let Restart::Failure(_, hook) = plan.restart else { return Ok(done.map(|()| false)?) };
    match done {
        Err(error) if format!("{error:#}").contains("fails on purpose") => Ok(true),
        Err(error) => Err(error.into()),
        Ok(()) => {
            // there may be neither a loss nor a step any more
            let may_end = matches!(
                hook,
                Hook::BeforeBackward | Hook::AfterBackward | Hook::BeforeStep | Hook::TrainingStep
            );
            ensure!(may_end, "{hook:?} did not fail");
            Ok(false)
        }
    }
}

/// Trains as the plan says, with its restart.
fn run(plan: &Plan, folder: &Path) -> anyhow::Result<Outcome> {
    let fit = |fails: bool, from: Option<&Path>| {
        let val_losses = Arc::default();
        let (builder, path) = add_checkpoint(plan, folder, builder(plan, folder));
        let mut trainer = builder.callback(ValLosses(Arc::clone(&val_losses))).build()?;
        if let Some(from) = from {
            trainer.ckpt_path(from);
        }
        let mut net = Net::new(plan, fails);
        let done = trainer.fit(&mut net, &mut loaders(plan));
        anyhow::Ok((trainer, net, val_losses, path, done))
    };
    let (mut trainer, mut net, mut val_losses, path, done) = fit(true, None)?;
    let has_failed = check_end(plan, done)?;
    let is_failure = matches!(plan.restart, Restart::Failure(..));
    if let Some(path) = path.filter(|_| has_failed || !is_failure) {
        drop(trainer);
        let again = fit(false, Some(&path)).context("second run")?;
        (trainer, net, val_losses) = (again.0, again.1, again.2);
        again.4.context("second run")?;
    }
    let weights = weights(&net);
    if plan.average == Average::Swa {
        let saved = Checkpoint::load(trainer.log_dir().join("checkpoints/swa.ckpt"))?.weights;
        for (name, weight) in &weights {
            let (_, saved) =
                saved.iter().find(|(own, _)| own == name).context("a weight is not in swa.ckpt")?;
            let apart = saved.to_kind(Kind::Double) - weight.to_kind(Kind::Double);
            ensure!(apart.abs().max().double_value(&[]) < 1e-6, "swa.ckpt has another {name}");
        }
    }
    let val_losses = val_losses.lock().unwrap().clone();
    let weights = weights.into_iter().map(|(_, weight)| weight).collect();
    Ok(Outcome { weights, val_losses, steps: trainer.global_step() })
}

fn norm(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Double).norm().double_value(&[])
}

/// What differs.
fn compare(plan: &Plan, own: &Outcome, expected: &Outcome) -> anyhow::Result<()> {
    ensure!(own.steps == expected.steps, "{} steps, not {}", own.steps, expected.steps);
    // a part of how far weights have moved, and a part of a loss; of 16 bits thrice the most of 5,000 runs
    let (tolerance, of_losses, least) = match plan.precision {
        "64-true" => (1e-9, 1e-6, 1e-10), // logged values are of 32 bits
        "32-true" => (2e-4, 2e-4, 1e-5),
        _ => (0.08, 0.06, 1e-5),
    };
    let moved = |(number, weight)| norm(&(weight - first(plan, number)));
    let most = expected.weights.iter().enumerate().map(moved).fold(0.0, f64::max);
    for (number, (own, expected)) in own.weights.iter().zip(&expected.weights).enumerate() {
        let is_rounded = own.kind() == Kind::BFloat16;
        let (own, expected) = (own.to_kind(Kind::Double), expected.to_kind(Kind::Double));
        let (apart, moved) = (norm(&(&own - &expected)), norm(&(&expected - first(plan, number))));
        // a weight of 16 bits is rounded
        let least = if is_rounded { 0.006 * norm(&expected) } else { least };
        let is_same = apart <= tolerance * (moved + most / 5.0) + least;
        ensure!(is_same, "weight {number} differs by {apart:e}, it has moved by {moved:e}");
    }
    let (own, expected) = (&own.val_losses, &expected.val_losses);
    // a second run has the last ones; a checkpoint is written after the validation that follows its batch
    let from =
        |first: usize| (first..plan.epochs * plan.batches).filter(|step| plan.validates_after(*step)).count();
    let is_count = match plan.restart {
        Restart::None => own.len() == expected.len(),
        Restart::Batch(step) => own.len() == from(step + 1),
        _ => own.len() <= expected.len(),
    };
    ensure!(is_count, "{} validations of {}", own.len(), expected.len());
    let is_same = |(own, expected): (&f64, &f64)| (own - expected).abs() <= of_losses * expected;
    let are_same = own.iter().rev().zip(expected.iter().rev()).all(is_same);
    ensure!(are_same, "validation losses {own:?}, not {expected:?}");
    Ok(())
}

fn compare_runs(accelerator: &'static str, ranks: usize, folder: &Path) {
    cases(ranks, folder, 24, |seed, folder| {
        let plan = Plan::of(seed, ranks, accelerator);
        let done = run(&plan, folder).and_then(|own| compare(&plan, &own, &train(&plan)));
        done.map(|()| true).map_err(|error| format!("{error:#}\n  {plan:?}"))
    });
}

on_ranks_tests! {
    one_rank_is_a_loop_in_tch: 1, |ranks, folder| compare_runs("cpu", ranks, folder);
    two_ranks_are_a_loop_in_tch: 2, |ranks, folder| compare_runs("cpu", ranks, folder);
    an_emulated_hpu_is_a_loop_in_tch: 1, |ranks, folder| compare_runs("hpu", ranks, folder);
}
