//! The training loop: epochs, batches and the whole step in reading order.

use std::time::Instant;

use tch::Tensor;

use crate::data::{Batch, EpochRange};
use crate::distributed::collective_scope;
use crate::error::{ConfigError, Result};
use crate::module::{BatchFacts, Hook, HookContext, LightningModule, Progress, StepHook, StepOutput};
use crate::optim::{Interval, Optimizer};
use crate::precision::LossScale;
use crate::profiler::actions;
use crate::trainer::plan::limits::FitPlan;
use crate::trainer::run::loaders::FitLoaders;
use crate::trainer::session::agree::votes;
use crate::trainer::session::engine::check_anomaly;
use crate::trainer::session::session::{Session, Undo};
use crate::trainer::session::step::{Step, Window};
use crate::trainer::state::restore::begin_window;

/// Why validation follows a training batch.
#[derive(Clone, Copy, PartialEq)]
enum Validation {
    /// It is its turn.
    Scheduled,
    /// The run ends, and the last metrics are to belong to the last weights; a run that continues has none here.
    AtStop,
}

impl<M: LightningModule> Session<'_, M> {
    /// Trains until an epoch or step limit, or until a stop is requested.
    pub(crate) fn train(&mut self, loaders: &mut FitLoaders<M::Batch>) -> Result<()> {
        match self.done_because(loaders) {
            None => self.run.at.progress.enter_next_epoch(), // of a run that is resumed after an epoch
            Some(why) => {
                tracing::warn!("fit has nothing to train: {why}");
                // a run that ended after its last batch is resumed with the end of training
                if self.run.resumed_from.is_none() || loaders.plan.num_training_batches == 0 {
                    return Ok(());
                }
            }
        }
        self.call(Hook::OnTrainStart, BatchFacts::default())?;
        if self.run.resumed_from.is_some() {
            self.write_checkpoints()?; // files of the checkpoint's moment that were not written
        }
        self.last_validation = Instant::now();
        self.run.at.has_begun = true;
        if self.resumes_at_cut() {
            self.train_epoch(loaders)?; // its hooks and files; no batch
        }
        while !self.is_done(loaders) {
            if self.run.at.progress.epoch_ended {
                self.run.at.progress.enter_next_epoch();
                continue; // the new epoch may be one too many
            }
            self.reload_train_dataloader(loaders)?;
            self.train_epoch(loaders)?;
        }
        if let Some(reason) = &self.run.requests.stop {
            tracing::info!("stopped at global_step {}: {reason}", self.run.at.progress.global_step);
        }
        self.call(Hook::OnTrainEnd, BatchFacts::default())?;
        self.update_running_statistics(loaders)
    }

    /// One epoch, or the rest of one that a checkpoint interrupted.
    fn train_epoch(&mut self, loaders: &mut FitLoaders<M::Batch>) -> Result<()> {
        self.call(Hook::OnTrainEpochStart, BatchFacts::default())?;
        if let Some(batches) = self.run.requests.accumulate_grad_batches.take() {
            self.accumulate_grad_batches = batches.max(1);
        }
        begin_window(self)?;
        let first_batch = self.run.at.progress.batch_idx as usize;
        let Progress { validation_is_open, schedules_are_open, .. } = self.run.at.progress;
        if validation_is_open || schedules_are_open {
            // the checkpoint was written before they were done
            self.finish_batch(loaders, validation_is_open.then_some(Validation::Scheduled))?;
        }
        if self.must_stop() {
            return self.end_epoch(loaders);
        }
        let range = EpochRange {
            epoch: self.run.at.progress.current_epoch,
            first_batch,
            num_batches: Some(loaders.plan.num_training_batches.saturating_sub(first_batch)),
        };
        let action = self.profile(actions::TRAINING_EPOCH)?;
        let mut batches = loaders.train.iter(range)?;
        while let Some(batch) = self.next_batch(&mut batches, actions::NEXT_TRAINING_BATCH)? {
            if !self.train_batch(batch, loaders)? {
                break; // a hook has left out the rest
            }
            if self.must_stop() {
                break;
            }
        }
        drop((batches, action));
        self.end_epoch(loaders)
    }

    /// One batch: forward, backward and, at the end of an accumulation window, the optimizer step; then what is due after
    /// it. False if `on_train_batch_start` leaves out the rest of the epoch.
    fn train_batch(&mut self, batch: M::Batch, loaders: &mut FitLoaders<M::Batch>) -> Result<bool> {
        let plan = &loaders.plan;
        let batch_idx = self.run.at.progress.batch_idx as usize;
        let is_last = batch_idx + 1 >= plan.num_training_batches;
        let window = self.window(plan.num_training_batches);
        self.run.mark_rows();

        if self.may_be_undone() && (window.opens || !self.undoes_windows()) {
            self.undo = Some(Undo::before(self.module, self.run, self.plan.device, window.opens)?);
        }
        let mut batch = self.take(batch, 0)?;
        let mut facts = BatchFacts {
            batch_idx,
            batch_size: batch.batch_size(),
            log_step: self.log_step(),
            ..BatchFacts::default()
        };
        self.run.log.metrics.begin_train_batch();
        self.call_on_start(Hook::OnTrainBatchStart, &mut facts, &mut batch)?;
        if std::mem::take(&mut self.run.requests.skips_epoch) {
            self.undo = None;
            self.skip_epoch(is_last, plan)?;
            return Ok(false);
        }

        let action = self.profile(actions::TRAINING_BATCH)?;
        let is_automatic = self.module.automatic_optimization();
        self.run.engine.strategy.begin_forward(self.module, window.opens)?;
        // ZeRO-3 unshards weights in hooks of the modules that this calls, forward and backward (`strategy/zero/access.rs`)
        let forward_backward = |session: &mut Self, batch: &M::Batch| {
            let loss = session.step(Step::Training, batch, facts, M::training_step)?;
            if is_automatic { session.backward(loss, window, facts) } else { Ok(loss) }
        };
        let (mut batch, loss) = match is_automatic && self.graphs.are_on() {
            true => self.graphed_step(batch, window, facts, &forward_backward)?,
            false => {
                let loss = forward_backward(self, &batch)?;
                (batch, loss)
            }
        };
        self.share_amaxes()?;
        let follows = (!is_automatic || self.optimize(&loss, window, facts)?) && window.closes;
        drop(action);
        self.run.choose_kept_activations()?;
        if follows {
            self.step_schedulers(Interval::Step, false)?;
        }
        if is_last {
            self.step_schedulers(Interval::Epoch, false)?;
        }
        self.run.at.progress.batch_idx += 1;
        self.run.at.progress.total_batches += 1;
        if window.closes || !self.undoes_windows() {
            self.undo = None;
        }

        let loss = if loss.defined() { Some(loss.f_detach()?) } else { None };
        let outputs = StepOutput { loss, ..std::mem::take(&mut self.outputs) };
        let is_scheduled = self.validation_is_scheduled(plan);
        let has_val_batches = plan.has_val_batches && self.is_epoch_of_validation();
        facts.will_validate = is_scheduled || (has_val_batches && self.stop_is_granted());
        self.run.at.progress.validation_is_open = is_scheduled;
        self.run.at.progress.schedules_are_open = follows;
        self.run.at.progress.batches_that_stepped += u64::from(window.closes);
        let hooked = self.call_on_end(Hook::OnTrainBatchEnd, facts, &mut batch, &outputs);
        drop((batch, outputs)); // what follows may need the memory
        self.log_step_values(facts.log_step, window)?; // also if the hook has failed: a run that is resumed does not repeat the step
        self.run.mark_rows();
        hooked?;
        let validation = match is_scheduled {
            true => Some(Validation::Scheduled),
            // the hook may have requested it
            false => (has_val_batches && self.stop_is_granted()).then_some(Validation::AtStop),
        };
        self.finish_batch(loaders, validation)?;
        Ok(true)
    }

    /// Gradients of one batch from its loss, with automatic optimization. Returns the loss divided by the window's size.
    fn backward(&mut self, loss: Tensor, window: Window, facts: BatchFacts) -> Result<Tensor> {
        check_loss(&loss)?;
        check_anomaly(self.run.engine.of_call.anomaly.as_ref(), "the loss", &loss, &self.run.at.progress)?;
        let called_hooks = self.graphs.called_hooks();
        if window.opens {
            if !called_hooks {
                self.call_in_step(StepHook::OnBeforeZeroGrad, facts)?;
            }
            self.each_optimizer("optimizer_zero_grad", facts, |module, optimizer, ctx| {
                module.optimizer_zero_grad(optimizer, ctx)
            })?;
            self.run.engine.of_call.gradients.begin_window();
        }
        let loss =
            if window.size > 1 && loss.defined() { loss.f_div_scalar(window.size as f64)? } else { loss };
        if loss.defined() {
            if !called_hooks {
                self.call_in_step(StepHook::OnBeforeBackward, facts)?;
            }
            let (mut ctx, mut step) = self.lend_in_step(&facts);
            step.run_backward(&mut ctx, &loss, window.closes)?;
        } else {
            let votes = votes(&self.run.engine, &self.run.requests);
            let _named = collective_scope("a batch without a loss");
            self.run.engine.without_loss(window.closes, votes)?;
        }
        Ok(loss)
    }

    /// Everything between the gradients of one batch and the changed weights. False if schedules wait, as the step is left out.
    fn optimize(&mut self, loss: &Tensor, window: Window, facts: BatchFacts) -> Result<bool> {
        if loss.defined() {
            self.call_in_step(StepHook::OnAfterBackward, facts)?;
        }
        let mut follows = true;
        if window.closes {
            let (engine, optimizers) = (&mut self.run.engine, &mut self.training.optimizers);
            let all = 0..optimizers.len();
            let is_finite = engine.unscale(optimizers, all.clone(), self.run.at.progress.global_step)?;
            let loss_scale = engine.loss_scale.as_ref();
            follows = is_finite || !loss_scale.is_some_and(LossScale::holds_schedules);
            engine.adapt_loss_scale(optimizers)?;
            self.call_in_step(StepHook::OnBeforeOptimizerStep, facts)?;
            if !(is_finite && self.graphed_update(facts, |session| session.update(true, facts))?) {
                self.update(is_finite, facts)?;
            }
            self.run.engine.of_call.gradients.note_step(all)?;
            self.undo = None;
            self.run.facts.hardware.accelerator.step_boundary()?;
            self.run.at.progress.global_step += 1;
        }
        Ok(follows)
    }

    /// Clips the gradients, and steps the optimizers if the gradients are finite.
    fn update(&mut self, is_finite: bool, facts: BatchFacts) -> Result<()> {
        let clip = self.plan.clip;
        self.each_optimizer("configure_gradient_clipping", facts, |module, optimizer, ctx| {
            module.configure_gradient_clipping(optimizer, clip, ctx)
        })?;
        if is_finite {
            self.each_optimizer("optimizer_step", facts, |module, optimizer, ctx| {
                module.optimizer_step(optimizer, ctx)
            })?;
        }
        Ok(())
    }

    /// Calls a method of the module with each optimizer.
    fn each_optimizer(
        &mut self,
        name: &'static str,
        facts: BatchFacts,
        mut call: impl FnMut(&M, &mut dyn Optimizer, &mut HookContext) -> anyhow::Result<()>,
    ) -> Result<()> {
        let mut optimizers = std::mem::take(&mut self.training.optimizers); // each is given beside the context
        let (mut ctx, mut step) = self.lend_in_step(&facts);
        let result = step.method(&mut ctx, name, |module, ctx| {
            optimizers.iter_mut().try_for_each(|optimizer| call(module, optimizer.as_mut(), ctx))
        });
        self.training.optimizers = optimizers;
        result
    }

    /// What follows a training batch: validation if it is due, schedules that follow a metric, checkpoints.
    fn finish_batch(
        &mut self,
        loaders: &mut FitLoaders<M::Batch>,
        validation: Option<Validation>,
    ) -> Result<()> {
        self.check_failures()?;
        if validation == Some(Validation::AtStop) {
            self.write_checkpoints()?;
            self.keep_cut_short()?;
        }
        if validation.is_some() {
            self.validate_in_fit(loaders)?;
            self.run.mark_rows();
        }
        if std::mem::take(&mut self.run.at.progress.schedules_are_open) {
            self.step_schedulers(Interval::Step, true)?;
        }
        self.write_checkpoints()?;
        self.check_signals()
    }

    /// Ends the epoch: its hooks, plateau schedules, and its metrics to the loggers. An epoch that a limit or a stop cut
    /// short is left open, and checkpoints of now are as before its hooks: a resumed run finishes it.
    fn end_epoch(&mut self, loaders: &FitLoaders<M::Batch>) -> Result<()> {
        let has_batches_left = self.run.at.progress.has_batches_left(loaders.plan.num_training_batches);
        let is_cut_short = has_batches_left && self.must_stop();
        self.run.mark_rows();
        if is_cut_short {
            self.keep_cut_short()?;
        }
        self.run.at.progress.epoch_ended = !is_cut_short;
        self.graphs.warn_if_unused();
        self.is_ending_epoch = true;
        self.run.log.metrics.publish_train_epoch()?; // sync point
        self.call(Hook::OnTrainEpochEnd, BatchFacts::default())?;
        self.agree()?;
        self.check_failures()?;
        self.step_schedulers(Interval::Epoch, true)?;
        self.check_rates_alike()?;
        if !self.run.at.progress.epoch_ended {
            self.write_checkpoints()?; // with the metrics so far, to which a resumed run adds
        }
        let values = self.run.log.metrics.finish_train_epoch()?; // sync point
        self.log(values, self.run.at.progress.batches_that_stepped.saturating_sub(1))?;
        self.is_ending_epoch = false;
        self.run.mark_rows();
        self.write_checkpoints()?;
        let saved = self.run.loggers.iter_mut().try_for_each(|logger| logger.save());
        self.keep_failure(saved)
    }

    /// Leaves out the rest of the epoch. Schedules by epoch are stepped only if it was the last batch, as in Lightning.
    fn skip_epoch(&mut self, is_last: bool, plan: &FitPlan) -> Result<()> {
        if is_last {
            self.step_schedulers(Interval::Epoch, false)?;
        }
        self.run.at.progress.batch_idx = plan.num_training_batches as u64;
        Ok(())
    }

    /// Gives the values of a batch to the loggers if it is their turn, or the run is about to stop.
    fn log_step_values(&mut self, log_step: Option<u64>, window: Window) -> Result<()> {
        if !window.closes {
            return Ok(());
        }
        let step = self.run.at.progress.batches_that_stepped.saturating_sub(1);
        let takes_rows = !self.run.loggers.is_empty() && self.plan.log_every_n_steps > 0;
        let logs = log_step.is_some() || (self.run.requests.stop.is_some() && takes_rows);
        if !logs {
            return Ok(());
        }
        let values = self.run.log.metrics.step_values(); // sync point
        self.log(values, step)
    }

    /// The step that the loggers take values of, if they do at the optimizer step that comes: every
    /// `log_every_n_steps`-th.
    fn log_step(&self) -> Option<u64> {
        let (step, every) = (self.run.at.progress.batches_that_stepped, self.plan.log_every_n_steps);
        let is_due = !self.run.loggers.is_empty() && every > 0 && (step + 1).is_multiple_of(every);
        is_due.then_some(step)
    }

    /// Whether validation has its turn after the batch just done, leaving aside that a run which is requested to stop
    /// ends with one.
    fn validation_is_scheduled(&self, plan: &FitPlan) -> bool {
        let progress = &self.run.at.progress;
        if !plan.has_val_batches {
            return false;
        }
        if let Some(interval) = self.plan.val_check_time {
            let has_passed = self.last_validation.elapsed() >= interval;
            return has_passed && self.is_epoch_of_validation();
        }
        match self.plan.check_val_every_n_epoch {
            None => progress.total_batches.is_multiple_of(plan.val_check_batch as u64),
            Some(_) if !self.is_epoch_of_validation() => false,
            Some(_) => {
                (progress.batch_idx as usize).is_multiple_of(plan.val_check_batch) // counted from 0 in each epoch
            }
        }
    }

    /// Whether `check_val_every_n_epoch` allows validation in the current epoch.
    fn is_epoch_of_validation(&self) -> bool {
        let epochs = self.run.at.progress.current_epoch + 1;
        self.plan.check_val_every_n_epoch.is_none_or(|every| epochs.is_multiple_of(every))
    }

    /// Whether a failure undoes all batches of an accumulation window: other ranks have gradients of it that could not be saved.
    fn undoes_windows(&self) -> bool {
        self.run.world().world_size > 1
    }

    /// Whether the batch to come is undone if it fails: a checkpoint of the failure is written then. Steps of manual optimization
    /// cannot be undone.
    fn may_be_undone(&self) -> bool {
        self.module.automatic_optimization() && self.saves_on_exception()
    }

    fn is_done(&self, loaders: &FitLoaders<M::Batch>) -> bool {
        self.done_because(loaders).is_some()
    }

    /// Why training is over, if it is.
    fn done_because(&self, loaders: &FitLoaders<M::Batch>) -> Option<String> {
        let progress = &self.run.at.progress;
        let epochs = progress.current_epoch + u64::from(progress.epoch_ended);
        if loaders.plan.num_training_batches == 0 {
            return Some("an epoch has no batches (limit_train_batches, or the training loader)".to_owned());
        }
        if let Some(max) = self.plan.max_epochs.filter(|max| epochs >= *max) {
            return Some(format!("max_epochs={max} is reached at epoch {epochs}"));
        }
        let has_open_end =
            progress.batch_idx > 0 && !progress.has_batches_left(loaders.plan.num_training_batches);
        let is_open = has_open_end || progress.validation_is_open || progress.schedules_are_open;
        if is_open && !progress.epoch_ended {
            return None; // a run that is resumed has yet to do what follows its last batch
        }
        if let Some(max) = self.plan.max_steps.filter(|_| self.reached_max_steps()) {
            return Some(format!("max_steps={max} is reached at global_step {}", progress.global_step));
        }
        self.stop_is_granted().then(|| self.stop_reason())
    }

    /// Whether this run is resumed where a limit or a stop has cut an epoch short: the checkpoint is from before the epoch's end.
    fn resumes_at_cut(&self) -> bool {
        let Progress { current_epoch, batch_idx, epoch_ended, .. } = self.run.at.progress;
        let is_within =
            batch_idx > 0 && !epoch_ended && self.plan.max_epochs.is_none_or(|max| current_epoch < max);
        self.run.resumed_from.is_some() && is_within && self.must_stop()
    }

    fn must_stop(&self) -> bool {
        self.reached_max_steps() || self.stop_is_granted()
    }

    /// Whether a stop was requested, and `min_epochs` and `min_steps` allow it.
    fn stop_is_granted(&self) -> bool {
        self.is_asked_to_stop() && self.reached_minimum()
    }

    fn reached_max_steps(&self) -> bool {
        self.plan.max_steps.is_some_and(|max| self.run.at.progress.global_step >= max)
    }
}

/// A loss that cannot be trained on is a mistake of the step, best named at once.
fn check_loss(loss: &Tensor) -> Result<()> {
    if !loss.defined() {
        return Ok(()); // ctx.no_loss()
    }
    let refuse =
        |what: String, remedy: &'static str| Err(ConfigError::new("training_step", what, remedy).into());
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
