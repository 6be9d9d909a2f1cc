//! What the loops of fit and of evaluation share: taking batches, running steps, logging, writing checkpoints.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::accelerator::Accelerator;
use crate::callback::Callback;
use crate::checkpoint::{CheckpointIo, CheckpointPaths};
use crate::data::{Batch, BatchIter, Stage};
use crate::distributed::{global_rank, hold_back};
use crate::error::{Error, Result};
use crate::ffi::AnomalyWatch;
use crate::graph::{self, MadeInCapture};
use crate::logger::Logger;
use crate::module::{
    Action, CheckpointRequest, LightningModule, ManualOptimization, MetricStore, Profiling, Progress,
    Requests, RunFacts, StepContext,
};
use crate::nn::{Module, ModuleExt, Parameter};
use crate::optim::{ActiveLrScheduler, Optimizer};
use crate::precision::{GradScaler, autocast, log_casts, set_run_lists};
use crate::strategy::{Strategy, Votes};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::run::graphs::step::StepGraphs;
use crate::trainer::search::trial::Keep;
use crate::trainer::session::captured_optimizers::CapturedOptimizers;
use crate::trainer::session::data_hooks::DataHooks;
use crate::trainer::session::guard::guarded;
use crate::trainer::session::hooks::{BatchFacts, HookPoint, hook_error, module_hook, of_callback};
use crate::trainer::session::manual::Manual;
use crate::trainer::session::signals::Signals;
use crate::trainer::session::undo::Undo;
use crate::trainer::state::collect::{self as checkpointing, AfterFit, Frozen};

/// Everything of a run that is not the model: outlives single calls of fit, validate, test and predict.
pub(crate) struct Run {
    pub accelerator: Arc<dyn Accelerator>,
    pub strategy: Box<dyn Strategy>,
    /// What any rank has been asked, as far as all know.
    pub agreed: Votes,
    pub checkpoint_io: Box<dyn CheckpointIo>,
    pub callbacks: Vec<Box<dyn Callback>>,
    pub loggers: Vec<Box<dyn Logger>>,
    pub progress: Progress,
    pub metrics: MetricStore,
    pub profiling: Profiling,
    pub requests: Requests,
    pub facts: RunFacts,
    /// What callbacks have saved that a module has since put others in the place of.
    pub replaced: Vec<CheckpointPaths>,
    /// Folders of the runs of this configuration: see `find_checkpoint.rs`. Rank 0 knows.
    pub run_folders: Vec<PathBuf>,
    /// In a search: weights and random numbers as they were when the module was complete.
    pub kept: Keep,
    /// The checkpoint that this fit goes on from; it is not replaced by better ones, as in Lightning.
    pub resumed_from: Option<PathBuf>,
    /// There with `16-mixed`.
    pub grad_scaler: Option<GradScaler>,
    /// Base of all shuffling.
    pub seed: u64,
    /// Calls of fit so far.
    pub fits: u64,
}

/// One call of fit, validate, test or predict.
pub(crate) struct Session<'a, M: LightningModule> {
    pub plan: &'a TrainPlan,
    pub run: &'a mut Run,
    pub module: &'a mut M,
    pub data: &'a mut dyn DataHooks<M::Batch>,
    /// Empty outside fit.
    pub optimizers: Vec<Box<dyn Optimizer>>,
    /// Empty outside fit.
    pub schedulers: Vec<ActiveLrScheduler>,
    /// Batches per optimizer step, which a callback may change between epochs.
    pub accumulate_grad_batches: u64,
    /// Parameters that a manual step has switched, with what they required before.
    pub toggled: Vec<(Parameter, bool)>,
    /// Whose steps those with manual optimization have captured.
    pub captured_optimizers: CapturedOptimizers,
    /// The scale of the losses is in gradients: a loss was multiplied by it, or a checkpoint held such gradients.
    pub has_scaled: bool,
    /// When the last validation ended, or training began.
    pub last_validation: Instant,
    /// There with `detect_anomaly`.
    pub anomaly: Option<AnomalyWatch>,
    pub signals: Arc<Signals>,
    pub stage: Stage,
    pub is_sanity_check: bool,
    /// The hooks at the end of an epoch have begun, and schedules and metrics have not had their turn.
    pub is_ending_epoch: bool,
    /// Training has begun, so that there is something that a failure could lose.
    pub has_begun: bool,
    /// There once training has been cut short: what checkpoints hold from then on.
    pub frozen: Option<Frozen>,
    /// There when the fit is over.
    pub after_fit: Option<AfterFit>,
    /// There while a training batch has not come to its optimizer step, if that may have to be undone.
    pub undo: Option<Undo>,
    pub graphs: StepGraphs,
}

impl<M: LightningModule> Session<'_, M> {
    /// The hooks from `configure_callbacks` to `configure_model`; then the module goes to its device.
    pub(crate) fn setup(&mut self) -> Result<()> {
        let stage = self.stage;
        set_run_lists(self.plan.device, self.plan.op_lists.as_ref(), self.plan.lists_are_default)?;
        log_casts(self.plan.logs_casts);
        let callbacks = module_hook!(self, configure_callbacks)?;
        self.add_callbacks(callbacks);
        let fail = |hook| move |source| hook_error(hook, &Progress::default(), source);
        if self.run.world().local_rank == 0 {
            let action = self.profile_data("prepare_data")?;
            guarded(|| self.data.prepare_data()).map_err(fail("prepare_data of the data module"))?;
            drop(action);
            module_hook!(self, prepare_data)?;
        }
        self.run.world().barrier()?; // what it has fetched is there
        let action = self.profile_data("setup")?;
        guarded(|| self.data.setup(stage)).map_err(fail("setup of the data module"))?;
        drop(action);
        let Run { callbacks, profiling, .. } = &mut *self.run;
        for callback in callbacks {
            of_callback(profiling, callback.as_mut(), "setup", |callback| callback.setup(stage, self.module))
                .map_err(fail("setup"))?;
        }
        module_hook!(self, setup, stage)?;
        module_hook!(self, configure_model)?;
        self.run.metrics.set_metrics(self.module.named_metrics());
        self.module.to_device(self.plan.device)?;
        if let Some(dtype) = self.plan.precision.true_dtype() {
            self.module.to_dtype(dtype)?;
        }
        self.run.kept.take_first(self.module, self.plan.device)?;
        self.run.strategy.setup(self.module)
    }

    /// The `teardown` hooks, and the end of the loggers.
    pub(crate) fn teardown(&mut self) -> Result<()> {
        let stage = self.stage;
        let fail = |hook| move |source| hook_error(hook, &Progress::default(), source);
        let action = self.profile_data("teardown")?;
        guarded(|| self.data.teardown(stage)).map_err(fail("teardown of the data module"))?;
        drop(action);
        let Run { callbacks, profiling, .. } = &mut *self.run;
        for callback in callbacks {
            let hook = |callback: &mut dyn Callback| callback.teardown(stage, self.module);
            of_callback(profiling, callback.as_mut(), "teardown", hook).map_err(fail("teardown"))?;
        }
        module_hook!(self, teardown, stage)?;
        self.run.loggers.iter_mut().try_for_each(|logger| logger.finalize(true))?;
        self.run.world().barrier() // what rank 0 has written is there
    }

    /// Adds the module's callbacks in place of those of the same type, and puts all into the order in which they run.
    fn add_callbacks(&mut self, callbacks: Vec<Box<dyn Callback>>) {
        let Run { callbacks: own, replaced, .. } = &mut *self.run;
        let is_replaced = |old: &dyn Callback| callbacks.iter().any(|new| new.type_name() == old.type_name());
        let gone = own.iter().filter(|old| is_replaced(old.as_ref()));
        let saved = gone.filter_map(|old| old.checkpoint_paths());
        let saved: Vec<_> = saved.filter(|paths| paths.best.is_some() || paths.last.is_some()).collect();
        if !saved.is_empty() {
            *replaced = saved;
        }
        own.retain(|old| !is_replaced(old.as_ref()));
        own.extend(callbacks);
        own.sort_by_key(|callback| (callback.runs_after_module(), callback.saves_checkpoints()));
    }

    /// Reports a mistake made in logging.
    pub(crate) fn check_logged(&mut self) -> Result<()> {
        self.run.metrics.take_problem().map_or(Ok(()), Err)
    }

    /// Writes the checkpoints that hooks have asked for. Called only where a resumed run can go on: between batches,
    /// when validation and schedules have had their turn.
    ///
    /// # Collective
    /// If a full checkpoint has been asked for.
    pub(crate) fn write_checkpoints(&mut self) -> Result<()> {
        if self.run.requests.checkpoints.is_empty() {
            return Ok(());
        }
        let requests = std::mem::take(&mut self.run.requests.checkpoints);
        let is_full = |request: &CheckpointRequest| !request.weights_only && request.link_to.is_none();
        let mut ranks =
            if requests.iter().any(is_full) { checkpointing::gather_ranks(self)? } else { Vec::new() };
        if !self.run.world().is_global_zero() {
            return Ok(()); // rank 0 writes
        }
        requests.iter().try_for_each(|request| checkpointing::write(self, request, &mut ranks))
    }

    /// Keeps the run as it is now for the checkpoints to come, if there may be some: what follows is done because the run
    /// ends here, and would be done again, or at another time, by one that goes on.
    pub(crate) fn freeze(&mut self) -> Result<()> {
        let mut callbacks = self.run.callbacks.iter();
        let saves = callbacks.any(|callback| callback.saves_checkpoints() || callback.saves_on_exception());
        let is_asked = !self.run.requests.checkpoints.is_empty() || self.plan.save_on_signal;
        if self.frozen.is_none() && (saves || is_asked) {
            self.frozen = Some(checkpointing::freeze(self)?);
        }
        Ok(())
    }

    /// The next batch of a loader; `action` is what the profiler calls that.
    pub(crate) fn next_batch(
        &self,
        batches: &mut BatchIter<M::Batch>,
        action: &str,
    ) -> Result<Option<M::Batch>> {
        if batches.size_hint().1 == Some(0) {
            return Ok(None); // fetches nothing
        }
        let _action = self.profile(action)?;
        batches.next().transpose()
    }

    /// Begins a hook of the data module for the profiler.
    pub(crate) fn profile_data(&self, hook: &str) -> Result<Action> {
        self.run.profiling.of_data(self.data.type_name(), hook)
    }

    /// Moves a batch to the device, in the dtype of the weights if that is not float32, with the hooks for it.
    pub(crate) fn take(&mut self, batch: M::Batch, dataloader_idx: usize) -> Result<M::Batch> {
        let _action = self.profile_strategy("batch_to_device")?;
        let (data, module, profiling) = (&mut *self.data, &mut *self.module, &self.run.profiling);
        let (data_name, module_name) =
            if profiling.is_on() { (data.type_name(), Module::type_name(module)) } else { ("", "") };
        let of_data = |hook| profiling.of_data(data_name, hook);
        let of_module = |hook: &str| profiling.start(|| format!("[LightningModule]{module_name}.{hook}"));
        let (device, true_dtype) = (self.plan.device, self.plan.precision.true_dtype());
        let mut hook = "on_before_batch_transfer";
        guarded(|| {
            let batch = of_data(hook)?.around(|| data.on_before_batch_transfer(batch, dataloader_idx))?;
            let batch = of_module(hook)?.around(|| module.on_before_batch_transfer(batch, dataloader_idx))?;
            hook = "transfer_batch_to_device";
            let batch =
                of_data(hook)?.around(|| data.transfer_batch_to_device(batch, device, dataloader_idx))?;
            let batch =
                of_module(hook)?.around(|| module.transfer_batch_to_device(batch, device, dataloader_idx))?;
            let batch = match true_dtype {
                Some(dtype) => batch.to_dtype(dtype)?,
                None => batch,
            };
            hook = "on_after_batch_transfer";
            let batch = of_data(hook)?.around(|| data.on_after_batch_transfer(batch, dataloader_idx))?;
            of_module(hook)?.around(|| module.on_after_batch_transfer(batch, dataloader_idx))
        })
        .map_err(|source| hook_error(hook, &self.run.progress, source))
    }

    /// Runs one of the user's steps.
    pub(crate) fn step<T>(
        &mut self,
        point: HookPoint,
        batch: BatchFacts,
        step: impl FnOnce(&M, &mut StepContext) -> anyhow::Result<T>,
    ) -> Result<T> {
        let scope = point.scope(&batch);
        let plan = self.plan;
        let _action = self.profile_strategy(point.name)?;
        let is_training = point.name == "training_step";
        let is_manual = is_training && !self.module.automatic_optimization();
        if is_manual {
            self.prepare_replays()?;
        }
        let mut graphs = self.graphs.modules.take();
        let (parts, state, module) = self.parts();
        state.metrics.enter(scope);
        let (module, profiling) = (&*module, parts.profiling);
        let mut manual = Manual { parts, module, batch };
        let mut ctx = StepContext {
            metrics: state.metrics,
            progress: state.progress,
            profiling,
            batch_idx: batch.batch_idx,
            dataloader_idx: batch.dataloader_idx,
            manual: is_manual.then_some(&mut manual as &mut dyn ManualOptimization),
            graphs: graphs.as_mut().map(|graphs| (graphs, is_training)),
        };
        let region = plan.precision.autocast_dtype().map(|dtype| autocast(plan.device, dtype)).transpose()?;
        let output = guarded(|| step(module, &mut ctx));
        drop(region);
        if is_manual {
            self.run.progress.global_step += graph::take_replayed_steps();
            graph::forbid_replayed_steps(None);
            self.adapt_loss_scale(); // after the steps of all optimizers, whose losses had the same scale
        }
        self.graphs.modules = graphs;
        if is_manual && output.is_ok() {
            self.check_made_in_captures()?;
        }
        let output = output.map_err(|source| hook_error(point.name, &self.run.progress, source))?;
        self.check_logged()?;
        Ok(output)
    }

    /// Before a step with manual optimization, which may replay steps of optimizers: they read the learning rates in force.
    fn prepare_replays(&mut self) -> Result<()> {
        graph::take_replayed_steps(); // of others than this run
        graph::forbid_replayed_steps(self.captured_optimizers.refresh(&mut self.optimizers)?);
        Ok(())
    }

    /// Refuses a capture by hand in which optimizers or the module have made what they keep from step to step.
    fn check_made_in_captures(&self) -> Result<()> {
        let made = MadeInCapture::take();
        if made.is_empty() {
            return Ok(());
        }
        for optimizer in &self.optimizers {
            for (name, tensor) in optimizer.state_dict().tensors {
                made.check(&tensor, || format!("`{name}` of optimizer {}", optimizer.name()))?;
            }
        }
        for (fqn, parameter) in self.module.named_parameters() {
            made.check(parameter.tensor(), || format!("parameter `{fqn}`"))?;
        }
        for (fqn, buffer) in self.module.named_buffers() {
            made.check(buffer.tensor(), || format!("buffer `{fqn}`"))?;
        }
        Ok(())
    }

    /// After optimizer steps with `16-mixed`.
    pub(crate) fn adapt_loss_scale(&mut self) {
        self.run.grad_scaler.iter_mut().for_each(GradScaler::adapt);
    }

    /// Gives metrics to all loggers, with the epoch as a column. One that is called `step` takes the place of the step.
    pub(crate) fn log(&mut self, mut metrics: Vec<(String, f64)>, mut step: u64) -> Result<()> {
        if let Some(index) = metrics.iter().position(|(name, _)| name == "step") {
            step = metrics.remove(index).1 as u64;
        }
        if metrics.is_empty() || self.is_sanity_check {
            return Ok(());
        }
        metrics.push(("epoch".to_owned(), self.run.progress.current_epoch as f64));
        self.run.loggers.iter_mut().try_for_each(|logger| logger.log_metrics(&metrics, step))
    }

    /// An error if a signal asked the run to end, after the checkpoint for it if the run is to save one.
    pub(crate) fn check_signals(&mut self) -> Result<()> {
        let Some(signal) = self.agreed_signal() else { return Ok(()) };
        let saves = self.plan.save_on_signal && self.stage == Stage::Fit && !self.plan.fast_dev_run;
        if saves && !self.is_sanity_check {
            let saved = self.run.callbacks.iter().find_map(|callback| callback.checkpoint_paths()?.folder);
            let folder = saved.unwrap_or_else(|| self.run.facts.log_dir.join("checkpoints"));
            let path = folder.join("on_signal.ckpt");
            tracing::info!("{signal}: saving {}", path.display());
            let request =
                CheckpointRequest { path, weights_only: false, link_to: None, then_remove: Vec::new() };
            self.run.requests.checkpoints = vec![request]; // others wait for a better moment, which does not come
            self.write_checkpoints()?;
        }
        Err(Error::Interrupted { signal, global_step: self.run.progress.global_step })
    }

    /// Ends the call: tells all of a failure, and lets the profiler report.
    pub(crate) fn conclude<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.on_exception(error);
        }
        let is_resumable = self.stage == Stage::Fit && (self.has_begun || result.is_ok());
        if let Err(second) = guarded(|| Ok(self.keep_for_checkpoints(is_resumable)?)) {
            tracing::warn!("save_checkpoint will have nothing to save of this fit: {second:#}");
        }
        if result.is_err() {
            self.run.metrics.abandon();
        }
        let described = self.run.profiling.describe();
        match (result, described) {
            (Err(error), Err(second)) => {
                tracing::warn!("the profiler could not report after the failure: {second}");
                Err(error)
            }
            (result, described) => described.and(result),
        }
    }

    /// Keeps what `Trainer::save_checkpoint` needs of a fit, unless it is part of a search.
    fn keep_for_checkpoints(&mut self, is_resumable: bool) -> Result<()> {
        if is_resumable && !self.plan.drops_schedulers {
            self.after_fit = Some(checkpointing::keep(self)?);
        }
        Ok(())
    }

    /// Tells callbacks, the data module and loggers that the run failed.
    pub(crate) fn on_exception(&mut self, error: &Error) {
        hold_back(error);
        self.run.requests.checkpoints.clear();
        self.run.requests.rows.clear();
        // a checkpoint of now goes on with the end of the epoch
        self.run.progress.epoch_ended &= !self.is_ending_epoch;
        let (mut parts, state, _) = self.parts();
        let profiling = parts.profiling;
        let (mut ctx, callbacks) = parts.context(state, &BatchFacts::default());
        for callback in callbacks {
            let told = of_callback(profiling, callback.as_mut(), "on_exception", |callback| {
                callback.on_exception(&mut ctx, error);
                Ok(())
            });
            if let Err(second) = told {
                tracing::warn!("on_exception failed, too: {second:#}");
            }
        }
        self.data.on_exception(error);
        let requests = std::mem::take(&mut self.run.requests.checkpoints);
        if let Err(second) = self.undo() {
            tracing::warn!("the batch that failed could not be undone: {second}");
        }
        for request in requests.into_iter().filter(|_| global_rank() == 0) {
            // the other ranks may be gone, and with them what they have to themselves
            if let Err(second) = checkpointing::write(self, &request, &mut Vec::new()) {
                tracing::warn!("the checkpoint after the failure could not be written: {second}");
            }
        }
        if let Err(second) = self.run.checkpoint_io.teardown() {
            tracing::warn!("a checkpoint from before the failure could not be written: {second}");
        }
        for logger in &mut self.run.loggers {
            if let Err(second) = logger.finalize(false) {
                tracing::warn!("a logger could not finish after the failure: {second}");
            }
        }
    }
}
