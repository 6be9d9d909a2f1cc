//! Collects the state of a run into a checkpoint.

use serde_json::Value;

use crate::accelerator::rng;
use crate::callback::Callback;
use crate::checkpoint::{Checkpoint, CheckpointMeta, LoopState, RankState, TrainingState, rank_to_bytes};
use crate::distributed::SlurmJob;
use crate::error::{Error, Result};
use crate::module::{BatchFacts, LightningModule, ModuleTensors, Progress};
use crate::nn::{Module, ModuleExt};
use crate::optim::OptimizerState;
use crate::trainer::session::frozen::{AfterFit, Frozen};
use crate::trainer::session::guard::guarded;
use crate::trainer::session::hooks::{hook_error, of_callback};
use crate::trainer::session::session::Session;

/// Keeps the run as it is.
///
/// # Sync
/// Copies weights and optimizer state.
pub(crate) fn freeze<M: LightningModule>(session: &mut Session<M>) -> Result<Frozen> {
    if session.takes_part_in_saving() {
        collect(session, false)?;
    }
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
    if session.takes_part_in_saving() {
        training_state(session)?;
    }
    Ok(match session.run.world().is_global_zero() {
        true => {
            let (state, training) = training_state(session)?;
            AfterFit::Whole(Box::new((state, training.of_finished_fit()?)))
        }
        false => AfterFit::Own(rank_to_bytes(&own_state(session)?)?),
    })
}

/// What this rank has to itself.
pub(crate) fn own_state<M: LightningModule>(session: &Session<M>) -> Result<RankState> {
    Ok(RankState {
        grads: pending_grads(session)?,
        metrics: session.run.log.metrics.metric_states()?,
        rng: rng::states(session.plan.device)?,
        logged: logged_values(session)?,
    })
}

/// Values logged in the epoch that is not over.
fn logged_values<M: LightningModule>(session: &Session<M>) -> Result<Value> {
    serde_json::to_value(session.run.log.metrics.state())
        .map_err(|e| Error::io("serialize", "logged values", e.into()))
}

/// # Sync
/// Reads weights, optimizer state and metrics back.
pub(crate) fn collect<M: LightningModule>(
    session: &mut Session<M>,
    weights_only: bool,
) -> Result<Checkpoint> {
    let parts = if weights_only { None } else { Some(training_state(session)?) };
    complete(session, parts)
}

/// The training state without what callbacks, data and module add.
fn training_state<M: LightningModule>(session: &Session<M>) -> Result<(LoopState, TrainingState)> {
    let run = &*session.run;
    let saved = session.training.optimizers.iter().enumerate();
    let saved = saved.map(|(index, optimizer)| run.engine.strategy.save_optimizer(index, optimizer.as_ref()));
    let optimizers: Vec<OptimizerState> = saved.collect::<Result<_>>()?;
    let names = session.training.optimizers.iter().map(|optimizer| optimizer.name().to_owned());
    let schedulers =
        session.training.schedulers.iter().map(|active| active.configured.scheduler.state_dict());
    let state = LoopState {
        progress: run.at.progress.clone(),
        metrics: logged_values(session)?,
        seed: run.seed,
        num_training_batches: run.facts.num_training_batches,
        batch_size: run.facts.train_batch_size,
        optimizers: names.zip(optimizers.iter().map(|state| state.groups.clone())).collect(),
        schedulers: schedulers.collect(),
        callbacks: Vec::new(),
        grad_scaler: run.engine.loss_scale.as_ref().and_then(|scale| scale.grad_scaler().cloned()),
        loss_scaler: run.engine.loss_scale.as_ref().and_then(|scale| scale.loss_scaler().cloned()),
        data: None,
        module: Value::Null,
        module_on_device: Vec::new(),
        slurm_job: SlurmJob::of_process().map(|job| job.id),
    };
    let training = TrainingState {
        optimizers: optimizers.into_iter().map(|state| state.tensors).collect(),
        grads: pending_grads(session)?,
        metrics: run.log.metrics.metric_states()?,
        rng: rng::states(session.plan.device)?,
        ..TrainingState::default()
    };
    Ok((state, training))
}

/// A checkpoint of the module's weights and these parts, with what callbacks, data and module add.
pub(crate) fn complete<M: LightningModule>(
    session: &mut Session<M>,
    parts: Option<(LoopState, TrainingState)>,
) -> Result<Checkpoint> {
    let progress = parts.as_ref().map_or(&session.run.at.progress, |(state, _)| &state.progress);
    let mut checkpoint = weights(session.module, progress)?;
    let state = match parts {
        Some((state, training)) => {
            checkpoint.training = Some(training);
            let callbacks = callback_states(&session.run.callbacks);
            let data = session.profile_data("state_dict")?.around(|| session.data.state_dict());
            Some(LoopState { callbacks, data, ..state })
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
        training.json = serde_json::to_value(LoopState { module, module_on_device, ..state })
            .map_err(|e| Error::io("serialize", "the training state", e.into()))?;
    }
    Ok(checkpoint)
}

/// A checkpoint of weights only; its tensors are the module's.
pub(crate) fn weights<M: LightningModule>(module: &M, progress: &Progress) -> Result<Checkpoint> {
    let meta = CheckpointMeta {
        epoch: progress.current_epoch,
        global_step: progress.global_step,
        module: Module::type_name(module).to_owned(),
        hyper_parameters: module.hyper_parameters(),
        ..CheckpointMeta::default()
    };
    Ok(Checkpoint { weights: module.try_state_dict()?, training: None, meta })
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

/// Gradients of an accumulation window that has begun and is not complete. With manual optimization all there are: only
/// the module knows which it goes on with.
fn pending_grads<M: LightningModule>(session: &Session<M>) -> Result<Vec<(String, tch::Tensor)>> {
    let progress = &session.run.at.progress;
    let is_open = !progress.batch_idx.is_multiple_of(session.accumulate_grad_batches)
        && progress.has_batches_left(session.run.facts.num_training_batches);
    if !is_open && session.module.automatic_optimization() {
        return Ok(Vec::new());
    }
    session.run.engine.strategy.grads(session.module.as_dyn())
}
