//! The context of hooks: where the run stands, `log`, and requests to the trainer.

use std::any::type_name;
use std::path::Path;

use tch::Tensor;

use super::facts::{BatchFacts, RunFacts};
use super::groups::{Logging, Position, Training};
use super::logged::{LogEntry, LogValue};
use super::output::{AnyBatch, StepOutput};
use super::requests::{CheckpointRequest, Requests};
use crate::checkpoint::Progress;
use crate::data::{Batch, Stage};
use crate::device::Device;
use crate::distributed::{DeviceMesh, ProcessGroup};
use crate::error::{ConfigError, Result};
use crate::graph::refuse_capture;
use crate::nn::ModuleHooks;
use crate::optim::{ActiveLrScheduler, LrSchedulerSpec, Optimizer};
use crate::profiler::Action;

/// Context of a hook, for modules and callbacks. Borrows what the run holds.
pub struct HookContext<'a> {
    pub(crate) at: &'a mut Position,
    pub(crate) run: &'a RunFacts,
    pub(crate) of_batch: &'a BatchFacts<'a>,
    pub(crate) log: &'a mut Logging,
    pub(crate) requests: &'a mut Requests,
    pub(crate) training: &'a mut Training,
    /// In batch hooks.
    pub(crate) batch: Option<&'a mut (dyn AnyBatch + 'static)>,
}

impl HookContext<'_> {
    /// Borrows the same again, for one of several calls.
    pub(crate) fn again(&mut self) -> HookContext<'_> {
        let Self { at, run, of_batch, log, requests, training, batch } = self;
        let batch = batch.as_deref_mut();
        HookContext { at, run, of_batch, log, requests, training, batch }
    }

    /// Logs a scalar under `name`; options are set on what is returned. Values of batch hooks are for the step,
    /// values of epoch hooks for the epoch.
    pub fn log<'b>(&'b mut self, name: &'b str, value: impl Into<LogValue>) -> LogEntry<'b> {
        LogEntry::new(&mut self.log.metrics, name, value.into())
    }

    /// The step of the rows that the loggers take of this batch, if they take any; set in batch hooks.
    ///
    /// In training they do at every `log_every_n_steps`-th optimizer step, at each of its batches. In an evaluation they
    /// do at the last batch: its batches all have the same step, at which a curve has room for one point. They never do
    /// without a logger, with `log_every_n_steps` 0, in the sanity check and in prediction.
    pub fn log_step(&self) -> Option<u64> {
        self.of_batch.log_step
    }

    /// Gives values to the loggers after this hook, as a row of its own: unlike those of [`HookContext::log`] they are
    /// not averaged, and do not appear in the progress bar or in [`HookContext::metric`].
    pub fn log_metrics(&mut self, metrics: Vec<(String, f64)>, step: u64) {
        self.log.rows.push((metrics, step));
    }

    /// Begins an action of your own for the profiler; it ends when what is returned goes out of scope. Nothing is measured
    /// without a profiler.
    ///
    /// # Errors
    /// If an action of this name runs already.
    pub fn profile(&self, action: &str) -> Result<Action> {
        self.run.profiling.start(|| action.to_owned())
    }

    /// The ranks, to exchange tensors with; `None` for a process alone.
    pub fn process_group(&self) -> Option<&ProcessGroup> {
        self.run.world.peers().map(std::convert::AsRef::as_ref)
    }

    /// The ranks as a mesh, with the process group of each dimension: Lightning's `device_mesh`.
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.run.world.mesh()
    }

    /// Whether this process is rank 0, which prints and writes files.
    pub fn is_global_zero(&self) -> bool {
        self.run.world.is_global_zero()
    }

    /// The device of this process.
    pub fn device(&self) -> Device {
        self.run.hardware.device
    }

    /// Device statistics: see [`Accelerator::device_stats`](crate::accelerator::Accelerator::device_stats).
    ///
    /// # Errors
    /// If the device cannot be asked.
    pub fn device_stats(&self) -> Result<Vec<(&'static str, f64)>> {
        let hardware = &self.run.hardware;
        hardware.accelerator.device_stats(hardware.device)
    }

    /// Where the run stands.
    pub fn progress(&self) -> &Progress {
        refuse_capture("the step asks for ctx.progress(), which changes from step to step");
        &self.at.progress
    }

    /// The epoch in progress, from 0.
    pub fn current_epoch(&self) -> u64 {
        refuse_capture("the step asks for ctx.current_epoch(), which changes from step to step");
        self.at.progress.current_epoch
    }

    /// Optimizer steps done.
    pub fn global_step(&self) -> u64 {
        refuse_capture("the step asks for ctx.global_step(), which changes from step to step");
        self.at.progress.global_step
    }

    /// At the end of an epoch: whether it ends before its last batch, as at a limit of steps, so that its validation may
    /// never have run.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.at.progress.has_batches_left(self.run.num_training_batches)
    }

    /// Fixed facts of the run.
    pub fn facts(&self) -> &RunFacts {
        self.run
    }

    /// Hooks of the calls of the module and of those within it, which are active in its steps until they are
    /// removed:
    ///
    /// ```
    /// # use voltaic::module::HookContext;
    /// # struct Net { norms: Vec<f64> }
    /// # impl Net {
    /// fn on_fit_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
    ///     let _ = ctx.module_hooks().register_forward_hook("encoder.*", |call, _, outputs| {
    ///         println!("{}: {}", call.fqn(), outputs[0].norm().double_value(&[]));
    ///         Ok(())
    ///     });
    ///     Ok(())
    /// }
    /// # }
    /// ```
    pub fn module_hooks(&self) -> &ModuleHooks {
        &self.run.module_hooks
    }

    /// Position of the batch within its loader, in batch hooks.
    pub fn batch_idx(&self) -> usize {
        refuse_capture("the step asks for ctx.batch_idx(), which changes from step to step");
        self.of_batch.batch_idx
    }

    /// Samples of the batch, in batch hooks; `None` if its tensors do not show it.
    pub fn batch_size(&self) -> Option<usize> {
        self.of_batch.batch_size
    }

    /// Samples of the data set that the batch is made of, in its order; set in the batch hooks of evaluations.
    pub fn batch_indices(&self) -> &[usize] {
        self.of_batch.batch_indices
    }

    /// What `predict_step` gave for the batch; set in `on_predict_batch_end`.
    pub fn prediction(&self) -> Option<&Tensor> {
        self.of_batch.output.prediction()
    }

    /// The batch, in batch hooks: on the device, as the step gets it. `B` is the module's `Batch`.
    ///
    /// # Errors
    /// If the hook is not about a batch, or the batch has another type.
    pub fn batch<B: Batch>(&self) -> anyhow::Result<&B> {
        let batch = self.batch.as_deref().ok_or_else(|| no_batch(self.log.metrics.hook()))?;
        batch.as_any().downcast_ref().ok_or_else(|| wrong_batch::<B>(batch.type_name()))
    }

    /// The batch, to be changed. The step sees what `on_*_batch_start` makes of it; in `on_*_batch_end` it has been run.
    ///
    /// # Errors
    /// If the hook is not about a batch, or the batch has another type.
    pub fn batch_mut<B: Batch>(&mut self) -> anyhow::Result<&mut B> {
        let batch = self.batch.as_deref_mut().ok_or_else(|| no_batch(self.log.metrics.hook()))?;
        let is = batch.type_name();
        self.requests.changed_batch = true;
        batch.as_any_mut().downcast_mut().ok_or_else(|| wrong_batch::<B>(is))
    }

    /// What the step gave for the batch, in `on_{train,validation,test,predict}_batch_end`; empty in other hooks.
    pub fn outputs(&self) -> &StepOutput {
        self.of_batch.output
    }

    /// Which of several evaluation loaders the batch is from, in batch hooks.
    pub fn dataloader_idx(&self) -> usize {
        self.of_batch.dataloader_idx
    }

    /// The batches are those of the check before training.
    pub fn is_sanity_check(&self) -> bool {
        self.at.is_sanity_check
    }

    /// The run is a fit, also while it validates.
    pub fn is_training(&self) -> bool {
        self.at.stage == Stage::Fit
    }

    /// Whether this fit has begun to train: before that there is nothing that a failure could lose.
    pub fn has_begun(&self) -> bool {
        self.at.has_begun
    }

    /// Validation follows this training batch.
    pub fn will_validate(&self) -> bool {
        self.of_batch.will_validate
    }

    /// The loss of the training batch just done, divided by `accumulate_grad_batches`; scalar, detached, on the
    /// device. Set in `on_train_batch_end`.
    pub fn loss(&self) -> Option<&Tensor> {
        self.of_batch.output.loss()
    }

    /// The latest value of a metric by its name (`val_loss`, `train_loss_epoch`).
    ///
    /// # Sync
    /// Reads the value back from the device.
    pub fn metric(&self, name: &str) -> Option<f64> {
        refuse_capture("the step asks for ctx.metric(), which changes from step to step");
        self.log.metrics.callback_metric(name)
    }

    /// Names of all metrics that [`HookContext::metric`] returns.
    pub fn metric_names(&self) -> Vec<String> {
        self.log.metrics.callback_metric_names()
    }

    /// Names and values for the progress bar.
    ///
    /// # Sync
    /// Reads the values back from the device.
    pub fn progress_bar_metrics(&self) -> Vec<(String, f64)> {
        self.log.metrics.progress_bar_metrics()
    }

    /// The optimizers, in the order of `configure_optimizers`; empty outside fit, and in hooks that get an optimizer.
    pub fn optimizers(&self) -> &[Box<dyn Optimizer>] {
        &self.training.optimizers
    }

    /// The optimizers, so that their hyper-parameters can be changed.
    pub fn optimizers_mut(&mut self) -> &mut [Box<dyn Optimizer>] {
        &mut self.training.optimizers
    }

    /// The learning rate schedules, in the order of their optimizers; empty outside fit.
    pub fn lr_schedulers(&self) -> &[ActiveLrScheduler] {
        &self.training.schedulers
    }

    /// Steps learning rate schedule number `index`, for modules with manual optimization; `metric` is for one that
    /// follows a metric.
    ///
    /// # Errors
    /// If there is no such schedule, or it cannot step.
    pub fn lr_scheduler_step(&mut self, index: usize, metric: Option<f64>) -> Result<()> {
        self.training.step_lr_scheduler(index, metric)
    }

    /// Puts other learning rate schedules, of the optimizers in their order, in the place of those there are. They start
    /// from the current rates.
    ///
    /// # Errors
    /// If there are more than optimizers, or one of them cannot be made.
    pub fn replace_lr_schedulers(&mut self, specs: Vec<LrSchedulerSpec>) -> Result<()> {
        let (count, optimizers) = (specs.len(), self.training.optimizers.len());
        if count > optimizers {
            let what = format!("{count} schedules for {optimizers} optimizers");
            return Err(ConfigError::new("lr_scheduler", what, "give one for each optimizer at most").into());
        }
        let built = specs.into_iter().zip(self.training.optimizers.iter_mut()).enumerate();
        let built = built.map(|(optimizer, (spec, of))| {
            Ok(ActiveLrScheduler { optimizer, configured: spec.build(of.as_mut())? })
        });
        self.training.schedulers = built.collect::<Result<_>>()?;
        Ok(())
    }

    /// Asks for a pass over the training data after `on_train_end` that takes the running statistics of batch normalisation
    /// again, for weights that were not trained but set.
    pub fn request_running_statistics(&mut self) {
        self.requests.updates_running_statistics = true;
    }

    /// Leaves out the rest of the epoch, the batch in progress included. For `on_train_batch_start`, where Lightning's
    /// hook returns -1.
    pub fn skip_epoch(&mut self) {
        self.requests.skips_epoch = true;
    }

    /// Sets how many batches make an optimizer step from now on. For `on_train_epoch_start`.
    pub fn set_accumulate_grad_batches(&mut self, batches: u64) {
        self.requests.accumulate_grad_batches = Some(batches);
    }

    /// Makes a value known to [`HookContext::metric`] and to callbacks that monitor it, without giving it to loggers.
    pub fn set_metric(&mut self, name: impl Into<String>, value: f64) {
        self.log.metrics.set_callback_metric(name.into(), value);
    }

    /// Whether the run has a logger.
    pub fn has_logger(&self) -> bool {
        self.run.has_logger
    }

    /// Folder of the run: where the first logger writes, else `default_root_dir`.
    pub fn log_dir(&self) -> &Path {
        &self.run.log_dir
    }

    /// Ends training after this batch, once `min_epochs` and `min_steps` are reached; `reason` goes to the log.
    pub fn request_stop(&mut self, reason: impl Into<String>) {
        self.requests.stop.get_or_insert(reason.into());
    }

    /// Takes back a stop that was requested for the same `reason` and still waits for `min_epochs` or `min_steps`; one that has been
    /// granted stays. Returns whether it was taken back.
    pub fn withdraw_stop(&mut self, reason: &str) -> bool {
        let waits = self.current_epoch() < self.run.min_epochs || self.global_step() < self.run.min_steps;
        waits && self.requests.stop.take_if(|asked| asked == reason).is_some()
    }

    /// Asks the trainer to write a checkpoint as soon as a run can be resumed from it: after the batch in progress and
    /// the validation that follows it, or at the end of the epoch. Rank 0 writes it.
    ///
    /// # Collective
    /// All ranks must ask in the same hook, since each has a part of its own in a full checkpoint.
    pub fn request_checkpoint(&mut self, request: CheckpointRequest) {
        self.requests.checkpoints.push(request);
    }
}

fn no_batch(hook: &str) -> anyhow::Error {
    anyhow::anyhow!("{hook} is not about a batch; ask for it in on_*_batch_start or on_*_batch_end")
}

fn wrong_batch<B>(is: &str) -> anyhow::Error {
    let asked = type_name::<B>();
    anyhow::anyhow!("the batch is a {is}, not a {asked}; ask for the module's `Batch`")
}
