//! Random recipes, networks and settings: the same weights and scales, bit for bit, in graphs, with checkpointed modules and
//! resumed; on ranks the same with DDP and each stage of ZeRO.
//!
//! `VOLTAIC_FUZZ=7` runs the case of a seed, `VOLTAIC_FUZZ=100..200` those of many.

use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tch::Tensor;
use voltaic::Module;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::mse_loss;
use voltaic::nn::{Callable, Forward, Linear, ModuleExt, te};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::precision::HpuPrecisionPlugin;
use voltaic::precision::fp8::{
    AmaxComputeAlgo, DelayedScaling, Float8CurrentScaling, Fp8Format, Recipe, RowwiseScaling,
};
use voltaic::trainer::{GraphMode, PluginConfig, TrainerBuilder, seed_everything};

use crate::operators::start_hpu;
use crate::random_runs::{Activations, SaveAt, cases, loaders, numbers, one, some};
use crate::ranks::{STAGES, folder_of_rank, output};
use crate::runs::{Batch, left_by, no_counts};

const EPOCHS: i64 = 2;

/// A run.
#[derive(Debug, Clone)]
struct Plan {
    recipe: Recipe,
    /// Features of the layers that compute in float8 by themselves, from 5 on; then of those that do if they are replaced, up to 3.
    te: Vec<i64>,
    plain: Vec<i64>,
    minimizes_memory: bool,
    attends: bool,
    window: u64,
    clip: Option<f64>,
    batches: usize,
    /// The batch after which a checkpoint is saved, which another run resumes. It is one of all epochs, but for the last.
    saved: usize,
    checkpointed: &'static str,
    activations: Activations,
    graph: GraphMode,
}

impl Plan {
    fn of(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (fp8_format, margin) = (one(rng, [Fp8Format::E5M2, Fp8Format::Hybrid]), one(rng, [0, 0, 1, 2]));
        let delayed = DelayedScaling {
            fp8_format,
            margin,
            interval: one(rng, [1, 1, 1, 2, 3]),
            amax_history_len: rng.random_range(1..5),
            amax_compute_algo: one(rng, [AmaxComputeAlgo::MostRecent, AmaxComputeAlgo::Max]),
            reduce_amax: rng.random(),
            ..DelayedScaling::default()
        };
        let recipe = match rng.random_range(0..5) {
            0 => Float8CurrentScaling { fp8_format, margin }.into(),
            1 => RowwiseScaling { fp8_format, margin }.into(),
            _ => delayed.into(),
        };
        let features =
            |rng: &mut StdRng| (0..rng.random_range(0..3)).map(|_| one(rng, [1, 4, 8, 17])).collect();
        let (te, plain): (Vec<i64>, Vec<i64>) = (features(rng), features(rng));
        let batches = rng.random_range(2..7);
        let mut modules = vec!["Linear", "last"];
        modules.extend((!te.is_empty()).then_some("te.*"));
        modules.extend((!plain.is_empty()).then_some("plain.*"));
        let checkpointed = modules[rng.random_range(0..modules.len())];
        Self {
            attends: !matches!(recipe, Recipe::RowwiseScaling(_)) && rng.random(),
            recipe,
            te,
            plain,
            minimizes_memory: rng.random(),
            window: one(rng, [1, 1, 2, 3]),
            clip: one(rng, [None, None, Some(0.05)]),
            batches,
            saved: rng.random_range(0..2 * batches - 1),
            checkpointed,
            activations: one(rng, [Activations::Recompute, Activations::Save, Activations::Offload]),
            graph: one(rng, [GraphMode::Step, GraphMode::Modules]),
        }
    }

    /// Replays do not count passes.
    fn has_interval(&self) -> bool {
        matches!(&self.recipe, Recipe::DelayedScaling(recipe) if recipe.interval != 1)
    }
}

#[derive(Module)]
struct Net {
    te: Vec<te::Linear>,
    plain: Vec<Linear>,
    attention: Option<te::FusedAttention>,
    last: Linear,
}

impl Net {
    fn new(plan: &Plan) -> Self {
        let mut from = 5;
        let mut sizes = |to: i64| (std::mem::replace(&mut from, to), to);
        let te = |(from, to)| {
            te::Linear::builder(from, to).minimize_memory(plan.minimizes_memory).build().unwrap()
        };
        let net = Self {
            te: plan.te.iter().map(|to| te(sizes(*to))).collect(),
            plain: plan
                .plain
                .iter()
                .map(|to| sizes(*to))
                .map(|(from, to)| Linear::new(from, to).unwrap())
                .collect(),
            attention: plan.attends.then(|| te::FusedAttention::new(0.0).unwrap()),
            last: Linear::new(sizes(3).0, 3).unwrap(),
        };
        for (number, parameter) in net.parameters().into_iter().enumerate() {
            parameter.set_data(&(numbers(&parameter.size(), number as f64) * 0.4)).unwrap();
        }
        net
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let mut x = x.shallow_clone();
        for layer in &self.te {
            x = layer.call(&x)?.tanh();
        }
        for layer in &self.plain {
            x = layer.call(&x)?.tanh();
        }
        if let Some(attention) = &self.attention {
            let heads = x.view([1, 1, -1, x.size()[1]]);
            x = attention.attend(&heads, &heads, &heads, None, true)?.view_as(&x);
        }
        self.last.call(&x)
    }
}

impl LightningModule for Net {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(mse_loss(&ctx.graphed(self, x)?, y)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.02).into()
    }
}

/// What of a run differs from the plainest one.
#[derive(Debug, Clone, Default)]
struct How {
    graph: bool,
    checkpoints: bool,
    strategy: Option<&'static str>,
    save: Option<PathBuf>,
    from: Option<PathBuf>,
}

impl How {
    fn graph(&self) -> Self {
        Self { graph: true, ..self.clone() }
    }

    fn checkpoints(&self) -> Self {
        Self { checkpoints: true, ..self.clone() }
    }

    fn save(&self, to: &Path) -> Self {
        Self { save: Some(to.to_path_buf()), ..self.clone() }
    }

    fn from(&self, from: &Path) -> Self {
        Self { from: Some(from.to_path_buf()), ..self.clone() }
    }
}

fn run(plan: &Plan, ranks: usize, folder: &Path, how: &How) -> Result<Vec<(String, Tensor)>, String> {
    let mut builder: TrainerBuilder =
        crate::silent::silent().devices(ranks as i64).default_root_dir(folder.to_path_buf());
    builder = builder.accelerator("hpu").max_epochs(EPOCHS).accumulate_grad_batches(plan.window);
    let plugin: PluginConfig = HpuPrecisionPlugin {
        replace_layers: true,
        recipe: Some(plan.recipe.clone()),
        ..HpuPrecisionPlugin::new("fp8")
    }
    .into();
    builder = builder.plugins([plugin]);
    if let Some(clip) = plan.clip.filter(|_| ranks == 1) {
        builder = builder.gradient_clip_val(clip); // on ranks norms are summed in other orders
    }
    if let Some(strategy) = how.strategy {
        builder = builder.strategy(strategy);
    }
    if how.graph {
        builder = builder.graph(if ranks == 1 { plan.graph } else { GraphMode::Modules });
    }
    if how.checkpoints {
        builder = builder.activation_checkpointing(plan.activations.of(plan.checkpointed));
    }
    if let Some(path) = &how.save {
        let (path, name) = (path.clone(), "saved");
        builder = builder.callback(SaveAt { step: plan.saved, batches: plan.batches, path, name });
    }
    let mut trainer = builder.build().map_err(|error| error.to_string())?;
    if let Some(from) = &how.from {
        trainer.ckpt_path(from.as_path());
    }
    // a run that goes on has the random numbers of the one before it
    seed_everything(if how.from.is_some() { 9 } else { 4 }).map_err(|error| error.to_string())?;
    let mut net = Net::new(plan);
    let samples = (ranks * plan.batches * 4) as i64;
    trainer.fit(&mut net, &mut loaders((samples, 4), None)).map_err(|error| format!("{error:#}"))?;
    // what goes to the host is no part of a graph
    let is_offloaded = how.checkpoints && matches!(plan.activations, Activations::Offload);
    let graphs = &trainer.graph_report().modules;
    let idle = graphs.iter().find(|(_, stats)| stats.hits == 0 && stats.num_calls() > 4 && !is_offloaded);
    if let Some((name, stats)) = idle {
        return Err(format!("{name} is not replayed: {stats}"));
    }
    let mut left = left_by(&net);
    if plan.has_interval() || !how.graph {
        return Ok(left);
    }
    left = no_counts(left);
    Ok(left)
}

fn differs(own: &[(String, Tensor)], expected: &[(String, Tensor)]) -> Option<String> {
    let names = |all: &[(String, Tensor)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    if names(own) != names(expected) {
        return Some(format!("{:?} in place of {:?}", names(own), names(expected)));
    }
    let mut pairs = own.iter().zip(expected);
    let (own, expected) = pairs.find(|((_, own), (_, expected))| !own.equal(expected))?;
    Some(format!("{}: {:?} in place of {:?}", own.0, own.1.flatten(0, -1), expected.1.flatten(0, -1)))
}

fn compare(
    plan: &Plan,
    ranks: usize,
    folder: &Path,
    how: &How,
    expected: &[(String, Tensor)],
) -> Result<(), String> {
    let what = |what: String| format!("{how:?}: {what}");
    let own = run(plan, ranks, folder, how).map_err(what)?;
    let copy = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
    let mut expected: Vec<_> = expected.iter().map(copy).collect();
    if how.graph {
        expected = no_counts(expected);
    }
    differs(&own, &expected).map_or(Ok(()), |found| Err(what(found)))
}

/// One process: each variant is the plainest run.
fn case(plan: &Plan, folder: &Path) -> Result<(), String> {
    let [plain, other] = ["plain.ckpt", "other.ckpt"].map(|name| folder.join(name));
    let base = How::default();
    let expected = run(plan, 1, folder, &base.save(&plain))?;
    if !expected.iter().all(|(_, tensor)| tensor.isfinite().all().int64_value(&[]) == 1) {
        return Err("it is not finite".to_owned());
    }
    let check = |how: How| compare(plan, 1, folder, &how, &expected);
    check(base.from(&plain))?;
    check(base.checkpoints().save(&other))?;
    check(base.checkpoints().from(&plain))?;
    check(base.from(&other))?;
    if !plan.has_interval() {
        check(base.graph().save(&other))?;
        check(base.graph().from(&other))?;
        check(base.graph().from(&plain))?;
        check(base.graph().checkpoints())?;
    }
    Ok(())
}

#[test]
fn graphs_checkpointed_modules_and_resumed_runs_are_the_plain_run() {
    let _alone = crate::alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    cases("", some(10, 100), |seed| {
        let plan = Plan::of(seed);
        case(&plan, folder.path()).map(|()| true).map_err(|what| format!("{what}\n  {plan:?}"))
    });
}

/// On each rank: ZeRO is DDP.
fn on_ranks(ranks: usize, folder: &Path) {
    start_hpu();
    cases(&format!(" on {ranks} ranks"), some(3, 40), |seed| {
        let plan = Plan::of(seed);
        let found = case_on_ranks(&plan, ranks, &folder.join(seed.to_string()));
        found.map(|()| true).map_err(|what| format!("{what}\n  {plan:?}"))
    });
}

fn case_on_ranks(plan: &Plan, ranks: usize, folder: &Path) -> Result<(), String> {
    let ddp = How { strategy: Some("ddp"), ..How::default() };
    let saved = |strategy: &str| folder.join(format!("{strategy}.ckpt"));
    let expected = run(plan, ranks, folder, &ddp.save(&saved("ddp")))?;
    let check = |how: How| compare(plan, ranks, folder, &how, &expected);
    check(ddp.from(&saved("ddp")))?;
    check(ddp.checkpoints())?;
    if !plan.has_interval() {
        check(ddp.graph())?;
    }
    // later stages add up the gradients of a window in another order: batch by batch over all ranks
    let by_batch = match plan.window {
        1 => None,
        _ => Some(run(plan, ranks, folder, &How { strategy: Some("zero2"), ..How::default() })?),
    };
    for stage in STAGES {
        let stage_of = How { strategy: Some(stage), ..How::default() };
        let expected = by_batch.as_ref().filter(|_| stage != "zero1").unwrap_or(&expected);
        let check = |how: How| compare(plan, ranks, folder, &how, expected);
        check(stage_of.save(&saved(stage)))?;
        check(stage_of.from(&saved(stage)))?;
        if plan.window == 1 {
            check(stage_of.from(&saved("ddp")))?;
        }
        check(stage_of.checkpoints())?;
    }
    Ok(())
}

#[test]
fn stages_are_ddp() {
    const RANKS: usize = 2;
    if let Some(folder) = folder_of_rank() {
        return on_ranks(RANKS, &folder);
    }
    let _alone = crate::alone();
    let (test, folder) = (std::thread::current().name().unwrap().to_owned(), tempfile::tempdir().unwrap());
    let output = output(&test, RANKS, folder.path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
