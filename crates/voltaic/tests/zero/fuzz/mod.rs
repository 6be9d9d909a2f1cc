//! Random networks, steps and settings under each stage beside data-parallel training: the same losses, weights, buffers and states
//! of optimizers, bit for bit where sums are the same.
//!
//! `VOLTAIC_FUZZ=7` runs the case of a seed, `VOLTAIC_FUZZ=100..200` those of many; `VOLTAIC_FUZZ_WITHOUT=clip,2` leaves out
//! parts of it, a number is a block.

mod net;
mod plan;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::Loaders;
use voltaic::distributed::World;
use voltaic::module::{CheckpointRequest, HookContext, StepHook};
use voltaic::nn::ModuleExt;
use voltaic::optim::{OffloadState, OffloadStates};
use voltaic::strategy::{
    Aio, BuildStrategy, OffloadDevice, OffloadOptimizer, OffloadParam, Strategy, Zero, ZeroConfig, ZeroStage,
};
use voltaic::trainer::Trainer;
use voltaic::{Kind, Module, Tensor};

use crate::models::Batch;
use crate::random_net::{Shape, When};
use crate::random_runs::{self, SaveAt, some};
use crate::ranks::{silent, weights};
use net::Net;
pub use plan::End;
use plan::Plan;

const STAGES: [ZeroStage; 3] = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

/// Writes to a weight in each third step.
fn write(module: &dyn Module, step: usize, number: usize) {
    if step % 3 != 1 {
        return;
    }
    let parameters = module.parameters();
    let of = &parameters[number % parameters.len()];
    let _ = tch::no_grad(|| of.tensor().shallow_clone().multiply_scalar_(0.75));
}

/// Does by hand what a plan asks for, and reads; has states moved if it is a stage.
struct Hands(Plan, bool);

impl Hands {
    fn offload_states(&self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let Some(number) = self.0.offloaded_states.filter(|_| self.1 && ctx.batch_idx().is_multiple_of(2))
        else {
            return Ok(());
        };
        let all = OffloadState::ALL.into_iter().enumerate();
        let include = all.filter(|(bit, _)| number >> bit & 1 == 1).map(|(_, state)| state).collect();
        ctx.offload_states(OffloadStates { include, pin_memory: number & 16 == 0 })?;
        if number & 32 == 0 { Ok(()) } else { Ok(ctx.reload_states()?) }
    }

    fn at(&self, when: When, ctx: &HookContext, module: &dyn Module) {
        if let Some((_, number)) = self.0.by_hand.filter(|(own, _)| *own == when) {
            write(module, ctx.current_epoch() as usize * self.0.batches + ctx.batch_idx(), number);
        }
    }
}

impl Callback for Hands {
    fn on_step_hook(
        &mut self,
        hook: StepHook,
        ctx: &mut HookContext,
        module: &dyn Module,
    ) -> anyhow::Result<()> {
        self.at(When::of(hook), ctx, module);
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.at(When::BatchStart, ctx, module);
        if let Some(number) = self.0.switched {
            let parameters = module.parameters();
            let _ = parameters[number % parameters.len()].set_requires_grad(ctx.batch_idx() % 2 == 1);
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.at(When::BatchEnd, ctx, module);
        self.offload_states(ctx)?;
        if self.0.reads {
            let net = module.downcast_mut::<Net>()?;
            for parameter in net.parameters() {
                net.note(&parameter.norm());
            }
            for (_, tensor) in net.state_dict() {
                net.note(&tensor.to_device(voltaic::Device::Cpu.into()).sum(Kind::Double));
            }
        }
        Ok(())
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        if let Some((When::EpochEnd, number)) = self.0.by_hand {
            write(module, ctx.current_epoch() as usize, number);
        }
        Ok(())
    }
}

/// A stage with a plan's settings.
struct Staged(ZeroConfig);

impl BuildStrategy for Staged {
    fn timeout(&self) -> Duration {
        self.0.timeout
    }

    fn build(self: Box<Self>, world: World) -> voltaic::Result<Box<dyn Strategy>> {
        Ok(Box::new(Zero::new(world, self.0)))
    }
}

fn loaders(plan: &Plan, ranks: usize) -> Loaders<Batch> {
    let samples = 2 * (ranks * plan.batches) as i64 - plan.excess.min(ranks as i64 - 1);
    random_runs::loaders((samples, 2), plan.validates.then_some((4 * ranks as i64 + plan.excess, 2)))
}

/// The settings of a stage, with files below a folder.
fn config(plan: &Plan, stage: ZeroStage, folder: &Path) -> ZeroConfig {
    let default = ZeroConfig::of_stage(stage);
    let leaf = plan.leaf.filter(|_| !plan.blocks.is_empty());
    let device = |is_off: bool| if is_off { OffloadDevice::Cpu } else { OffloadDevice::None };
    let (ratio, has_params) = plan.offload.unwrap_or((0.0, false));
    let is_three = stage == ZeroStage::Three;
    let in_files = plan.in_files.filter(|_| is_three).unwrap_or_default();
    let place = |is_in_files: bool, is_off: bool| match is_in_files {
        true => OffloadDevice::Nvme,
        false => device(is_off),
    };
    let nvme_path = Some(folder.join("nvme").display().to_string());
    let or = |number: usize, own: usize, default: usize| if plan.defaults[number] { default } else { own };
    ZeroConfig {
        reduce_bucket_size: plan.reduce_bucket_size,
        param_persistence_threshold: or(0, plan.persistence, default.param_persistence_threshold),
        prefetch_bucket_size: or(1, plan.prefetch, default.prefetch_bucket_size),
        max_live_parameters: or(2, plan.live, default.max_live_parameters),
        max_reuse_distance: or(3, plan.reuse, default.max_reuse_distance),
        master_weights: plan.has_masters,
        leaf_modules: leaf.map(|leaf| format!("blocks.{}", leaf % plan.blocks.len())).into_iter().collect(),
        timeout: Duration::from_secs(20),
        offload_optimizer: OffloadOptimizer {
            device: place(in_files.optimizer, ratio > 0.0),
            ratio: if is_three && ratio > 0.0 { ratio } else { 1.0 },
            nvme_path: nvme_path.clone(),
            buffer_count: in_files.buffers.0,
            pipeline_read: in_files.pipeline_read,
            pipeline_write: in_files.pipeline_write,
            ..OffloadOptimizer::default()
        },
        offload_param: OffloadParam {
            device: place(in_files.params, has_params && is_three),
            nvme_path,
            buffer_count: in_files.buffers.1,
            max_in_cpu: in_files.max_in_cpu,
            ..OffloadParam::default()
        },
        aio: Aio {
            min_bytes: Some(1),
            backend: in_files.backend,
            block_size: in_files.block_size,
            ..Aio::default()
        },
        sub_group_size: in_files.sub_group_size,
        ..default
    }
}

/// What a run has come to.
struct Outcome {
    trainer: Trainer,
    seen: Vec<u64>,
    weights: Vec<(String, Tensor)>,
}

/// Asks for a checkpoint of the end of an epoch, or of training.
pub struct SaveEnd(pub End, pub PathBuf);

impl SaveEnd {
    fn ask(&self, ctx: &mut HookContext) {
        ctx.request_checkpoint(CheckpointRequest {
            path: self.1.clone(),
            weights_only: false,
            link_to: None,
            then_remove: Vec::new(),
        });
    }
}

impl Callback for SaveEnd {
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if self.0 == End::Epoch && Some(ctx.current_epoch() + 1) == ctx.facts().max_epochs {
            self.ask(ctx);
        }
        Ok(())
    }

    fn on_train_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if self.0 != End::Epoch {
            self.ask(ctx);
        }
        Ok(())
    }
}

/// Trains for two epochs, or as many as are told.
fn run(
    plan: &Plan,
    ranks: usize,
    stage: Option<ZeroStage>,
    folder: &Path,
    name: &str,
    (from, epochs): (Option<&Path>, i64),
) -> Result<Outcome, String> {
    let builder = silent(ranks, if ranks == 1 { "auto" } else { "ddp_find_unused_parameters_true" }, folder);
    let mut builder = match stage {
        None => builder,
        Some(stage) => builder.strategy(Staged(config(plan, stage, folder))),
    };
    if plan.offload.is_some() {
        builder = builder.accelerator("hpu");
    }
    if let Some(modules) = plan.checkpointed.filter(|_| stage.is_some()) {
        builder = builder.activation_checkpointing(plan.activations.of(modules));
    }
    if plan.half {
        builder = builder.precision("bf16-true");
    } else if plan.is_wide() {
        builder = builder.precision("64-true");
    }
    builder = builder.max_epochs(epochs).accumulate_grad_batches(plan.window).num_sanity_val_steps(0);
    if let Some(norm) = plan.clip {
        builder = builder.gradient_clip_val(norm);
    }
    builder = plan.average.add_to(builder);
    builder = builder.callback(Hands(plan.clone(), stage.is_some()));
    let last = 2 * plan.batches - 1;
    for (step, kind) in [(last, "end")].into_iter().chain(plan.saved.map(|step| (step % last, "saved"))) {
        let path = folder.join(format!("{name}-{kind}.ckpt"));
        builder = builder.callback(SaveAt { step, batches: plan.batches, path, name: kind });
    }
    if let Some(end) = plan.end {
        builder = builder.callback(SaveEnd(end, folder.join(format!("{name}-of-{epochs}.ckpt"))));
    }
    let mut trainer = builder.build().map_err(|error| error.to_string())?;
    if let Some(from) = from {
        trainer.ckpt_path(from);
    } else if plan.initial {
        let path = folder.join("initial.ckpt");
        tch::manual_seed(77);
        trainer.save_weights(&Net::new(plan), &path, None).map_err(|error| error.to_string())?;
        trainer.weights(path, true);
    }
    tch::manual_seed(plan.blocks.len() as i64 + trainer.world().rank as i64);
    let mut net = Net::new(plan);
    net.has_masters = stage.is_none() && plan.has_masters && plan.is_low();
    trainer.fit(&mut net, &mut loaders(plan, ranks)).map_err(|error| error.to_string())?;
    if plan.evaluates {
        // a sample more than what divides: its rank has a batch more
        let mut data = random_runs::loaders((2, 2), Some((4 * ranks as i64 + 1, 2)));
        let found = trainer.validate(&mut net, &mut data).map_err(|error| error.to_string())?;
        found.iter().for_each(|(_, value)| net.note(&Tensor::from(*value)));
    }
    let host = |(name, tensor): (String, Tensor)| (name, tensor.to_device(voltaic::Device::Cpu.into()));
    let weights = weights(&net).into_iter().map(host).collect();
    Ok(Outcome { trainer, weights, seen: net.seen.into_inner().unwrap() })
}

fn bits(tensor: &Tensor) -> Tensor {
    match tensor.kind() {
        Kind::Float => tensor.view_dtype(Kind::Int),
        Kind::Double => tensor.view_dtype(Kind::Int64),
        Kind::BFloat16 | Kind::Half => tensor.view_dtype(Kind::Int16),
        _ => tensor.shallow_clone(),
    }
}

/// How far from the same two lists of tensors are; nothing if within a part of the largest value.
fn difference(own: &[(String, Tensor)], expected: &[(String, Tensor)], tolerance: f64) -> Option<String> {
    let names = |all: &[(String, Tensor)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    if names(own) != names(expected) {
        return Some(format!("names: {:?} and {:?}", names(own), names(expected)));
    }
    for ((name, own), (_, expected)) in own.iter().zip(expected) {
        if (own.size(), own.kind()) != (expected.size(), expected.kind()) {
            return Some(format!("{name}: {own:?} and {expected:?}"));
        }
        if own.numel() == 0 || bits(own).equal(&bits(expected)) {
            continue;
        }
        let both_nan = own.isnan().logical_and(&expected.isnan()).all().int64_value(&[]) == 1;
        if both_nan {
            continue;
        }
        let largest = |tensor: &Tensor| tensor.to_kind(Kind::Double).abs().max().double_value(&[]);
        let apart = largest(&(own.to_kind(Kind::Double) - expected.to_kind(Kind::Double)));
        if apart.is_nan() || apart > tolerance * largest(expected).max(1e-2) {
            return Some(format!("{name} differs by {apart:e}, largest {:e}", largest(expected)));
        }
    }
    None
}

fn seen_differs(own: &[u64], expected: &[u64], tolerance: f64) -> Option<String> {
    if own.len() != expected.len() {
        return Some(format!("{} and {} values were seen", own.len(), expected.len()));
    }
    let all = own.iter().zip(expected).enumerate();
    let differs = |(own, expected): (&u64, &u64)| {
        let (own, expected) = (f64::from_bits(*own), f64::from_bits(*expected));
        let is_same = own.to_bits() == expected.to_bits() || (own.is_nan() && expected.is_nan());
        let apart = (own - expected).abs();
        !is_same && (apart.is_nan() || apart > tolerance * expected.abs().max(1e-2))
    };
    let first = all.filter(|(_, pair)| differs(*pair)).map(|(at, _)| at).next()?;
    Some(format!("value {first} is {}, not {}", f64::from_bits(own[first]), f64::from_bits(expected[first])))
}

type Tensors = Vec<(String, Tensor)>;

/// Weights and states of optimizers in a checkpoint.
fn saved(path: &Path) -> (Tensors, Tensors) {
    let sorted = |tensors: &[(String, Tensor)]| {
        let mut all: Vec<_> =
            tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    };
    let checkpoint = Checkpoint::load(path).unwrap();
    let optimizers = checkpoint.training.as_ref().unwrap().optimizers.iter();
    let states = optimizers.enumerate().flat_map(|(number, tensors)| {
        let kept = tensors.iter().filter(|(name, tensor)| tensor.numel() > 0 && !name.ends_with("bare.4"));
        let wide = |tensor: &Tensor| {
            if tensor.kind() == Kind::BFloat16 { tensor.to_kind(Kind::Float) } else { tensor.shallow_clone() }
        };
        kept.map(move |(name, tensor)| (format!("{number} {name}"), wide(tensor)))
    });
    (sorted(&checkpoint.weights), sorted(&states.collect::<Vec<_>>()))
}

/// What differs in a stage.
fn compare(
    plan: &Plan,
    ranks: usize,
    folder: &Path,
    (stage, own): (ZeroStage, &Outcome),
    ddp: &Outcome,
) -> Result<(), String> {
    let tolerance = match (plan.is_exact(), plan.is_low()) {
        // Gloo adds up float64, each part in an order of its own
        (true, _) if ranks > 2 && plan.has(&Shape::Double) => 1e-9,
        (true, _) => 0.0,
        (false, _) if plan.is_wide() => 1e-9,
        (false, false) => 2e-4,
        (false, true) => 2e-2,
    };
    let name = stage.name();
    let or = |what: Option<String>| what.map_or(Ok(()), Err);
    let beside = |expected: &Outcome, tolerance: f64| {
        seen_differs(&own.seen, &expected.seen, tolerance)
            .or_else(|| difference(&own.weights, &expected.weights, tolerance))
    };
    let path = |name: &str, kind: &str| folder.join(format!("{name}-{kind}.ckpt"));
    let is_same = stage == ZeroStage::One && plan.clip.is_none() && plan.manual.is_none();
    or(beside(ddp, if is_same && !plan.has(&Shape::Double) && !plan.is_wide() { 0.0 } else { tolerance }))?;
    let (mut found, mut expected) = (saved(&path(name, "end")), saved(&path("ddp", "end")));
    // ZeRO has float32 copies from the beginning, ddp from the first gradient of a weight
    let names = |all: &Tensors| all.iter().map(|(name, _)| name.clone()).collect::<HashSet<_>>();
    let both = &names(&found.1) & &names(&expected.1);
    for states in [&mut found.1, &mut expected.1] {
        states.retain(|(name, _)| !name.contains("master_param.") || both.contains(name));
    }
    or(difference(&found.0, &expected.0, tolerance).map(|what| format!("saved: {what}")))?;
    or(difference(&found.1, &expected.1, tolerance * 10.0).map(|what| format!("state: {what}")))?;
    if plan.end == Some(End::Short) {
        run(plan, ranks, Some(stage), folder, name, (None, 1)).map_err(|error| format!("short: {error}"))?;
    }
    let saved = plan.saved.map(|_| "saved");
    let ends = plan.end.map(|end| if end == End::Short { "of-1" } else { "of-2" });
    for kind in saved.into_iter().chain(ends) {
        let again = run(plan, ranks, Some(stage), folder, "again", (Some(&path(name, kind)), 2))
            .map_err(|error| format!("resumed from {kind}: {error}"))?;
        // buffers are rank 0's when they are read back, until the next window
        let is_own = |name: &str| name.contains("running_");
        let is_first = own.trainer.is_global_zero();
        let alike = |all: &[(String, Tensor)]| -> Vec<_> {
            let kept = all.iter().filter(|(name, _)| is_first || !is_own(name));
            kept.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
        };
        let found = difference(&alike(&again.weights), &alike(&own.weights), 0.0);
        or(found.map(|what| format!("resumed from {kind}: {what}")))?;
    }
    Ok(())
}

/// What differs in a case. False if it does not run at all.
fn case(seed: u64, ranks: usize, folder: &Path) -> Result<bool, String> {
    let plan = Plan::reduced(seed);
    let of_plan = |what: String| format!("{what}\n  {plan:?}");
    let ddp = match run(&plan, ranks, None, folder, "ddp", (None, 2)) {
        Ok(ddp) => ddp,
        Err(error) => {
            println!("seed {seed} on {ranks} ranks does not run: {error}"); // it is nonsense
            return Ok(false);
        }
    };
    for stage in STAGES {
        let name = stage.name();
        let of_stage = |what: String| of_plan(format!("{name}: {what}"));
        let own = run(&plan, ranks, Some(stage), folder, name, (None, 2)).map_err(of_stage)?;
        let found = compare(&plan, ranks, folder, (stage, &own), &ddp);
        // what is seen on one rank alone ends the case on all
        let told = match own.trainer.world().group() {
            Some(group) => group.all_gather_object(&found.err()).map_err(|error| error.to_string())?,
            None => vec![found.err()],
        };
        if let Some((rank, what)) = told.into_iter().enumerate().find_map(|(rank, what)| Some((rank, what?)))
        {
            return Err(of_stage(format!("on rank {rank}: {what}")));
        }
    }
    Ok(true)
}

/// [`random_runs::cases`], each in a folder of its own.
pub fn cases(ranks: usize, folder: &Path, default: u64, case: impl Fn(u64, &Path) -> Result<bool, String>) {
    let mut before = None;
    random_runs::cases(&format!(" on {ranks} ranks"), some(default, 500), |seed| {
        let own = folder.join(format!("{seed}-{ranks}"));
        std::fs::create_dir_all(&own).unwrap();
        let done = case(seed, &own);
        // all ranks are done with the one before
        before.replace(own).map(std::fs::remove_dir_all);
        done
    });
}

fn stages_are_ddp(ranks: usize, folder: &Path, default: u64) {
    cases(ranks, folder, default, |seed, folder| case(seed, ranks, folder));
}

on_ranks_tests! {
    one_rank_is_ddp: 1, |ranks, folder| stages_are_ddp(ranks, folder, 14);
    two_ranks_are_ddp: 2, |ranks, folder| stages_are_ddp(ranks, folder, 6);
    three_ranks_are_ddp: 3, |ranks, folder| stages_are_ddp(ranks, folder, 4);
    four_ranks_are_ddp: 4, |ranks, folder| stages_are_ddp(ranks, folder, 3);
}
