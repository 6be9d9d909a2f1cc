//! Puts the state of a checkpoint back into a run.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};
use tch::Kind;

use crate::accelerator::rng;
use crate::callback::Callback;
use crate::checkpoint::{
    Checkpoint, Failures, LoopState, OpenWindow, RankState, Shard, Unread, exact, grad_name, is_deepspeed,
    parameter_of, read_without_optimizers, use_master_weights,
};
use crate::data::Stage;
use crate::distributed::World;
use crate::error::{CheckpointError, ConfigError, Error, Problem, Result};
use crate::module::{LightningModule, MetricsState, ModuleTensors, Profiling, RunFacts, load_weights};
use crate::nn::te::load_fp8_state_dict;
use crate::nn::{
    IncompatibleKeys, Module, ModuleExt, Parameter, StateEntry, check_tied, frozen_parameters,
    load_state_dict_each, quant,
};
use crate::optim::{OptimizerState, ParamGroup};
use crate::trainer::config::values::Limit;
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::agree::agreed;
use crate::trainer::session::engine::Restored;
use crate::trainer::session::hooks::{guarded, hook_error, of_callback};
use crate::trainer::session::session::{Run, Session};

/// What is left to do with a checkpoint once the loaders are there.
pub(crate) struct Resumed {
    pub path: PathBuf,
    /// Random states, which are to be set when everything else is ready.
    rng: Vec<(String, tch::Tensor)>,
    /// Training batches of an epoch, and their size.
    shape: (usize, Option<usize>),
    /// Ranks of the run that has saved it.
    ranks: usize,
}

/// A checkpoint that a call starts from.
pub(crate) struct Opened {
    checkpoint: Checkpoint,
    /// For a strategy that shards its state: weights, states of optimizers, gradients that were sharded.
    unread: Option<Unread>,
}

impl Opened {
    /// Renames weights by what their names begin with.
    ///
    /// # Errors
    /// If ranks read them by their names in the file; as [`Checkpoint::rename`].
    pub fn rename(&mut self, rules: &[(String, String)]) -> Result<()> {
        let key = "weights.rename";
        if rules.is_empty() {
            return Ok(());
        }
        if self.unread.is_some() {
            let what = "ranks of this strategy read their shards of the file by its own names";
            let remedy = "rename them before, by `voltaic convert FILE NEW --rename FROM=TO --weights_only`";
            return Err(ConfigError::new(key, what, remedy).into());
        }
        use_master_weights(&mut self.checkpoint, &|_| true)?; // which have the names of the file
        self.checkpoint.training = None;
        Ok(self.checkpoint.rename(rules, key)?)
    }
}

/// Reads a checkpoint, or what ranks read of it that read their own shards later. States of optimizers may be left out unless the call
/// trains.
///
/// # Collective
/// If the strategy shards its state: all ranks must call it.
pub(crate) fn load<M: LightningModule>(
    session: &mut Session<M>,
    path: &Path,
    trains: bool,
) -> Result<Opened> {
    let Run { engine, checkpoint_io, .. } = &mut *session.run;
    let world = engine.strategy.world();
    let is_slice = |(_, parameter): &(String, Parameter)| parameter.tensor_shard().is_some();
    if engine.strategy.sharded_state().is_none() && !session.module.named_parameters().iter().any(is_slice) {
        let is_ours = checkpoint_io.reads_shards();
        let known = if trains || !is_ours { None } else { read_without_optimizers(path)? };
        let checkpoint = known.map_or_else(|| checkpoint_io.load_checkpoint(path), Ok)?;
        return Ok(Opened { checkpoint, unread: None });
    }
    // that of DeepSpeed each rank reads as a whole
    let reads_shards = checkpoint_io.reads_shards() && !world.of_rank_zero(is_deepspeed(path))?;
    let (checkpoint, unread) = match world.peers().filter(|_| reads_shards) {
        Some(group) => agreed(world, "read", path, Unread::of_ranks(path, group))?,
        None => Unread::of_checkpoint(checkpoint_io.load_checkpoint(path)?, path),
    };
    Ok(Opened { checkpoint, unread: Some(unread) })
}

/// Parameters in float32, which need no master weights: those of a checkpoint are their weights.
fn full_precision<M: LightningModule>(session: &Session<M>) -> HashSet<String> {
    let parameters = session.module.named_parameters().into_iter();
    parameters.filter(|(_, parameter)| parameter.kind() == Kind::Float).map(|(fqn, _)| fqn).collect()
}

/// Says of a checkpoint that does not fit which file it is, and whose.
fn of_other_module<M: LightningModule>(
    error: Error,
    session: &Session<M>,
    loaded: &Opened,
    path: &Path,
) -> Error {
    let (saved, own) = (&loaded.checkpoint.meta.module, Module::type_name(session.module));
    match error {
        Error::Checkpoint(CheckpointError::Mismatch { module, problem })
            if !saved.is_empty() && saved != own =>
        {
            let problem = Problem::new(
                format!("{} is of a {saved}: {}", path.display(), problem.what),
                format!("use it with a {saved}, or give a checkpoint of a {own}"),
            );
            CheckpointError::Mismatch { module, problem }.into()
        }
        other => other.of_file(path),
    }
}

/// Takes the weights of the file that `key` names; what is on one side only is an error if it is `strict`.
pub(crate) fn restore_weights<M: LightningModule>(
    session: &Session<M>,
    loaded: &mut Opened,
    (key, path): (&'static str, &Path),
    strict: bool,
) -> Result<IncompatibleKeys> {
    let frozen = left_out(session, &loaded.checkpoint.meta.frozen, path)?;
    let Some(unread) = &loaded.unread else {
        let names = loaded.checkpoint.weights.iter().map(|(name, _)| name.as_str());
        if quant::has_scales(names) {
            refuse_to_quantize(session, (key, path), session.run.at.stage == Stage::Fit)?;
        }
        let done = load_weights(session.module.as_dyn(), &mut loaded.checkpoint, &frozen, strict);
        let (keys, taken) = done.map_err(|error| of_other_module(error, session, loaded, path))?;
        log_master_weights(taken, path);
        return Ok(keys);
    };
    let full = full_precision(session);
    let own = frozen.iter().map(|(name, shape)| (name.as_str(), shape.clone()));
    if quant::has_scales(unread.weights().into_iter().map(|(name, _)| name)) {
        refuse_to_quantize(session, (key, path), true)?;
    }
    let sharded = session.run.engine.strategy.sharded_state();
    let num_optimizers = loaded.checkpoint.training.as_ref().map_or(0, |training| training.optimizers.len());
    let mut masters = unread.masters(num_optimizers);
    masters.retain(|fqn, _| full.contains(*fqn));
    let mut failures = Failures::of(unread);
    let shapes: Vec<_> = unread.weights().into_iter().chain(own).collect();
    let names: HashSet<&str> = unread.weights().into_iter().map(|(name, _)| name).collect();
    let are_one = |first: &str, other: &str| unread.are_one(first, other);
    let tied = check_tied(session.module.as_dyn(), &are_one, &mut |name| {
        names.contains(name).then(|| unread.whole(name)).transpose()
    });
    agreed(
        session.run.world(),
        "read",
        path,
        tied.map_err(|error| of_other_module(error, session, loaded, path)),
    )?;
    let read = load_state_dict_each(session.module.as_dyn(), &shapes, strict, &mut |name, held| {
        if frozen.iter().any(|(frozen, _)| frozen == name) {
            return Ok(()); // the module has its values
        }
        let fill = || {
            let fqn = match held {
                StateEntry::Parameter(parameter) => parameter.fqn(),
                StateEntry::Buffer(_) => None,
            };
            let master = fqn.as_deref().and_then(|fqn| masters.get(fqn).copied());
            if let (Some(sharded), Some(fqn)) = (sharded, &fqn)
                && let Some(shard) = sharded.weight_shard(fqn)
            {
                let values = unread.shard(name, &shard)?;
                return sharded.load_weight(
                    fqn,
                    &match master {
                        Some(master) => exact(values, unread.shard(master, &shard)?)?,
                        None => values,
                    },
                );
            }
            held.read(unread, name, master)
        };
        failures.note(fill())
    });
    if session.run.world().is_global_zero() {
        log_master_weights(masters.len(), path);
    }
    let done = read.map_err(|error| of_other_module(error, session, loaded, path));
    agreed(session.run.world(), "read", path, done.and_then(|keys| failures.end().map(|()| keys)))
}

/// A quantized checkpoint is for validate, test and predict, with a strategy that does not shard weights.
fn refuse_to_quantize<M: LightningModule>(
    session: &Session<M>,
    (key, path): (&'static str, &Path),
    is_refused: bool,
) -> Result<()> {
    if !is_refused {
        return Ok(());
    }
    let what = format!("{} is quantized (float8 weights with scales)", path.display());
    let remedy = match session.run.at.stage {
        Stage::Fit => "validate, test or predict with it; fit needs the weights from before",
        _ => {
            "use a strategy that does not shard weights, such as ddp; with ZeRO load it by nn::quant::load before"
        }
    };
    Err(ConfigError::new(key, what, remedy).into())
}

/// Names and shapes of parameters that a checkpoint leaves out, since they were frozen.
///
/// # Errors
/// If one of them is not frozen in this run, or not there.
fn left_out<M: LightningModule>(
    session: &Session<M>,
    names: &[String],
    path: &Path,
) -> Result<Vec<(String, Vec<i64>)>> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let mut frozen = frozen_parameters(session.module.as_dyn());
    let others = names.iter().filter(|name| !frozen.iter().any(|(own, _)| own == *name));
    let others: Vec<&str> = others.map(String::as_str).collect();
    if let Some(first) = others.first() {
        let what = format!(
            "{} leaves out {} parameters that were frozen (exclude_frozen_parameters), and {} of them are not frozen in this \
             run, such as {first}",
            path.display(),
            names.len(),
            others.len()
        );
        let remedy = "freeze them before the checkpoint is loaded, as in configure_model, or load one that has all weights";
        let module = Module::type_name(session.module).to_owned();
        return Err(CheckpointError::Mismatch { module, problem: Problem::new(what, remedy) }.into());
    }
    frozen.retain(|(own, _)| names.contains(own));
    Ok(frozen)
}

fn log_master_weights(taken: usize, path: &Path) {
    if taken > 0 {
        tracing::info!(
            "{} is of a run in 16 bits: its float32 master weights are the weights of this run",
            path.display()
        );
    }
}

/// Takes the weights, and what modules, data and callbacks have saved.
pub(crate) fn restore_module<M: LightningModule>(
    session: &mut Session<M>,
    loaded: &mut Opened,
    path: &Path,
) -> Result<()> {
    restore_weights(session, loaded, ("ckpt_path", path), true)?;
    let checkpoint = &loaded.checkpoint;
    let Some(training) = &checkpoint.training else { return Ok(()) };
    // without reduce_amax each rank has scales of its own
    let own = session.run.world().rank.checked_sub(1).and_then(|index| training.ranks.get(index));
    let fp8 = own.map(|own| &own.fp8).filter(|fp8| !fp8.is_empty()).unwrap_or(&training.fp8);
    load_fp8_state_dict(session.module.as_dyn(), fp8)?;
    let state = read_state(&training.json, path)?;
    let action = session.profile_hook("on_load_checkpoint")?;
    let tensors =
        ModuleTensors::of_checkpoint(&training.module, &state.module_on_device, session.plan.device)?;
    guarded(|| session.module.on_load_checkpoint(&state.module, &tensors))
        .map_err(|source| hook_error("on_load_checkpoint", &state.progress, source))?;
    drop(action);
    if let Some(data) = &state.data {
        let _action = session.profile_data("load_state_dict")?;
        guarded(|| session.data.load_state_dict(data))
            .map_err(|source| hook_error("load_state_dict of the data module", &state.progress, source))?;
    }
    let Run { callbacks, facts: RunFacts { profiling, .. }, .. } = &mut *session.run;
    for callback in &mut *callbacks {
        of_callback(profiling, callback.as_mut(), "on_load_checkpoint", |callback| {
            callback.on_load_checkpoint(checkpoint)
        })
        .map_err(|source| hook_error("on_load_checkpoint", &state.progress, source))?;
    }
    restore_callbacks(profiling, callbacks, &state)?;
    if session.run.at.stage == Stage::Fit {
        session.run.at.progress = state.progress;
    }
    Ok(())
}

fn read_state(json: &Value, path: &Path) -> Result<LoopState> {
    LoopState::deserialize(json).map_err(|e| {
        let what = format!("its training state is not understood: {e}");
        unusable(path, what, "use another checkpoint")
    })
}

fn unusable(path: &Path, what: String, remedy: &'static str) -> Error {
    CheckpointError::Unreadable { path: path.to_path_buf(), problem: Problem::new(what, remedy) }.into()
}

/// Puts the rest of a training state back: optimizers, schedules, metrics, position.
pub(crate) fn restore_training<M: LightningModule>(
    session: &mut Session<M>,
    loaded: Opened,
    path: PathBuf,
) -> Result<Resumed> {
    let Opened { checkpoint, unread } = loaded;
    let Some(training) = checkpoint.training else {
        let remedy = "resume from a full checkpoint, or load the weights alone and start from the beginning";
        return Err(unusable(&path, "it holds weights only, no training state".to_owned(), remedy));
    };
    let state = read_state(&training.json, &path)?;
    check_optimizers(session, &state, training.optimizers.len(), &path)?;
    let first = RankState {
        grads: training.grads,
        metrics: training.metrics,
        rng: training.rng,
        fp8: training.fp8,
        logged: Value::Null,
    };
    let ranks = state.world_size.unwrap_or(match training.ranks.len() {
        0 => session.run.world().mesh().dp.size, // of one rank, or saved by rank 0 alone
        others => others + 1,
    });
    let LocalState { logged, metrics, grads, rng } =
        local_state(session.run.world(), first, training.ranks, state.metrics, &path)?;
    let configured = hyper_parameters(session);
    let groups = state.optimizers.into_iter().map(|(_, groups)| groups);
    session.run.engine.strategy.drop_grads(session.module.as_dyn())?;
    let grads = match &unread {
        Some(unread) => {
            let groups: Vec<Value> = groups.collect();
            let read = restore_sharded(session, unread, groups)
                .map(|whole| grads.into_iter().chain(whole).collect())
                .map_err(|error| error.of_file(&path));
            agreed(session.run.world(), "read", &path, read)?
        }
        None => {
            let states = training.optimizers.into_iter().zip(groups);
            let states = states.map(|(tensors, groups)| OptimizerState { tensors, groups });
            for (optimizer, state) in session.training.optimizers.iter_mut().zip(states) {
                optimizer.load_state_dict(state).map_err(|error| error.of_file(&path))?;
            }
            grads
        }
    };
    for (active, saved) in session.training.schedulers.iter_mut().zip(&state.schedulers) {
        active.configured.scheduler.load_state_dict(saved)?;
    }
    if session.run.world().is_global_zero() {
        log_other_settings(&configured, &hyper_parameters(session));
    }
    // of a loop of the user's own, whose step is done
    let are_used = session.module.automatic_optimization()
        && state.gradients.as_ref().is_some_and(|saved| !saved.window_is_open);
    match are_used {
        true => session.run.engine.strategy.drop_grads(session.module.as_dyn())?,
        false => restore_grads(session, &grads, &path)?,
    }
    let gradients = &mut session.run.engine.of_call.gradients;
    gradients.restore(state.gradients, &session.training.optimizers)?;
    // a rank that the saved run did not have may have no gradients
    let has_grads = !are_used && (gradients.has_scaled || state.window.is_some());
    session.run.engine.of_call.restored =
        Some(Restored { has_grads, window: state.window, has_other_batches: false });
    if let Some(own) = &mut session.run.engine.loss_scale {
        own.restore(state.grad_scaler, state.loss_scaler);
    }
    if session.run.seed != state.seed {
        let (saved, own) = (state.seed, session.run.seed);
        tracing::info!("shuffling with seed {saved} of the checkpoint instead of {own}");
        session.run.seed = saved;
    }
    session.run.log.metrics.restore(logged);
    session.run.log.metrics.restore_metrics(&metrics, session.plan.device)?;
    session.run.at.progress = state.progress;
    session.run.rows = state.rows;
    let ended = || session.run.callbacks.iter().find_map(|callback| callback.has_ended_run());
    if let Some(reason) = state.pending_stop.or_else(ended) {
        session.run.engine.agreed.stop = true;
        session.run.requests.stop = Some(reason);
    }
    let shape = (state.num_training_batches, state.batch_size);
    Ok(Resumed { path, rng, shape, ranks })
}

/// An error if a checkpoint with states of so many optimizers is not one of this run's optimizers and schedules.
fn check_optimizers<M: LightningModule>(
    session: &Session<M>,
    state: &LoopState,
    num_states: usize,
    path: &Path,
) -> Result<()> {
    let names: Vec<&str> = state.optimizers.iter().map(|(name, _)| name.as_str()).collect();
    let own: Vec<&str> = session.training.optimizers.iter().map(|optimizer| optimizer.name()).collect();
    if names != own || state.schedulers.len() != session.training.schedulers.len() {
        let what = format!(
            "it was written with optimizers {names:?} and {} schedules, this run has {own:?} and {}",
            state.schedulers.len(),
            session.training.schedulers.len()
        );
        return Err(unusable(path, what, "use the same configure_optimizers, or load the weights alone"));
    }
    if num_states != names.len() {
        let what = format!("it has states of {num_states} optimizers, and lists {}", names.len());
        return Err(unusable(path, what, "it was changed after it was written: use another checkpoint"));
    }
    Ok(())
}

/// The hyper-parameters of each group of each optimizer. With a schedule: the learning rate that it started from, and nothing that it
/// may change.
fn hyper_parameters<M: LightningModule>(session: &Session<M>) -> Vec<Map<String, Value>> {
    let groups = session.training.optimizers.iter().flat_map(|optimizer| optimizer.param_groups());
    let of_group = |group: &ParamGroup| {
        let mut named = group.hyper_parameters();
        if let Some(initial) = named.remove("initial_lr").filter(|initial| !initial.is_null()) {
            named.insert("lr".to_owned(), initial);
            named.retain(|name, _| name != "momentum" && name != "betas");
        }
        named
    };
    groups.map(of_group).collect()
}

/// Warns of hyper-parameters that this run was given and that the checkpoint has replaced.
fn log_other_settings(configured: &[Map<String, Value>], restored: &[Map<String, Value>]) {
    let differing = |(own, saved): (&Map<String, Value>, &Map<String, Value>)| {
        let changed = saved.iter().filter(|(name, value)| own.get(*name) != Some(*value));
        let texts = changed.map(|(name, value)| {
            let own = own.get(name).unwrap_or(&Value::Null);
            (format!("{name}={value}"), format!("{name}={own}"))
        });
        texts.unzip::<_, _, Vec<_>, Vec<_>>()
    };
    let groups = configured.iter().zip(restored).map(differing);
    if let Some((saved, own)) = groups.into_iter().find(|(saved, _)| !saved.is_empty()) {
        let (saved, own) = (saved.join(", "), own.join(", "));
        tracing::warn!(
            "the optimizer has {saved} of the checkpoint, not {own} as configured: a resumed run continues with the optimizer's \
             state; change it in a callback, or load the weights alone"
        );
    }
}

/// Gives this rank's optimizers what they have of their states, and the strategy its shards of gradients. Returns gradients that were
/// sharded and are unsharded now.
fn restore_sharded<M: LightningModule>(
    session: &mut Session<M>,
    unread: &Unread,
    groups: Vec<Value>,
) -> Result<Vec<(String, tch::Tensor)>> {
    let full = full_precision(session);
    let engine = &mut session.run.engine;
    let Some(sharded) = engine.strategy.sharded_state() else { return Ok(Vec::new()) };
    let mut failures = Failures::of(unread);
    for (index, (optimizer, groups)) in session.training.optimizers.iter_mut().zip(groups).enumerate() {
        let mut state = OptimizerState { tensors: Vec::new(), groups };
        let mut shards = Vec::new();
        for (name, key) in unread.optimizer_states(index) {
            if parameter_of(key).is_some_and(|fqn| full.contains(fqn)) {
                continue; // was taken as the weight
            }
            let (kind, fqn) = key.split_once('.').unwrap_or(("", ""));
            // of a parameter without dimensions all states have the shape of a number
            let is_like = |shape: &[i64]| !unread.is_number(name) || (shape.is_empty() && kind != "step");
            let spec = sharded.state_shard(fqn).filter(|spec| is_like(&spec.shape));
            failures.note(match spec {
                Some(spec) => unread
                    .shard(name, &spec)
                    .map(|values| shards.push(Shard { name: key.to_owned(), spec, values })),
                None => unread.whole(name).map(|whole| state.tensors.push((key.to_owned(), whole))),
            })?;
        }
        failures.note(sharded.load_optimizer(optimizer.as_mut(), state, shards))?;
    }
    let mut unsharded = Vec::new();
    for fqn in unread.shared_grads() {
        let name = grad_name(fqn);
        engine.of_call.gradients.has_scaled = true;
        match sharded.grad_shard(fqn) {
            Some(shard) => sharded.load_grad(fqn, &unread.shard(&name, &shard)?)?,
            None => unsharded.push((fqn.to_owned(), unread.whole(&name)?)),
        }
    }
    failures.end().map(|()| unsharded)
}

/// What this rank takes of the state that each rank has for itself.
struct LocalState {
    logged: MetricsState,
    metrics: Vec<(String, tch::Tensor)>,
    grads: Vec<(String, tch::Tensor)>,
    rng: Vec<(String, tch::Tensor)>,
}

/// `first` and `logged` are rank 0's, `ranks` the others'. A rank that the saved run did not have continues from rank 0's
/// random state, and has counted nothing: each batch counts at most once. Gradients keep their mean over the ranks.
fn local_state(
    world: &World,
    mut first: RankState,
    mut ranks: Vec<RankState>,
    logged: Value,
    path: &Path,
) -> Result<LocalState> {
    let saved = ranks.len() + 1;
    let all_grads =
        std::iter::once(&mut first).chain(&mut ranks).map(|state| std::mem::take(&mut state.grads));
    let grads = grads_with_same_mean(world, all_grads.collect())?;
    if saved != world.world_size && world.is_global_zero() {
        tracing::info!("{} is of {saved} rank(s), this run has {}", path.display(), world.world_size);
    }
    let of_rank = |rank: usize, logged: Value| {
        MetricsState::deserialize(logged).map_err(|e| {
            let what = format!("the logged values of rank {rank} are not understood: {e}");
            unusable(path, what, "use another checkpoint")
        })
    };
    let own = world.rank.checked_sub(1).map(|index| ranks.into_iter().nth(index));
    let RankState { metrics, rng, logged, .. } = match own {
        None => RankState { logged, ..first },
        Some(None) => {
            let logged = of_rank(0, logged)?.without_open_epoch();
            return Ok(LocalState { logged, metrics: Vec::new(), grads, rng: first.rng });
        }
        Some(Some(own)) => own,
    };
    let logged = of_rank(world.rank, logged)?;
    Ok(LocalState { logged, metrics, grads, rng })
}

/// This rank's gradients of those that the ranks of a run had, such that their mean over this run's ranks is the same.
fn grads_with_same_mean(
    world: &World,
    mut saved: Vec<Vec<(String, tch::Tensor)>>,
) -> Result<Vec<(String, tch::Tensor)>> {
    let (count, ranks) = (saved.len(), world.world_size);
    if count == ranks {
        return Ok(saved.swap_remove(world.rank));
    }
    let _no_grad = tch::no_grad_guard();
    let mut sums: Vec<(String, tch::Tensor)> = Vec::new();
    let mut places: HashMap<(String, Vec<i64>), usize> = HashMap::new();
    for (name, grad) in saved.into_iter().skip(world.rank).step_by(ranks).flatten() {
        let grad = grad.f_mul_scalar(ranks as f64 / count as f64)?;
        match places.entry((name.clone(), grad.size())) {
            Entry::Occupied(place) => {
                let (_, sum) = &mut sums[*place.get()];
                *sum = sum.f_add(&grad)?;
            }
            Entry::Vacant(place) => {
                place.insert(sums.len());
                sums.push((name, grad));
            }
        }
    }
    Ok(sums)
}

impl Resumed {
    /// Sets the random states.
    pub(crate) fn set_rng(&self) -> Result<()> {
        rng::set_states(&self.rng).map_err(|error| {
            let what = format!("its random states cannot be set: {}", error.into_problem("").what);
            unusable(&self.path, what, "use another checkpoint, or load the weights alone")
        })
    }

    /// The position within an epoch that is cut into other batches: after the samples that were seen. Other data is refused. `window`
    /// are the batches of an accumulation window.
    pub(crate) fn find_position(&self, run: &mut Run, plan: &TrainPlan, window: u64) -> Result<()> {
        let progress = &run.at.progress;
        let epoch = progress.current_epoch;
        if let Some(max_epochs) = run.facts.max_epochs.filter(|max_epochs| epoch > *max_epochs) {
            let what =
                format!("{max_epochs}, but {} is of epoch {epoch}, counted from 0", self.path.display());
            let remedy = "train for more epochs, or from another checkpoint";
            return Err(ConfigError::new("trainer.max_epochs", what, remedy).into());
        }
        let is_mid_epoch = progress.batch_idx > 0 && !progress.epoch_ended;
        let own = (run.facts.num_training_batches, run.facts.train_batch_size);
        let is_known = self.shape.0 > 0; // a converted checkpoint does not tell
        let ranks = run.world().mesh().dp.size;
        // batches that the same limit ended do not tell how many samples there are
        let is_limited = plan.limit_train == Limit::Batches(self.shape.0 as u64);
        let is_cut_otherwise = is_limited
            && ranks != self.ranks
            && plan.ranks.use_distributed_sampler
            && run.facts.train_batch_size.is_some();
        if !is_known || (own == self.shape && !is_cut_otherwise) {
            return Ok(());
        }
        let refuse = |why: &str, remedy: &'static str| -> Error {
            let what = format!(
                "{} was written at batch {} of an epoch of {}, this run has {}{why}",
                self.path.display(),
                progress.batch_idx,
                text(self.shape, self.ranks, ranks),
                text(own, ranks, self.ranks)
            );
            ConfigError::new("ckpt_path", what, remedy).into()
        };
        let (before, now) = (Epoch::of(self.shape, self.ranks), Epoch::of(own, ranks));
        let check_grads = || -> Result<()> {
            // with manual optimization there are those that the module has left, which keep their mean over the ranks
            let has_grads = run.engine.of_call.restored.is_some_and(|restored| restored.has_grads);
            let is_other =
                before.zip(now).is_some_and(|(before, now)| before.global_batch != now.global_batch);
            if !(has_grads && run.facts.automatic_optimization && is_other) {
                return Ok(());
            }
            let remedy = "keep ranks x batch size, or resume from a checkpoint between accumulation windows";
            Err(refuse(", and the checkpoint has gradients of an open accumulation window", remedy))
        };
        if !is_mid_epoch {
            return check_grads(); // windows of DeepSpeed go on over epochs
        }
        let (Some(before), Some(now)) = (before, now) else {
            return Err(refuse("", SAME_DATA));
        };
        if !is_limited && !before.may_be_of_same_data(now) {
            return Err(refuse("", SAME_DATA));
        }
        // a file of the last batch: its schedules have been stepped, and no batch is left
        let is_complete = progress.batch_idx as usize >= self.shape.0;
        if before.global_batch == now.global_batch && (!is_complete || before.batches == now.batches) {
            return Ok(());
        }
        check_grads()?;
        let seen = progress.batch_idx * before.global_batch;
        let position = if is_complete { now.batches } else { now.position_after(seen, window) };
        tracing::info!(
            "{} was written after {seen} samples of the epoch: batch {} of {}; this run continues at batch {position} of {}, \
             after {} samples",
            self.path.display(),
            progress.batch_idx,
            text(self.shape, self.ranks, ranks),
            text(own, ranks, self.ranks),
            position * now.global_batch
        );
        run.at.progress.batch_idx = position;
        if let Some(restored) = &mut run.engine.of_call.restored {
            restored.has_other_batches = true; // callbacks may still set another window
        }
        Ok(())
    }
}

const SAME_DATA: &str = "use the same data, or resume from a checkpoint at the end of an epoch";

/// How an epoch is cut; with the ranks, if the other run has another number.
fn text((batches, size): (usize, Option<usize>), ranks: usize, other: usize) -> String {
    let size = size.map(|size| format!(" of {size}")).unwrap_or_default();
    let ranks = if ranks == other { String::new() } else { format!(" on {ranks} rank(s)") };
    format!("{batches} batches{size}{ranks}")
}

/// The batches of all ranks together.
#[derive(Debug, Clone, Copy)]
struct Epoch {
    batches: u64,
    /// Samples of a batch of all ranks.
    global_batch: u64,
}

impl Epoch {
    fn of((batches, size): (usize, Option<usize>), ranks: usize) -> Option<Self> {
        let global_batch = size?.checked_mul(ranks).filter(|&size| size > 0)? as u64;
        Some(Self { batches: batches as u64, global_batch })
    }

    fn samples(self) -> u64 {
        self.batches.saturating_mul(self.global_batch)
    }

    /// Whether some number of samples is cut into these batches and into those, with the last one whole or not.
    fn may_be_of_same_data(self, other: Self) -> bool {
        self.samples().abs_diff(other.samples()) < self.global_batch.max(other.global_batch)
    }

    /// The first batch that begins an accumulation window and has no sample among the first so many. At the end of the epoch the last
    /// window, which ends the epoch: its schedules are stepped with it.
    fn position_after(self, samples: u64, window: u64) -> u64 {
        window_from(samples.div_ceil(self.global_batch), self.batches, window)
    }
}

/// The batch of an epoch of so many that begins the first accumulation window from `batch` on, or the last one.
fn window_from(batch: u64, batches: u64, window: u64) -> u64 {
    let (window, last) = (window.max(1), batches.saturating_sub(1));
    batch.next_multiple_of(window).min(last - last % window)
}

/// Before the first batch of a resumed run, when callbacks have set the accumulation window of the epoch: a position among other batches
/// begins a window. Where windows are counted over epochs, any position does that has no gradients.
///
/// # Errors
/// If the checkpoint has gradients of an open window, and this run has another window there, or none.
pub(crate) fn begin_window<M: LightningModule>(session: &mut Session<M>) -> Result<()> {
    let Some(restored) = session.run.engine.of_call.restored.take() else { return Ok(()) };
    if !session.module.automatic_optimization() {
        return Ok(());
    }
    let (batches, window) = (session.run.facts.num_training_batches, session.windows_of_epoch());
    if restored.has_other_batches && session.run.at.progress.has_batches_left(batches) {
        let batch_idx = &mut session.run.at.progress.batch_idx;
        *batch_idx = window_from(*batch_idx, batches as u64, window);
    }
    if restored.has_grads {
        return check_window(session, restored.window);
    }
    if session.windows_cross_epochs() {
        // no batch of a window is done: the first begins one, as in DeepSpeed, which counts from there
        let (size, total) = (session.accumulate_grad_batches, &mut session.run.at.progress.total_batches);
        *total = total.next_multiple_of(size);
    }
    Ok(())
}

/// An error if the gradients of an open window, which the checkpoint may tell, are not those of this run's window.
fn check_window<M: LightningModule>(session: &Session<M>, saved: Option<OpenWindow>) -> Result<()> {
    let (own, size) = (session.open_window(), session.accumulate_grad_batches);
    let path = session.run.resumed_from.as_deref().unwrap_or(Path::new("the checkpoint")).display();
    if let Some(saved) = saved.filter(|saved| saved.size != size) {
        let what = format!(
            "{size}, but {path} has gradients of an open accumulation window of {} batches, whose losses were divided by that",
            saved.size
        );
        let remedy = format!(
            "set {} for this epoch (or by the callback that sets it, such as GradientAccumulationScheduler), or resume from a \
             checkpoint between windows",
            saved.size
        );
        return Err(ConfigError::new("trainer.accumulate_grad_batches", what, remedy).into());
    }
    if own.is_some() && (saved.is_none() || saved == own) {
        return Ok(());
    }
    let done = saved.map(|saved| format!(" ({} of {size} batches)", saved.done)).unwrap_or_default();
    let has = match own {
        Some(own) => format!("the window of this run has {} batches", own.done),
        None => "no window of this run is open".to_owned(),
    };
    let (batch, strategy) = (session.run.at.progress.batch_idx, session.run.engine.strategy.name());
    let what = format!(
        "{path} has gradients of an open accumulation window{done}, and at its batch {batch} {has} \
         (accumulate_grad_batches={size}, {strategy})"
    );
    let remedy = "keep accumulate_grad_batches and the kind of strategy (windows of DeepSpeed's go on over epochs), or resume from \
                  a checkpoint between windows";
    Err(ConfigError::new("ckpt_path", what, remedy).into())
}

fn restore_grads<M: LightningModule>(
    session: &mut Session<M>,
    grads: &[(String, tch::Tensor)],
    path: &Path,
) -> Result<()> {
    session.run.engine.of_call.gradients.has_scaled |= !grads.is_empty();
    let parameters = session.module.named_parameters();
    let parameters: HashMap<_, _> = parameters.iter().map(|(name, parameter)| (name, parameter)).collect();
    for (fqn, grad) in grads {
        let Some(parameter) = parameters.get(fqn) else { continue };
        if grad.size() != parameter.size() {
            let (found, expected) = (grad.size(), parameter.size());
            let what = format!("its gradient of {fqn} has shape {found:?}, the parameter has {expected:?}");
            return Err(unusable(path, what, "use another checkpoint"));
        }
    }
    session.run.engine.strategy.set_grads(session.module.as_dyn(), grads)
}

fn restore_callbacks(
    profiling: &Profiling,
    callbacks: &mut [Box<dyn Callback>],
    state: &LoopState,
) -> Result<()> {
    for (key, saved) in &state.callbacks {
        let Some(callback) = callbacks.iter_mut().find(|callback| callback.state_key() == *key) else {
            tracing::warn!("the checkpoint has state of {key}, which this run does not have");
            continue;
        };
        of_callback(profiling, callback.as_mut(), "load_state_dict", |callback| {
            callback.load_state_dict(saved)
        })
        .map_err(|source| hook_error("load_state_dict", &state.progress, source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_after_the_samples_that_were_seen() {
        let epoch = |batches, size, ranks| Epoch::of((batches, Some(size)), ranks).unwrap();
        let two_ranks = epoch(3375, 4, 2);
        let position = |now: Epoch, batch, window| {
            assert!(two_ranks.may_be_of_same_data(now));
            now.position_after(batch * two_ranks.global_batch, window)
        };
        assert_eq!(position(epoch(6750, 4, 1), 4, 1), 8);
        assert_eq!(position(epoch(3375, 8, 1), 4, 1), 4, "the same batches of all ranks");
        assert_eq!(position(epoch(2250, 4, 3), 4, 1), 3, "from the next whole batch");
        assert_eq!(position(epoch(2250, 4, 3), 4, 4), 4, "from the next window");
        assert_eq!(position(epoch(2250, 4, 3), 3375, 1), 2249, "the last batch ends the epoch");
        assert_eq!(position(epoch(2250, 4, 3), 3374, 4), 2248);
        assert!(!two_ranks.may_be_of_same_data(epoch(3375, 4, 1)), "half the data");
        assert!(epoch(7, 4, 1).may_be_of_same_data(epoch(4, 4, 2)), "the last batch may not be whole");
        assert!(Epoch::of((3, None), 2).is_none() && Epoch::of((3, Some(usize::MAX)), 2).is_none());
    }
}
