//! The training loop: epochs, batches and the whole step in reading order.

use tch::Tensor;

use super::plan::{Clip, FitPlan};
use super::session::{BatchFacts, HookPoint, Session, call_hook};
use crate::data::{Batch, DataLoader, EpochRange};
use crate::error::{ConfigError, Result};
use crate::module::{Level, LightningModule, Phase};
use crate::optim::{Interval, clip_grad_norm, clip_grad_value};

/// Loaders of a fit and what is known about them.
pub(super) struct FitLoaders<B: Batch> {
    pub train: DataLoader<B>,
    pub val: Vec<DataLoader<B>>,
    pub plan: FitPlan,
}

/// What a training batch leaves to be done.
struct BatchEnd {
    /// The optimizer has stepped.
    is_step: bool,
    /// Validation is due.
    validates: bool,
}

pub(super) const TRAINING_STEP: HookPoint =
    HookPoint { name: "training_step", phase: Phase::Train, level: Level::Step };

impl<M: LightningModule> Session<'_, M> {
    /// Trains until an epoch or step limit, or until somebody asks to stop.
    pub(super) fn train(&mut self, loaders: &FitLoaders<M::Batch>) -> Result<()> {
        call_hook!(self, on_train_start, Train, EpochOnly)?;
        while !self.is_done(loaders) {
            if self.run.progress.epoch_ended {
                self.run.progress.current_epoch += 1;
                self.run.progress.batch_idx = 0;
                self.run.progress.epoch_ended = false;
                continue; // the new epoch may be one too many
            }
            self.train_epoch(loaders)?;
        }
        if let Some(reason) = &self.run.requests.stop {
            tracing::info!("stopped at global_step {}: {reason}", self.run.progress.global_step);
        }
        call_hook!(self, on_train_end, Train, Denied)
    }

    /// One epoch, or the rest of one that a checkpoint interrupted.
    fn train_epoch(&mut self, loaders: &FitLoaders<M::Batch>) -> Result<()> {
        let first_batch = self.run.progress.batch_idx as usize;
        call_hook!(self, on_train_epoch_start, Train, EpochOnly)?;
        let range = EpochRange {
            epoch: self.run.progress.current_epoch,
            first_batch,
            num_batches: Some(loaders.plan.num_training_batches.saturating_sub(first_batch)),
        };
        for batch in loaders.train.iter(range)? {
            let BatchEnd { is_step, validates } = self.train_batch(batch?, &loaders.plan)?;
            if validates {
                self.validate_in_fit(&loaders.val, &loaders.plan.num_val_batches)?;
            }
            if is_step {
                self.step_schedulers(Interval::Step, true)?;
            }
            self.write_checkpoints()?;
            self.check_signals()?;
            if self.must_stop() {
                break;
            }
        }
        self.end_epoch(loaders)
    }

    /// One batch: forward, backward and, at the end of an accumulation window, the optimizer step.
    fn train_batch(&mut self, batch: M::Batch, plan: &FitPlan) -> Result<BatchEnd> {
        let batch_idx = self.run.progress.batch_idx as usize;
        let is_last = batch_idx + 1 >= plan.num_training_batches;
        let window = self.plan.accumulate_grad_batches;
        let opens_window = (batch_idx as u64).is_multiple_of(window);
        let closes_window = is_last || (batch_idx as u64 + 1).is_multiple_of(window);

        let batch = self.take(batch)?;
        let log_step = self.log_step();
        let mut facts =
            BatchFacts { batch_idx, batch_size: batch.batch_size(), log_step, ..BatchFacts::default() };
        self.run.metrics.begin_train_batch();
        call_hook!(self, on_train_batch_start, Train, Step, facts)?;

        let loss = match self.graphs.are_on() {
            false => self.forward_backward(&batch, facts, opens_window, true)?,
            true => self.graphed_step(batch, facts, opens_window)?,
        };
        call_hook!(self, on_after_backward, Train, Step, facts)?;

        if closes_window {
            let all_finite = self.unscale_gradients()?;
            call_hook!(self, on_before_optimizer_step, Train, Step, facts)?;
            self.clip_gradients()?;
            if all_finite {
                self.optimizers.iter_mut().try_for_each(|optimizer| optimizer.step())?;
            }
            self.run.accelerator.step_boundary()?;
            self.run.progress.global_step += 1;
            self.step_schedulers(Interval::Step, false)?;
        }
        if is_last {
            self.step_schedulers(Interval::Epoch, false)?;
        }
        self.run.progress.batch_idx += 1;
        self.run.progress.total_batches += 1;

        facts.loss = Some(&loss);
        facts.will_validate = self.validation_is_due(plan);
        call_hook!(self, on_train_batch_end, Train, Step, facts)?;
        if let (true, Some(step)) = (closes_window, log_step) {
            let values = self.run.metrics.step_values(); // sync point
            self.log(values, step)?;
        }
        Ok(BatchEnd { is_step: closes_window, validates: facts.will_validate })
    }

    /// Forward and backward of one batch; gives the loss, detached. `calls_hooks` is unset if they were called before.
    pub(super) fn forward_backward(
        &mut self,
        batch: &M::Batch,
        facts: BatchFacts,
        opens_window: bool,
        calls_hooks: bool,
    ) -> Result<Tensor> {
        let loss = self.step(TRAINING_STEP, facts, |module, ctx| module.training_step(batch, ctx))?;
        check_loss(&loss)?;
        if opens_window {
            if calls_hooks {
                call_hook!(self, on_before_zero_grad, Train, Step, facts)?;
            }
            self.optimizers.iter_mut().try_for_each(|optimizer| optimizer.zero_grad())?;
        }
        let window = self.plan.accumulate_grad_batches;
        let loss = if window > 1 { loss.f_div_scalar(window as f64)? } else { loss };
        if calls_hooks {
            call_hook!(self, on_before_backward, Train, Step, facts)?;
        }
        match &self.run.grad_scaler {
            Some(scaler) => scaler.scale(&loss)?.f_backward()?,
            None => loss.f_backward()?,
        }
        Ok(loss.f_detach()?)
    }

    /// With a gradient scaler: takes its factor out of the gradients and adapts it. Returns whether the optimizers may
    /// step; without a scaler they always may.
    fn unscale_gradients(&mut self) -> Result<bool> {
        let Some(scaler) = &mut self.run.grad_scaler else { return Ok(true) };
        let groups = self.optimizers.iter().flat_map(|optimizer| optimizer.param_groups());
        let params = groups.flat_map(|group| group.params()).map(|(_, parameter)| parameter.tensor());
        let all_finite = scaler.unscale(params)?; // sync point
        scaler.update(all_finite);
        if !all_finite {
            tracing::info!(
                "step {} is left out: its gradients are not finite; the loss is scaled by {} from now on",
                self.run.progress.global_step,
                scaler.get_scale()
            );
        }
        Ok(all_finite)
    }

    fn clip_gradients(&mut self) -> Result<()> {
        let Some(clip) = self.plan.clip else { return Ok(()) };
        for optimizer in &self.optimizers {
            let params =
                optimizer.param_groups().iter().flat_map(|group| group.params()).map(|(_, p)| p.tensor());
            match clip {
                Clip::Norm(max_norm) => drop(clip_grad_norm(params, max_norm)?),
                Clip::Value(value) => clip_grad_value(params, value)?,
            }
        }
        Ok(())
    }

    /// The step that the loggers take values of, if they do at the optimizer step that comes: every
    /// `log_every_n_steps`-th.
    fn log_step(&self) -> Option<u64> {
        let (step, every) = (self.run.progress.global_step, self.plan.log_every_n_steps);
        let is_due = !self.run.loggers.is_empty() && every > 0 && (step + 1).is_multiple_of(every);
        is_due.then_some(step)
    }

    fn validation_is_due(&self, plan: &FitPlan) -> bool {
        let progress = &self.run.progress;
        if plan.num_val_batches.iter().sum::<usize>() == 0 {
            return false;
        }
        match self.plan.check_val_every_n_epoch {
            None => progress.total_batches.is_multiple_of(plan.val_check_batch as u64),
            Some(every) if !(progress.current_epoch + 1).is_multiple_of(every) => false,
            Some(_) => {
                (progress.batch_idx as usize).is_multiple_of(plan.val_check_batch) // counted anew in each epoch
            }
        }
    }

    /// Ends the epoch: its hooks, plateau schedules, and its metrics to the loggers. An epoch that a step limit cut
    /// short is left open, so that a resumed run finishes it.
    fn end_epoch(&mut self, loaders: &FitLoaders<M::Batch>) -> Result<()> {
        let is_complete = self.run.progress.batch_idx as usize >= loaders.plan.num_training_batches;
        self.run.progress.epoch_ended = is_complete || self.run.requests.stop.is_some();
        self.run.metrics.publish_train_epoch(); // sync point
        call_hook!(self, on_train_epoch_end, Train, EpochOnly)?;
        self.step_schedulers(Interval::Epoch, true)?;
        if !self.run.progress.epoch_ended {
            self.write_checkpoints()?; // with the metrics so far, to which a resumed run adds
        }
        let values = self.run.metrics.finish_train_epoch(); // sync point
        self.write_checkpoints()?;
        self.log(values, self.run.progress.global_step.saturating_sub(1))?;
        self.run.loggers.iter_mut().try_for_each(|logger| logger.save())
    }

    fn reached_max_steps(&self) -> bool {
        self.plan.max_steps.is_some_and(|max| self.run.progress.global_step >= max)
    }

    /// Somebody asked to stop, and `min_epochs` and `min_steps` allow it.
    fn stop_is_granted(&self) -> bool {
        let progress = &self.run.progress;
        let epochs = progress.current_epoch + u64::from(progress.epoch_ended);
        self.run.requests.stop.is_some()
            && epochs >= self.plan.min_epochs
            && progress.global_step >= self.plan.min_steps
    }

    fn must_stop(&self) -> bool {
        self.reached_max_steps() || self.stop_is_granted()
    }

    fn is_done(&self, loaders: &FitLoaders<M::Batch>) -> bool {
        let progress = &self.run.progress;
        let epochs = progress.current_epoch + u64::from(progress.epoch_ended);
        let reached_max_epochs = self.plan.max_epochs.is_some_and(|max| epochs >= max);
        reached_max_epochs || loaders.plan.num_training_batches == 0 || self.must_stop()
    }
}

/// A loss that cannot be trained on is a mistake of the step, best named at once.
fn check_loss(loss: &Tensor) -> Result<()> {
    let refuse = |what: String, remedy: &str| Err(ConfigError::new("training_step", what, remedy).into());
    if loss.numel() != 1 {
        return refuse(
            format!("the loss has shape {:?}", loss.size()),
            "return a scalar, for example with mean()",
        );
    }
    if !loss.requires_grad() {
        return refuse(
            "the loss does not require grad".to_owned(),
            "compute it from the module's parameters without detach(), and leave some of them trainable",
        );
    }
    Ok(())
}
