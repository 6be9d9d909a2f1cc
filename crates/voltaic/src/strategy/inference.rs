//! Inference as DeepSpeed sets it up: layers divided among ranks, weights in a dtype of their own, no optimizer.

use std::path::Path;
use std::time::Duration;

use tch::{Kind, Tensor};

use super::deepspeed::inference::{InferenceConfig, InferencePlan, check_ranks, dims};
use super::peers::SentVotes;
use super::strategy::Strategy;
use super::votes::Votes;
use crate::checkpoint::{Checkpoint, Failures, Unread, is_deepspeed};
use crate::device::Device;
use crate::distributed::World;
use crate::error::{CheckpointError, ConfigError, Problem, Result};
use crate::graph::{CacheStats, GraphedInPlace, WrapOptions, wrap_in_hpu_graph_inplace};
use crate::nn::parallel::{ParallelPlan, Unit, Values, auto_tp, by_policy, parallelize};
use crate::nn::{Module, ModuleExt, Parameter, load_state_dict_each, name_parameters};

/// Which layers of a module are divided, and how.
///
/// # Errors
/// If the policy does not fit the module; without one, if no rule fits.
pub(super) fn plan_of(module: &dyn Module, config: &InferenceConfig, ranks: usize) -> Result<ParallelPlan> {
    let grain = i64::try_from(config.tensor_parallel.tp_grain_size).unwrap_or(i64::MAX);
    let unit = Unit { grain, ranks: ranks as i64 };
    if !config.injection_policy.is_empty() {
        return by_policy(module, &config.injection_policy, unit);
    }
    if let Some(plan) = auto_tp(module, unit)? {
        return Ok(plan);
    }
    let what = format!("no rule says which layers of {} are divided", module.type_name());
    if config.replace_with_kernel_inject {
        tracing::warn!("tensor_parallel: {what}: each rank has all of them and computes the same");
        return Ok(ParallelPlan::new());
    }
    let remedy = "give an injection_policy, such as {Block: [attn.out, mlp.out]}, or the module #[module(parallel_plan = ..)]";
    Err(ConfigError::new("tensor_parallel", what, remedy).into())
}

/// Shards the layers, as far as there are ranks for that. Their values are those of rank 0, unless a checkpoint is loaded afterwards.
fn shard(module: &dyn Module, config: &InferenceConfig, world: &World) -> Result<()> {
    let Some(group) = world.mesh().tp.group() else { return Ok(()) };
    let plan = plan_of(module, config, group.world_size())?;
    let values = if config.checkpoint.is_some() { Values::Loaded } else { Values::OfRankZero };
    parallelize(module, group, &plan, values)
}

/// Inference of the ranks of a [`World`]: see [`init_inference`].
#[derive(Debug)]
pub(crate) struct Inference {
    plan: InferencePlan,
    world: World,
}

impl Inference {
    pub(crate) fn new(world: World, plan: InferencePlan) -> Self {
        Self { plan, world }
    }

    fn refused<T>(&self) -> Result<T> {
        Err(self.plan.refuse_fit().into())
    }
}

impl Strategy for Inference {
    fn name(&self) -> &'static str {
        self.plan.name
    }

    fn knows_mesh(&self) -> bool {
        self.world().mesh().pp.size == 1
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn timeout(&self) -> Option<Duration> {
        Some(self.plan.timeout)
    }

    fn allowed_differences(&self) -> Vec<String> {
        self.plan.allow_differences.clone()
    }

    fn place(&mut self, module: &dyn Module, device: Device, dtype: Option<Kind>) -> Result<()> {
        let config = &self.plan.settings.config;
        shard(module, config, &self.world)?;
        module.to_device(device)?;
        dtype.map_or(Ok(()), |dtype| module.to_dtype(dtype))
    }

    fn keeps(&self, _module: &dyn Module) -> bool {
        self.world.mesh().tp.size > 1 // all ranks take part where a weight is to be whole
    }

    fn begin_backward(&mut self, _loss: &Tensor, _syncs: bool, _votes: Votes) -> Result<()> {
        self.refused()
    }

    fn end_backward(&mut self, _done: Result<()>) -> Result<Votes> {
        self.refused()
    }

    fn agree(&self, votes: Votes) -> Result<Votes> {
        self.world.peers().map_or(Ok(votes), |group| SentVotes::start(group, votes)?.receive())
    }
}

/// A module that is set up for inference by [`init_inference`]; its graphs are used until this is dropped.
#[derive(Debug)]
#[must_use = "the graphs are used until this is dropped"]
pub struct InferenceEngine {
    world: World,
    graphs: Option<GraphedInPlace>,
}

impl InferenceEngine {
    /// The ranks as a mesh: those along `tp` need the same batches.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// With `enable_cuda_graph`: what the calls of the module found.
    pub fn graph_stats(&self) -> Option<CacheStats> {
        self.graphs.as_ref().map(|graphs| graphs.stats())
    }
}

/// Sets a module up for inference, in place: divides its layers among ranks (`tensor_parallel`), loads a `checkpoint`, of which each rank
/// keeps its slices, casts weights to `dtype`, and replays its calls (`enable_cuda_graph`). It is put into evaluation mode.
///
/// ```no_run
/// use voltaic::models::{Gpt, GptConfig};
/// use voltaic::nn::Callable;
/// use voltaic::strategy::{InferenceConfig, TensorParallel, init_inference};
/// # fn f(world: voltaic::distributed::World, tokens: &voltaic::Tensor) -> anyhow::Result<()> {
/// let mut gpt = voltaic::nn::init::deferred(|| Gpt::new(GptConfig::mini()))?;
/// let config = InferenceConfig {
///     tensor_parallel: TensorParallel::size(2),
///     checkpoint: Some("gpt.ckpt".to_owned()),
///     ..InferenceConfig::default()
/// };
/// let _engine = init_inference(&mut gpt, &config, world)?;
/// let logits = tch::no_grad(|| gpt.call(tokens))?;
/// # Ok(())
/// # }
/// ```
///
/// With the trainer the same settings are arguments of [`DeepSpeedStrategy`](super::DeepSpeedStrategy).
///
/// Source: `deepspeed.init_inference`.
///
/// # Collective
/// All ranks of `world`.
///
/// # Errors
/// [`ConfigError`] if settings do not go together, `tp_size` does not divide the ranks, or no rule says how the module is divided; as
/// [`Checkpoint::load`](crate::checkpoint::Checkpoint::load).
pub fn init_inference<M: Module>(
    module: &mut M,
    config: &InferenceConfig,
    world: World,
) -> Result<InferenceEngine> {
    let place =
        |(key, what, remedy): (&'static str, String, &'static str)| ConfigError::new(key, what, remedy);
    if let Some(problem) = config.problems().into_iter().next() {
        return Err(place(problem).into());
    }
    check_ranks(config, world.world_size)?;
    let dims = dims(config, world.world_size);
    let world = world.with_dims(dims)?;
    module.eval();
    shard(module, config, &world)?;
    if let Some(path) = config.checkpoint_path() {
        load_weights(module, &path, &world)?;
    }
    if let Some(dtype) = config.dtype {
        module.to_dtype(dtype)?;
    }
    let graphs = config.enable_cuda_graph.then(|| wrap_in_hpu_graph_inplace(module, WrapOptions::default()));
    Ok(InferenceEngine { world, graphs })
}

/// Takes the weights of a checkpoint, of which a rank that has slices reads no more.
fn load_weights(module: &impl Module, path: &Path, world: &World) -> Result<()> {
    name_parameters(module);
    let Some(group) = world.peers() else {
        let (checkpoint, unread) = Unread::of_checkpoint(Checkpoint::load(path)?, path);
        return take_weights(module, &checkpoint, &unread);
    };
    let opened = match world.of_rank_zero(is_deepspeed(path))? {
        true => Checkpoint::load(path).map(|checkpoint| Unread::of_checkpoint(checkpoint, path)),
        false => Unread::of_ranks(path, group),
    };
    let (checkpoint, unread) = on_all(opened, path, world)?;
    on_all(take_weights(module, &checkpoint, &unread), path, world)
}

fn take_weights(module: &impl Module, checkpoint: &Checkpoint, unread: &Unread) -> Result<()> {
    let num_optimizers = checkpoint.training.as_ref().map_or(0, |training| training.optimizers.len());
    let mut masters = unread.masters(num_optimizers);
    masters.retain(|fqn, _| {
        let is_full = |(own, parameter): &(String, Parameter)| own == fqn && parameter.kind() == Kind::Float;
        module.named_parameters().iter().any(is_full)
    });
    let mut failures = Failures::of(unread);
    load_state_dict_each(module.as_dyn(), &unread.weights(), true, &mut |name, held| {
        failures.note(held.read(unread, name, masters.get(name).copied()))
    })?;
    failures.end()
}

/// What this rank has done, if all ranks could; else the error of one, on all.
fn on_all<T>(done: Result<T>, path: &Path, world: &World) -> Result<T> {
    let Some(group) = world.peers() else { return done };
    let own = done.as_ref().err().map(ToString::to_string);
    let all = group.all_gather_object(&own)?;
    let done = done?;
    match all.into_iter().enumerate().find_map(|(rank, failed)| Some((rank, failed?))) {
        None => Ok(done),
        Some((rank, text)) => {
            let problem = Problem::new(format!("rank {rank}: {text}"), "see the error of that rank");
            Err(CheckpointError::OnRanks { action: "read", path: path.to_path_buf(), problem }.into())
        }
    }
}
