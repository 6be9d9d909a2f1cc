//! Random networks, steps and settings under each stage beside data-parallel training: the same losses, weights, buffers and states
//! of optimizers, bit for bit where sums are the same.
//!
//! `VOLTAIC_FUZZ=7` runs the case of a seed, `VOLTAIC_FUZZ=100..200` those of many; `VOLTAIC_FUZZ_WITHOUT=clip,2` leaves out
//! parts of it, a number is a block.

mod net;
mod plan;

use std::path::Path;
use std::time::Duration;

use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::Loaders;
use voltaic::distributed::World;
use voltaic::module::{HookContext, StepHook};
use voltaic::nn::ModuleExt;
use voltaic::strategy::{BuildStrategy, Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::Trainer;
use voltaic::{Kind, Module, Tensor};

use crate::models::Batch;
use crate::random_runs::{self, SaveAt, seeds};
use crate::ranks::{on_ranks, runs_all, silent, weights};
use net::Net;
use plan::{Plan, Shape, When};

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

/// Does by hand what a plan asks for, and reads.
struct Hands(Plan);

impl Hands {
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
        match hook {
            StepHook::OnBeforeBackward => self.at(When::BeforeBackward, ctx, module),
            StepHook::OnAfterBackward => self.at(When::AfterBackward, ctx, module),
            StepHook::OnBeforeOptimizerStep => self.at(When::BeforeStep, ctx, module),
            StepHook::OnBeforeZeroGrad => {}
        }
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
        if self.0.reads {
            let net = module.downcast_mut::<Net>()?;
            for parameter in net.parameters() {
                net.note(&parameter.norm());
            }
            for (_, tensor) in net.state_dict() {
                net.note(&tensor.sum(Kind::Double));
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

/// What a run has come to.
struct Outcome {
    trainer: Trainer,
    seen: Vec<u64>,
    weights: Vec<(String, Tensor)>,
}

/// Trains for two epochs.
fn run(
    plan: &Plan,
    ranks: usize,
    stage: Option<ZeroStage>,
    folder: &Path,
    name: &str,
    from: Option<&Path>,
) -> Result<Outcome, String> {
    let builder = silent(ranks, if ranks == 1 { "auto" } else { "ddp_find_unused_parameters_true" }, folder);
    let mut builder = match stage {
        None => builder,
        Some(stage) => builder.strategy(Staged(ZeroConfig {
            reduce_bucket_size: plan.reduce_bucket_size,
            param_persistence_threshold: plan.persistence,
            prefetch_bucket_size: plan.prefetch,
            max_live_parameters: plan.live,
            max_reuse_distance: plan.reuse,
            master_weights: plan.has_masters,
            timeout: Duration::from_secs(20),
            ..ZeroConfig::of_stage(stage)
        })),
    };
    builder = builder.max_epochs(2).accumulate_grad_batches(plan.window).num_sanity_val_steps(0);
    if let Some(norm) = plan.clip {
        builder = builder.gradient_clip_val(norm);
    }
    builder = plan.average.add_to(builder);
    builder = builder.callback(Hands(plan.clone()));
    let last = 2 * plan.batches - 1;
    for (step, kind) in [(last, "end")].into_iter().chain(plan.saved.map(|step| (step % last, "saved"))) {
        let path = folder.join(format!("{name}-{kind}.ckpt"));
        builder = builder.callback(SaveAt { step, batches: plan.batches, path, name: kind });
    }
    let mut trainer = builder.build().map_err(|error| error.to_string())?;
    if let Some(from) = from {
        trainer.ckpt_path(from);
    }
    tch::manual_seed(plan.blocks.len() as i64 + trainer.world().rank as i64);
    let mut net = Net::new(plan);
    trainer.fit(&mut net, &mut loaders(plan, ranks)).map_err(|error| error.to_string())?;
    Ok(Outcome { trainer, weights: weights(&net), seen: net.seen.into_inner().unwrap() })
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
    first: Option<&Outcome>,
) -> Result<(), String> {
    let tolerance = match (plan.is_exact(), plan.is_low()) {
        // Gloo adds up float64, each part in an order of its own
        (true, _) if ranks > 2 && plan.has(&Shape::Double) => 1e-9,
        (true, _) => 0.0,
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
    // weights of 16 bits have copies that ddp has not
    if !(plan.is_low() && plan.has_masters) {
        let is_same = stage == ZeroStage::One && plan.clip.is_none() && plan.manual.is_none();
        or(beside(ddp, if is_same && !plan.has(&Shape::Double) { 0.0 } else { tolerance }))?;
        let (own, expected) = (saved(&path(name, "end")), saved(&path("ddp", "end")));
        or(difference(&own.0, &expected.0, tolerance).map(|what| format!("saved: {what}")))?;
        or(difference(&own.1, &expected.1, tolerance * 10.0).map(|what| format!("state: {what}")))?;
    } else if let Some(first) = first {
        or(beside(first, tolerance).map(|what| format!("beside zero1: {what}")))?;
    }
    if plan.saved.is_some() {
        let again = run(plan, ranks, Some(stage), folder, "again", Some(&path(name, "saved")))
            .map_err(|error| format!("resumed: {error}"))?;
        // buffers are rank 0's when they are read back, until the next window
        let is_own = |name: &str| name.contains("running_");
        let is_first = own.trainer.is_global_zero();
        let alike = |all: &[(String, Tensor)]| -> Vec<_> {
            let kept = all.iter().filter(|(name, _)| is_first || !is_own(name));
            kept.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
        };
        let found = difference(&alike(&again.weights), &alike(&own.weights), 0.0);
        or(found.map(|what| format!("resumed: {what}")))?;
    }
    Ok(())
}

/// What differs in a case. False if it does not run at all.
fn case(plan: &Plan, ranks: usize, folder: &Path) -> Result<bool, String> {
    let Ok(ddp) = run(plan, ranks, None, folder, "ddp", None) else { return Ok(false) }; // it is nonsense
    let mut first: Option<Outcome> = None;
    for stage in STAGES {
        let name = stage.name();
        let of_stage = |what: String| format!("{name}: {what}");
        let own = run(plan, ranks, Some(stage), folder, name, None).map_err(of_stage)?;
        let found = compare(plan, ranks, folder, (stage, &own), &ddp, first.as_ref());
        // what is seen on one rank alone ends the case on all
        let told = match own.trainer.world().group() {
            Some(group) => group.all_gather_object(&found.err()).map_err(|error| error.to_string())?,
            None => vec![found.err()],
        };
        if let Some((rank, what)) = told.into_iter().enumerate().find_map(|(rank, what)| Some((rank, what?)))
        {
            return Err(of_stage(format!("on rank {rank}: {what}")));
        }
        first.get_or_insert(own);
    }
    Ok(true)
}

fn cases(ranks: usize, folder: &Path, default: std::ops::Range<u64>) {
    let without = std::env::var("VOLTAIC_FUZZ_WITHOUT").unwrap_or_default();
    let (mut failed, mut left_out, seeds) = (Vec::new(), 0, seeds(default));
    let (count, mut before) = (seeds.clone().count(), None);
    for seed in seeds {
        let plan = Plan::of(seed).without(&without);
        let own = folder.join(format!("{seed}-{ranks}"));
        std::fs::create_dir_all(&own).unwrap();
        let done = case(&plan, ranks, &own);
        left_out += usize::from(done == Ok(false));
        if let Err(what) = done {
            println!("\nseed {seed} on {ranks} ranks: {what}\n  {plan:?}");
            failed.push(seed);
            if std::env::var_os("VOLTAIC_FUZZ_ON").is_none() {
                panic!("seed {seed} on {ranks} ranks: {what}\n{plan:?}");
            }
        }
        // all ranks are done with the one before
        before.replace(own).map(std::fs::remove_dir_all);
    }
    assert!(3 * left_out <= count.max(3), "{left_out} of {count} cases do not run");
    assert!(failed.is_empty(), "seeds {failed:?} on {ranks} ranks");
}

fn some(default: u64) -> std::ops::Range<u64> {
    if runs_all() { 0..500 } else { 0..default }
}

#[test]
fn one_rank_is_ddp() {
    on_ranks("fuzz::one_rank_is_ddp", 1, |ranks, folder| cases(ranks, folder, some(20)));
}

#[test]
fn two_ranks_are_ddp() {
    on_ranks("fuzz::two_ranks_are_ddp", 2, |ranks, folder| cases(ranks, folder, some(10)));
}

#[test]
fn three_ranks_are_ddp() {
    on_ranks("fuzz::three_ranks_are_ddp", 3, |ranks, folder| cases(ranks, folder, some(6)));
}

#[test]
fn four_ranks_are_ddp() {
    on_ranks("fuzz::four_ranks_are_ddp", 4, |ranks, folder| cases(ranks, folder, some(4)));
}
