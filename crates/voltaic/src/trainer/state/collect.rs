//! Collects the state of a run into a checkpoint.

use serde_json::Value;

use crate::accelerator::rng;
use crate::callback::Callback;
use crate::checkpoint::{
    Checkpoint, CheckpointMeta, LoopState, RankState, Shard, TrainingState, grad_name, optimizer_name,
    rank_to_bytes, shards_to_host,
};
use crate::distributed::SlurmJob;
use crate::error::{ConfigError, Error, Result};
use crate::module::{BatchFacts, LightningModule, ModuleTensors, Progress};
use crate::nn::te::fp8_state_dict;
use crate::nn::{Module, ModuleExt, frozen_parameters, quant, state_dict_of, tied_names};
use crate::optim::OptimizerState;
use crate::strategy::{ShardedGrads, Strategy};
use crate::trainer::session::hooks::{guarded, hook_error, of_callback};
use crate::trainer::session::session::{FitState, Run, RunSnapshot, Session};

/// Whether each of several ranks saves its own shards of checkpoints.
pub(crate) fn saves_shards(run: &Run) -> bool {
    run.engine.strategy.sharded_state().is_some() && run.world().world_size > 1
}

/// Refuses what a run does with all weights or gradients, where the strategy does not know how the mesh slices them.
///
/// # Errors
/// [`ConfigError`] with the key and the mesh.
pub(crate) fn check_mesh(run: &Run, key: &'static str, does: &str) -> Result<()> {
    let strategy = &run.engine.strategy;
    if strategy.knows_mesh() {
        return Ok(());
    }
    let what = format!(
        "it {does}, and {} does not know how the mesh {} slices the weights: each rank would see its own slices",
        strategy.name(),
        run.world().mesh().dims
    );
    let remedy = "use tensor_parallel of the strategy, or a strategy of yours with knows_mesh, or do without";
    Err(ConfigError::new(key, what, remedy).into())
}

/// Keeps the run as it is. If it `is_cut_short` within an epoch, all that a checkpoint holds is copied; else the optimizers have ended,
/// and what they leave behind is shared, on the host.
///
/// # Sync
/// Copies the state to the host.
pub(crate) fn snapshot<M: LightningModule>(
    session: &mut Session<M>,
    is_cut_short: bool,
) -> Result<RunSnapshot> {
    if !saves_shards(session.run) && !session.run.world().is_global_zero() {
        return Ok(RunSnapshot::OwnState(rank_to_bytes(&own_state(session)?)?));
    }
    if is_cut_short {
        return Ok(RunSnapshot::CutShort(Box::new(collect(session, false)?.snapshot()?)));
    }
    let FitState { state, training, shards } = training_state(session)?;
    let (training, shards) = (training.of_finished_fit()?, shards_to_host(&shards)?);
    Ok(RunSnapshot::Finished(Box::new(FitState { state, training, shards })))
}

/// The own state of this rank.
pub(crate) fn own_state<M: LightningModule>(session: &Session<M>) -> Result<RankState> {
    Ok(RankState {
        grads: pending_grads(session)?,
        metrics: session.run.log.metrics.metric_states()?,
        rng: rng::states(session.plan.device)?,
        fp8: fp8_state_dict(session.module.as_dyn())?,
        logged: logged_values(session)?,
    })
}

/// Values logged in the epoch that is not over.
fn logged_values<M: LightningModule>(session: &Session<M>) -> Result<Value> {
    serde_json::to_value(session.run.log.metrics.state())
        .map_err(|e| Error::io("serialize", "logged values", e.into()))
}

/// What a checkpoint that is written now holds: the snapshot of the run if there is one, else the run as it is.
///
/// # Sync
/// Reads weights, optimizer state and metrics back.
pub(crate) fn collect<M: LightningModule>(
    session: &mut Session<M>,
    weights_only: bool,
) -> Result<Checkpoint> {
    let training = match &session.snapshot {
        _ if weights_only => None,
        Some(RunSnapshot::CutShort(checkpoint)) => return with_savers(checkpoint, &session.run.callbacks),
        Some(RunSnapshot::Finished(fit)) => Some(fit.to_host()?),
        _ => Some(training_state(session)?),
    };
    complete(session, training)
}

/// A checkpoint of a run that was cut short, with the state that callbacks which save checkpoints have now: they know the files.
fn with_savers(checkpoint: &Checkpoint, callbacks: &[Box<dyn Callback>]) -> Result<Checkpoint> {
    let mut checkpoint = checkpoint.to_host()?;
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

/// The training state without what callbacks, data and module add.
fn training_state<M: LightningModule>(session: &Session<M>) -> Result<FitState> {
    let run = &*session.run;
    let is_manual = !session.module.automatic_optimization();
    let States { optimizers, grads, had_grad, shards } = states(session)?;
    let names = session.training.optimizers.iter().map(|optimizer| optimizer.name().to_owned());
    let schedulers =
        session.training.schedulers.iter().map(|active| active.configured.scheduler.state_dict());
    let state = LoopState {
        progress: run.at.progress.clone(),
        metrics: logged_values(session)?,
        seed: run.seed,
        num_training_batches: run.facts.num_training_batches,
        batch_size: run.facts.train_batch_size,
        world_size: Some(run.world().mesh().dp.size),
        optimizers: names.zip(optimizers.iter().map(|state| state.groups.clone())).collect(),
        schedulers: schedulers.collect(),
        callbacks: Vec::new(),
        grad_scaler: run.engine.loss_scale.as_ref().and_then(|scale| scale.grad_scaler().cloned()),
        loss_scaler: run.engine.loss_scale.as_ref().and_then(|scale| scale.loss_scaler().cloned()),
        gradients: is_manual.then(|| session.run.engine.of_call.gradients.saved()),
        window: session.open_window().filter(|_| !is_manual),
        rows: run.rows.clone(),
        data: None,
        module: Value::Null,
        module_on_device: Vec::new(),
        pending_stop: session.pending_stop(),
        slurm_job: SlurmJob::of_process().map(|job| job.id),
    };
    let training = TrainingState {
        optimizers: optimizers.into_iter().map(|state| state.tensors).collect(),
        grads,
        had_grad,
        metrics: run.log.metrics.metric_states()?,
        fp8: fp8_state_dict(session.module.as_dyn())?,
        rng: rng::states(session.plan.device)?,
        ..TrainingState::default()
    };
    Ok(FitState { state, training, shards })
}

/// States of optimizers, and gradients of an open window.
struct States {
    optimizers: Vec<OptimizerState>,
    grads: Vec<(String, tch::Tensor)>,
    had_grad: Vec<String>,
    shards: Vec<Shard>,
}

fn states<M: LightningModule>(session: &Session<M>) -> Result<States> {
    let strategy = &session.run.engine.strategy;
    let optimizers = session.training.optimizers.iter();
    let Some(sharded) = strategy.sharded_state() else {
        let optimizers = optimizers.map(|optimizer| optimizer.state_dict()).collect();
        let grads = pending_grads(session)?;
        return Ok(States { optimizers, grads, had_grad: Vec::new(), shards: Vec::new() });
    };
    let named = |shard: Shard, name| Shard { name, ..shard };
    let (mut states, mut shards) = (Vec::new(), Vec::new());
    for (index, optimizer) in optimizers.enumerate() {
        let (state, own) = sharded.save_optimizer(index, optimizer.as_ref())?;
        states.push(state);
        shards.extend(own.into_iter().map(|shard| {
            let name = optimizer_name(index, &shard.name);
            named(shard, name)
        }));
    }
    let pending = match keeps_grads(session) {
        true => sharded.save_grads(session.module.as_dyn())?,
        false => ShardedGrads::default(),
    };
    shards.extend(pending.shards.into_iter().map(|shard| {
        let name = grad_name(&shard.name);
        named(shard, name)
    }));
    Ok(States { optimizers: states, grads: pending.own, had_grad: pending.had_grad, shards })
}

/// A checkpoint of the module's weights and this training state, with what callbacks, data and module add.
fn complete<M: LightningModule>(session: &mut Session<M>, fit: Option<FitState>) -> Result<Checkpoint> {
    let progress = fit.as_ref().map_or(&session.run.at.progress, |fit| &fit.state.progress);
    let strategy = session.run.engine.strategy.as_ref();
    let mut checkpoint = sharded_weights(strategy, session.module, progress, fit.is_none())?;
    if strategy.excludes_frozen_parameters() {
        let frozen = frozen_parameters(session.module.as_dyn()).into_iter();
        checkpoint.leave_out(frozen.map(|(name, _)| name).collect());
    }
    let state = match fit {
        Some(FitState { state, training, shards }) => {
            checkpoint.training = Some(training);
            checkpoint.shards.extend(shards);
            let callbacks = callback_states(&session.run.callbacks);
            let data = session.profile_data("state_dict")?.around(|| session.data.state_dict());
            Some(LoopState { callbacks, data, ..state })
        }
        None => None,
    };
    if !saves_shards(session.run) {
        checkpoint.merge_shards()?;
    }
    on_save_checkpoint(session, &mut checkpoint)?;
    let _action = session.profile_hook("on_save_checkpoint")?;
    let mut tensors = ModuleTensors::default();
    let module = guarded(|| session.module.on_save_checkpoint(&mut tensors))
        .map_err(|source| session.hook_error("on_save_checkpoint", source))?;
    if let (Some(training), Some(state)) = (&mut checkpoint.training, state) {
        let (tensors, module_on_device) = tensors.into_parts();
        training.module = tensors;
        training.json = serde_json::to_value(LoopState { module, module_on_device, ..state })
            .map_err(|e| Error::io("serialize", "the training state", e.into()))?;
    }
    Ok(checkpoint)
}

fn meta<M: LightningModule>(module: &M, progress: &Progress) -> CheckpointMeta {
    CheckpointMeta {
        epoch: progress.current_epoch,
        global_step: progress.global_step,
        module: Module::type_name(module).to_owned(),
        hyper_parameters: module.hyper_parameters(),
        ..CheckpointMeta::default()
    }
}

/// A checkpoint of weights only: this rank's shards of what is sharded, and whole tensors beside them, which are the module's. Nothing is
/// gathered. With `only_sharded` weights that each rank has whole are whole in it, too.
pub(crate) fn sharded_weights<M: LightningModule>(
    strategy: &dyn Strategy,
    module: &M,
    progress: &Progress,
    only_sharded: bool,
) -> Result<Checkpoint> {
    let meta = meta(module, progress);
    let Some(sharded) = strategy.sharded_state().filter(|_| strategy.keeps(module.as_dyn())) else {
        let mut weights = module.try_state_dict()?;
        weights.extend(quant::scales(module.as_dyn())?);
        return Ok(Checkpoint { weights, meta, ..Checkpoint::default() });
    };
    let mut shards = sharded.save_weights()?;
    if only_sharded {
        shards.retain(|shard| sharded.weight_shard(&shard.name).is_some());
    }
    let is_sharded = |name: &str| shards.iter().any(|shard| shard.name == name);
    let tied: Vec<_> =
        tied_names(module.as_dyn()).into_iter().filter(|(_, first)| is_sharded(first)).collect();
    let is_whole = |name: &str| !is_sharded(name) && !tied.iter().any(|(alias, _)| alias == name);
    let weights = state_dict_of(module.as_dyn(), &is_whole)?;
    Ok(Checkpoint { weights, training: None, meta, shards, tied })
}

/// The callbacks' hook.
fn on_save_checkpoint<M: LightningModule>(
    session: &mut Session<M>,
    checkpoint: &mut Checkpoint,
) -> Result<()> {
    let facts = BatchFacts::default();
    let (mut ctx, callbacks, _) = session.lend(&facts);
    let profiling = &ctx.run.profiling;
    callbacks.iter_mut().try_for_each(|callback| {
        of_callback(profiling, callback.as_mut(), "on_save_checkpoint", |callback| {
            callback.on_save_checkpoint(&mut ctx, checkpoint)
        })
        .map_err(|source| hook_error("on_save_checkpoint", &ctx.at.progress, source))
    })
}

fn callback_states(callbacks: &[Box<dyn Callback>]) -> Vec<(String, Value)> {
    callbacks.iter().filter_map(|callback| Some((callback.state_key(), callback.state_dict()?))).collect()
}

/// Whether gradients belong to a checkpoint: an accumulation window has begun and is not complete. With manual optimization they
/// always do: only the module knows which it still needs.
fn keeps_grads<M: LightningModule>(session: &Session<M>) -> bool {
    session.open_window().is_some() || !session.module.automatic_optimization()
}

fn pending_grads<M: LightningModule>(session: &Session<M>) -> Result<Vec<(String, tch::Tensor)>> {
    match keeps_grads(session) {
        true => session.run.engine.strategy.grads(session.module.as_dyn()),
        false => Ok(Vec::new()),
    }
}
