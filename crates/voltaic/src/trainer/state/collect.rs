//! Collects the state of a run into a checkpoint, and puts it back.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::accelerator::rng;
use crate::callback::Callback;
use crate::checkpoint::{
    Checkpoint, CheckpointMeta, RankState, TrainingState, rank_from_bytes, rank_to_bytes,
};
use crate::data::Stage;
use crate::distributed::{ProcessGroup, World};
use crate::error::{CheckpointError, ConfigError, Error, Result};
use crate::module::{CheckpointRequest, LightningModule, MetricsState, ModuleTensors, Profiling, Progress};
use crate::nn::{Module, ModuleExt};
use crate::optim::OptimizerState;
use crate::precision::GradScaler;
use crate::trainer::session::guard::guarded;
use crate::trainer::session::hooks::{BatchFacts, hook_error, of_callback};
use crate::trainer::session::session::{Run, Session};

/// The part of the training state that is not tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) progress: Progress,
    pub(crate) metrics: MetricsState,
    pub(crate) seed: u64,
    /// Training batches of an epoch and their size: what the position within an epoch means.
    pub(crate) num_training_batches: usize,
    pub(crate) batch_size: Option<usize>,
    /// Name and groups of each optimizer.
    pub(crate) optimizers: Vec<(String, Value)>,
    pub(crate) schedulers: Vec<Value>,
    /// Name and state of each callback that has some.
    pub(crate) callbacks: Vec<(String, Value)>,
    /// There with `16-mixed`.
    #[serde(default)]
    pub(crate) grad_scaler: Option<GradScaler>,
    /// State of the data module, if it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) data: Option<Value>,
    /// What the module gave in `on_save_checkpoint`.
    pub(crate) module: Value,
    /// Of its tensors those that were on the run's device; the others were on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) module_on_device: Vec<String>,
}

/// A run as it was when training was cut short. Checkpoints that are written later hold this, so that a resumed run does
/// the rest of the epoch as if it had not been stopped.
pub(crate) enum Frozen {
    /// Of rank 0: all that a checkpoint holds, on the host.
    Whole(Box<Checkpoint>),
    /// Of another rank: what it has to itself, as it is sent to rank 0.
    Own(Vec<u8>),
}

/// What `Trainer::save_checkpoint` writes of a fit that is over.
pub(crate) enum AfterFit {
    /// Training was cut short.
    Frozen(Frozen),
    /// Of rank 0: all but what callbacks, data and module add, on the host.
    Whole(Box<(State, TrainingState)>),
    /// Of another rank.
    Own(Vec<u8>),
}

/// Keeps the run as it is.
///
/// # Sync
/// Copies weights and optimizer state.
pub(crate) fn freeze<M: LightningModule>(session: &mut Session<M>) -> Result<Frozen> {
    Ok(match session.run.world().is_global_zero() {
        true => Frozen::Whole(Box::new(collect(session, false)?.snapshot()?)),
        false => Frozen::Own(rank_to_bytes(&own_state(session)?)?),
    })
}

/// Keeps what a checkpoint of a fit that ends now goes on from. Optimizer state leaves the device.
pub(crate) fn keep<M: LightningModule>(session: &mut Session<M>) -> Result<AfterFit> {
    if let Some(frozen) = session.frozen.take() {
        return Ok(AfterFit::Frozen(frozen));
    }
    Ok(match session.run.world().is_global_zero() {
        true => {
            let (state, training) = training_state(session)?;
            AfterFit::Whole(Box::new((state, training.of_finished_fit()?)))
        }
        false => AfterFit::Own(rank_to_bytes(&own_state(session)?)?),
    })
}

/// Gives rank 0 what the other ranks have to themselves, for the checkpoints that all of them are about to ask for.
///
/// # Collective
/// All ranks must call it after the same batch.
pub(crate) fn gather_ranks<M: LightningModule>(session: &Session<M>) -> Result<Vec<RankState>> {
    let Some(group) = session.run.world().group().filter(|group| group.world_size() > 1) else {
        return Ok(Vec::new());
    };
    match &session.frozen {
        Some(Frozen::Own(own)) => gather(group, own),
        _ if group.rank() == 0 => gather(group, &[]),
        _ => gather(group, &rank_to_bytes(&own_state(session)?)?),
    }
}

fn gather(group: &ProcessGroup, own: &[u8]) -> Result<Vec<RankState>> {
    let all = group.gather_bytes(own, 0)?;
    all.iter().skip(1).map(|bytes| rank_from_bytes(bytes)).collect()
}

/// What this rank has to itself.
fn own_state<M: LightningModule>(session: &Session<M>) -> Result<RankState> {
    let logged = serde_json::to_value(session.run.metrics.state());
    Ok(RankState {
        grads: pending_grads(session),
        metrics: session.run.metrics.metric_states()?,
        rng: rng::states(session.plan.device)?,
        logged: logged.map_err(|e| Error::io("serialize", "logged values", e.into()))?,
    })
}

/// Writes the checkpoint that a callback asked for, then removes those it replaces. `ranks` is what the other ranks
/// have to themselves; it may be taken out.
pub(crate) fn write<M: LightningModule>(
    session: &mut Session<M>,
    request: &CheckpointRequest,
    ranks: &mut Vec<RankState>,
) -> Result<()> {
    match &request.link_to {
        Some(target) => session.run.checkpoint_io.link_checkpoint(target, &request.path)?,
        None => {
            let _action = session.profile("save_checkpoint")?;
            let mut checkpoint = match &session.frozen {
                Some(Frozen::Whole(frozen)) if !request.weights_only => {
                    with_savers(frozen, &session.run.callbacks)?
                }
                _ => collect(session, request.weights_only)?,
            };
            if let Some(training) = &mut checkpoint.training {
                training.ranks = std::mem::take(ranks);
            }
            session.run.checkpoint_io.save_checkpoint(&checkpoint, &request.path, None)?;
            if let Some(training) = checkpoint.training {
                *ranks = training.ranks; // for the next file of the same moment
            }
            if !request.weights_only {
                session.run.note_checkpoint(&request.path)?;
            }
        }
    }
    let Run { checkpoint_io, resumed_from, .. } = &mut *session.run;
    let is_kept = |old: &&PathBuf| !resumed_from.as_ref().is_some_and(|resumed| is_same_file(resumed, old));
    request.then_remove.iter().filter(is_kept).try_for_each(|old| checkpoint_io.remove_checkpoint(old))
}

/// Whether two paths lead to one file, links included.
fn is_same_file(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// A frozen checkpoint with the state that callbacks which save checkpoints have now: they know the files.
fn with_savers(frozen: &Checkpoint, callbacks: &[Box<dyn Callback>]) -> Result<Checkpoint> {
    let mut checkpoint = frozen.to_host()?;
    let states = checkpoint.training.as_mut().and_then(|training| training.json["callbacks"].as_array_mut());
    let Some(states) = states else { return Ok(checkpoint) };
    for callback in callbacks.iter().filter(|callback| callback.saves_checkpoints()) {
        let (key, own) = (callback.state_key(), callback.state_dict());
        if let (Some(saved), Some(own)) = (states.iter_mut().find(|saved| saved[0] == key.as_str()), own) {
            saved[1] = own;
        }
    }
    Ok(checkpoint)
}

/// Writes a checkpoint of a fit that is over.
///
/// # Collective
/// All ranks must call it.
pub(crate) fn write_after_fit<M: LightningModule>(
    session: &mut Session<M>,
    after: &AfterFit,
    path: &Path,
    storage_options: Option<&Value>,
) -> Result<()> {
    let ranks = match session.run.world().group().filter(|group| group.world_size() > 1) {
        Some(group) => {
            let own = match after {
                AfterFit::Own(own) | AfterFit::Frozen(Frozen::Own(own)) => own.as_slice(),
                _ => &[],
            };
            gather(group, own)?
        }
        None => Vec::new(),
    };
    let mut checkpoint = match after {
        AfterFit::Frozen(Frozen::Whole(frozen)) => with_savers(frozen, &session.run.callbacks)?,
        AfterFit::Whole(kept) => {
            let (state, training) = kept.as_ref();
            complete(session, Some((state.clone(), training.to_host()?)))?
        }
        AfterFit::Own(_) | AfterFit::Frozen(Frozen::Own(_)) => return Ok(()), // rank 0 writes
    };
    if let Some(training) = &mut checkpoint.training {
        training.ranks = ranks;
    }
    session.run.checkpoint_io.save_checkpoint(&checkpoint, path, storage_options)?;
    session.run.checkpoint_io.teardown()
}

/// # Sync
/// Reads weights, optimizer state and metrics back.
fn collect<M: LightningModule>(session: &mut Session<M>, weights_only: bool) -> Result<Checkpoint> {
    let parts = if weights_only { None } else { Some(training_state(session)?) };
    complete(session, parts)
}

/// The training state without what callbacks, data and module add.
fn training_state<M: LightningModule>(session: &Session<M>) -> Result<(State, TrainingState)> {
    let run = &*session.run;
    let optimizers: Vec<OptimizerState> =
        session.optimizers.iter().map(|optimizer| optimizer.state_dict()).collect();
    let names = session.optimizers.iter().map(|optimizer| optimizer.name().to_owned());
    let schedulers = session.schedulers.iter().map(|active| active.configured.scheduler.state_dict());
    let state = State {
        progress: run.progress.clone(),
        metrics: run.metrics.state(),
        seed: run.seed,
        num_training_batches: run.facts.num_training_batches,
        batch_size: run.facts.train_batch_size,
        optimizers: names.zip(optimizers.iter().map(|state| state.groups.clone())).collect(),
        schedulers: schedulers.collect(),
        callbacks: Vec::new(),
        grad_scaler: run.grad_scaler.clone(),
        data: None,
        module: Value::Null,
        module_on_device: Vec::new(),
    };
    let training = TrainingState {
        optimizers: optimizers.into_iter().map(|state| state.tensors).collect(),
        grads: pending_grads(session),
        metrics: run.metrics.metric_states()?,
        rng: rng::states(session.plan.device)?,
        ..TrainingState::default()
    };
    Ok((state, training))
}

/// A checkpoint of the module's weights and these parts, with what callbacks, data and module add.
fn complete<M: LightningModule>(
    session: &mut Session<M>,
    parts: Option<(State, TrainingState)>,
) -> Result<Checkpoint> {
    let progress = parts.as_ref().map_or(&session.run.progress, |(state, _)| &state.progress);
    let mut checkpoint = weights(session.module, progress);
    let state = match parts {
        Some((state, training)) => {
            checkpoint.training = Some(training);
            let callbacks = callback_states(&session.run.callbacks);
            let data = session.profile_data("state_dict")?.around(|| session.data.state_dict());
            Some(State { callbacks, data, ..state })
        }
        None => None,
    };
    on_save_checkpoint(session, &mut checkpoint)?;
    let _action = session.profile_hook("on_save_checkpoint")?;
    let mut tensors = ModuleTensors::default();
    let module = guarded(|| session.module.on_save_checkpoint(&mut tensors))
        .map_err(|source| session.hook_error("on_save_checkpoint", source))?;
    if let (Some(training), Some(state)) = (&mut checkpoint.training, state) {
        let (tensors, module_on_device) = tensors.into_parts();
        training.module = tensors;
        training.json = serde_json::to_value(State { module, module_on_device, ..state })
            .map_err(|e| Error::io("serialize", "the training state", e.into()))?;
    }
    Ok(checkpoint)
}

/// A checkpoint of weights only; its tensors are the module's.
pub(crate) fn weights<M: LightningModule>(module: &M, progress: &Progress) -> Checkpoint {
    let meta = CheckpointMeta {
        epoch: progress.current_epoch,
        global_step: progress.global_step,
        module: Module::type_name(module).to_owned(),
        hyper_parameters: module.hyper_parameters(),
        ..CheckpointMeta::default()
    };
    Checkpoint { weights: module.state_dict(), training: None, meta }
}

/// The callbacks' hook.
fn on_save_checkpoint<M: LightningModule>(
    session: &mut Session<M>,
    checkpoint: &mut Checkpoint,
) -> Result<()> {
    let (mut parts, state, _) = session.parts();
    let profiling = parts.profiling;
    let (mut ctx, callbacks) = parts.context(state, &BatchFacts::default());
    callbacks.iter_mut().try_for_each(|callback| {
        of_callback(profiling, callback.as_mut(), "on_save_checkpoint", |callback| {
            callback.on_save_checkpoint(&mut ctx, checkpoint)
        })
        .map_err(|source| hook_error("on_save_checkpoint", ctx.progress, source))
    })
}

fn callback_states(callbacks: &[Box<dyn Callback>]) -> Vec<(String, Value)> {
    callbacks.iter().filter_map(|callback| Some((callback.state_key(), callback.state_dict()?))).collect()
}

/// Gradients of an accumulation window that has begun and is not complete. With manual optimization all there are: only
/// the module knows which it goes on with.
fn pending_grads<M: LightningModule>(session: &Session<M>) -> Vec<(String, tch::Tensor)> {
    let progress = &session.run.progress;
    let is_open = !progress.batch_idx.is_multiple_of(session.accumulate_grad_batches)
        && progress.has_batches_left(session.run.facts.num_training_batches);
    if !is_open && session.module.automatic_optimization() {
        return Vec::new();
    }
    let parameters = session.module.named_parameters().into_iter();
    parameters.map(|(fqn, parameter)| (fqn, parameter.grad())).filter(|(_, grad)| grad.defined()).collect()
}

/// What is left to do with a checkpoint once the loaders are there.
pub(crate) struct Resumed {
    pub path: PathBuf,
    /// Random states, which are to be set when everything else is ready.
    pub rng: Vec<(String, tch::Tensor)>,
    /// Training batches of an epoch, and their size.
    shape: (usize, Option<usize>),
}

/// Takes the weights, and what modules, data and callbacks have saved.
pub(crate) fn restore_module<M: LightningModule>(
    session: &mut Session<M>,
    checkpoint: &Checkpoint,
    path: &Path,
) -> Result<()> {
    session.module.load_state_dict(&checkpoint.weights, true)?;
    let Some(training) = &checkpoint.training else { return Ok(()) };
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
    let Run { callbacks, profiling, .. } = &mut *session.run;
    for callback in &mut *callbacks {
        of_callback(profiling, callback.as_mut(), "on_load_checkpoint", |callback| {
            callback.on_load_checkpoint(checkpoint)
        })
        .map_err(|source| hook_error("on_load_checkpoint", &state.progress, source))?;
    }
    restore_callbacks(profiling, callbacks, &state)?;
    if session.stage == Stage::Fit {
        session.run.progress = state.progress;
    }
    Ok(())
}

fn read_state(json: &Value, path: &Path) -> Result<State> {
    State::deserialize(json).map_err(|e| {
        let what = format!("its training state is not understood: {e}");
        unusable(path, what, "use another checkpoint")
    })
}

fn unusable(path: &Path, what: String, remedy: &str) -> Error {
    CheckpointError::Unreadable { path: path.to_path_buf(), what, remedy: remedy.to_owned() }.into()
}

/// Puts the rest of a training state back: optimizers, schedules, metrics, position.
pub(crate) fn restore_training<M: LightningModule>(
    session: &mut Session<M>,
    checkpoint: Checkpoint,
    path: PathBuf,
) -> Result<Resumed> {
    let Some(training) = checkpoint.training else {
        let remedy = "resume from a full checkpoint, or load the weights alone and start from the beginning";
        return Err(unusable(&path, "it holds weights only, no training state".to_owned(), remedy));
    };
    let state = read_state(&training.json, &path)?;
    let first = RankState {
        grads: training.grads,
        metrics: training.metrics,
        rng: training.rng,
        logged: Value::Null,
    };
    let OwnPart { logged, metrics, grads, rng } =
        own_part(session.run.world(), first, training.ranks, state.metrics, &path)?;
    let names: Vec<&str> = state.optimizers.iter().map(|(name, _)| name.as_str()).collect();
    let own: Vec<&str> = session.optimizers.iter().map(|optimizer| optimizer.name()).collect();
    if names != own || state.schedulers.len() != session.schedulers.len() {
        let what = format!(
            "it was written with optimizers {names:?} and {} schedules, this run has {own:?} and {}",
            state.schedulers.len(),
            session.schedulers.len()
        );
        return Err(unusable(&path, what, "use the same configure_optimizers, or load the weights alone"));
    }
    let tensors = training.optimizers.into_iter();
    for ((optimizer, tensors), (_, groups)) in
        session.optimizers.iter_mut().zip(tensors).zip(state.optimizers)
    {
        optimizer.load_state_dict(OptimizerState { tensors, groups })?;
    }
    for (active, saved) in session.schedulers.iter_mut().zip(&state.schedulers) {
        active.configured.scheduler.load_state_dict(saved)?;
    }
    restore_grads(session, &grads)?;
    if let (Some(own), Some(saved)) = (&mut session.run.grad_scaler, state.grad_scaler) {
        *own = saved;
    }
    if session.run.seed != state.seed {
        let (saved, own) = (state.seed, session.run.seed);
        tracing::info!("shuffling with seed {saved} of the checkpoint instead of {own}");
        session.run.seed = saved;
    }
    session.run.metrics.restore(logged);
    session.run.metrics.restore_metrics(&metrics, session.plan.device)?;
    session.run.progress = state.progress;
    Ok(Resumed { path, rng, shape: (state.num_training_batches, state.batch_size) })
}

/// What this rank takes of the parts that each rank has for itself.
struct OwnPart {
    logged: MetricsState,
    metrics: Vec<(String, tch::Tensor)>,
    grads: Vec<(String, tch::Tensor)>,
    rng: Vec<(String, tch::Tensor)>,
}

/// `first` and `logged` are rank 0's, `ranks` the others'. A rank that the saved run did not have goes on from rank 0's
/// random state, and has counted nothing: each batch counts at most once.
fn own_part(
    world: &World,
    first: RankState,
    ranks: Vec<RankState>,
    logged: MetricsState,
    path: &Path,
) -> Result<OwnPart> {
    let saved = ranks.len() + 1;
    if saved != world.world_size && world.is_global_zero() {
        tracing::info!("{} is of {saved} rank(s), this run has {}", path.display(), world.world_size);
    }
    let own = world.rank.checked_sub(1).map(|index| ranks.into_iter().nth(index));
    let RankState { grads, metrics, rng, logged } = match own {
        None => return Ok(OwnPart { logged, metrics: first.metrics, grads: first.grads, rng: first.rng }),
        Some(None) => {
            let (metrics, grads) = (Vec::new(), Vec::new());
            return Ok(OwnPart { logged: logged.without_open_epoch(), metrics, grads, rng: first.rng });
        }
        Some(Some(own)) => own,
    };
    let logged = MetricsState::deserialize(logged).map_err(|e| {
        let what = format!("the logged values of rank {} are not understood: {e}", world.rank);
        unusable(path, what, "use another checkpoint")
    })?;
    Ok(OwnPart { logged, metrics, grads, rng })
}

impl Resumed {
    /// A position within an epoch means nothing if the epoch is cut into other batches.
    pub(crate) fn check_position(&self, run: &Run) -> Result<()> {
        let epoch = run.progress.current_epoch;
        if let Some(max_epochs) = run.facts.max_epochs.filter(|max_epochs| epoch > *max_epochs) {
            let what =
                format!("{max_epochs}, but {} is of epoch {epoch}, counted from 0", self.path.display());
            let remedy = "train for more epochs, or from another checkpoint";
            return Err(ConfigError::new("trainer.max_epochs", what, remedy).into());
        }
        let is_mid_epoch = run.progress.batch_idx > 0 && !run.progress.epoch_ended;
        let own = (run.facts.num_training_batches, run.facts.train_batch_size);
        let is_known = self.shape.0 > 0; // a converted checkpoint does not tell
        if !is_mid_epoch || !is_known || own == self.shape {
            return Ok(());
        }
        let text = |(batches, size): (usize, Option<usize>)| match size {
            Some(size) => format!("{batches} batches of {size}"),
            None => format!("{batches} batches"),
        };
        let what = format!(
            "{} was written at batch {} of an epoch of {}, this run has {}",
            self.path.display(),
            run.progress.batch_idx,
            text(self.shape),
            text(own)
        );
        let remedy = "use the same data and batch size, or resume from a checkpoint at the end of an epoch";
        Err(ConfigError::new("ckpt_path", what, remedy).into())
    }
}

fn restore_grads<M: LightningModule>(
    session: &mut Session<M>,
    grads: &[(String, tch::Tensor)],
) -> Result<()> {
    session.has_scaled |= !grads.is_empty();
    let parameters = session.module.named_parameters();
    for (fqn, grad) in grads {
        if let Some((_, parameter)) = parameters.iter().find(|(name, _)| name == fqn) {
            crate::ffi::set_grad(parameter, &grad.f_to_device(session.plan.device.tch())?)?;
        }
    }
    Ok(())
}

fn restore_callbacks(
    profiling: &Profiling,
    callbacks: &mut [Box<dyn Callback>],
    state: &State,
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
