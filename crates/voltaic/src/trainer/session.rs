//! What the loops of fit and of evaluation share: calling hooks, logging, writing checkpoints.

use std::sync::Arc;

use tch::Tensor;

use super::checkpointing;
use super::graphed::StepGraphs;
use super::guard::guarded;
use super::plan::TrainPlan;
use super::schedule::ActiveScheduler;
use super::signals::Signals;
use crate::accelerator::Accelerator;
use crate::callback::Callback;
use crate::data::{Batch, Stage};
use crate::error::{Error, Result};
use crate::logger::Logger;
use crate::module::{
    HookContext, Level, LightningModule, MetricStore, Phase, Progress, Requests, RunFacts, Scope, StepContext,
};
use crate::nn::Module;
use crate::optim::Optimizer;
use crate::precision::{GradScaler, autocast};

/// Everything of a run that is not the model: outlives single calls of fit, validate, test and predict.
pub(super) struct Run {
    pub accelerator: Box<dyn Accelerator>,
    pub callbacks: Vec<Box<dyn Callback>>,
    pub loggers: Vec<Box<dyn Logger>>,
    pub progress: Progress,
    pub metrics: MetricStore,
    pub requests: Requests,
    pub facts: RunFacts,
    /// There with `16-mixed`.
    pub grad_scaler: Option<GradScaler>,
    /// Base of all shuffling.
    pub seed: u64,
}

/// One call of fit, validate, test or predict.
pub(super) struct Session<'a, M: LightningModule> {
    pub plan: &'a TrainPlan,
    pub run: &'a mut Run,
    pub module: &'a mut M,
    /// Empty outside fit.
    pub optimizers: Vec<Box<dyn Optimizer>>,
    /// Empty outside fit.
    pub schedulers: Vec<ActiveScheduler>,
    pub signals: Arc<Signals>,
    pub stage: Stage,
    pub is_sanity_check: bool,
    pub graphs: StepGraphs,
}

/// A hook by name, with what logging in it means.
#[derive(Clone, Copy)]
pub(super) struct HookPoint {
    pub name: &'static str,
    pub phase: Phase,
    pub level: Level,
}

/// Facts of the batch that a batch hook is about.
#[derive(Clone, Copy, Default)]
pub(super) struct BatchFacts<'a> {
    pub batch_idx: usize,
    pub dataloader_idx: usize,
    pub batch_size: Option<usize>,
    pub loss: Option<&'a Tensor>,
    pub will_validate: bool,
    /// Step under which the loggers take rows of this batch, if they do.
    pub log_step: Option<u64>,
    /// Set if there are several loaders, so that metrics get a suffix.
    pub metric_suffix: Option<usize>,
}

type CallbackHook = fn(&mut dyn Callback, &mut HookContext, &mut dyn Module) -> anyhow::Result<()>;
type ModuleHook<M> = fn(&mut M, &mut HookContext) -> anyhow::Result<()>;

/// Calls a hook of all callbacks, then of the module: `call_hook!(session, on_train_start, Train, Epoch, batch)`.
macro_rules! call_hook {
    ($session:expr, $hook:ident, $phase:ident, $level:ident) => {
        call_hook!($session, $hook, $phase, $level, $crate::trainer::session::BatchFacts::default())
    };
    ($session:expr, $hook:ident, $phase:ident, $level:ident, $batch:expr) => {
        $session.hook(
            $crate::trainer::session::HookPoint {
                name: stringify!($hook),
                phase: $crate::module::Phase::$phase,
                level: $crate::module::Level::$level,
            },
            $batch,
            |callback, ctx, module| callback.$hook(ctx, module),
            |module, ctx| module.$hook(ctx),
        )
    };
}
pub(super) use call_hook;

impl<M: LightningModule> Session<'_, M> {
    /// Calls a hook of the callbacks, then of the module, then of the callbacks that save checkpoints.
    pub(super) fn hook(
        &mut self,
        point: HookPoint,
        batch: BatchFacts,
        of_callback: CallbackHook,
        of_module: ModuleHook<M>,
    ) -> Result<()> {
        self.enter(point, batch);
        for saves_checkpoints in [false, true] {
            let run = &mut *self.run;
            let mut ctx = HookContext {
                progress: &run.progress,
                facts: &run.facts,
                accelerator: run.accelerator.as_ref(),
                device: self.plan.device,
                metrics: &mut run.metrics,
                requests: &mut run.requests,
                optimizers: &self.optimizers,
                loss: batch.loss,
                batch_idx: batch.batch_idx,
                dataloader_idx: batch.dataloader_idx,
                is_sanity_check: self.is_sanity_check,
                is_training: self.stage == Stage::Fit,
                will_validate: batch.will_validate,
                log_step: batch.log_step,
            };
            let global_step = run.progress.global_step;
            for callback in run.callbacks.iter_mut().filter(|c| c.saves_checkpoints() == saves_checkpoints) {
                guarded(|| of_callback(callback.as_mut(), &mut ctx, self.module))
                    .map_err(|source| hook_error(point.name, global_step, source))?;
            }
            if !saves_checkpoints {
                guarded(|| of_module(self.module, &mut ctx))
                    .map_err(|source| hook_error(point.name, global_step, source))?;
                if point.name == "on_train_epoch_end" {
                    run.metrics.publish_train_epoch(); // what the epoch's end logged may be monitored
                }
            }
        }
        self.check_logged()?;
        let rows = std::mem::take(&mut self.run.requests.rows);
        rows.into_iter().try_for_each(|(metrics, step)| self.log(metrics, step))
    }

    /// Tells the metric store which hook comes.
    pub(super) fn enter(&mut self, point: HookPoint, batch: BatchFacts) {
        self.run.metrics.enter(Scope {
            hook: point.name,
            phase: point.phase,
            level: if self.is_sanity_check && point.level == Level::EpochOnly {
                Level::Epoch
            } else {
                point.level
            },
            batch_size: batch.batch_size,
            dataloader_idx: batch.metric_suffix,
        });
    }

    /// Reports a mistake made in logging.
    pub(super) fn check_logged(&mut self) -> Result<()> {
        self.run.metrics.take_problem().map_or(Ok(()), |problem| Err(problem.into()))
    }

    /// Writes the checkpoints that hooks have asked for. Called only where a resumed run can go on: between batches,
    /// when validation and schedules have had their turn.
    pub(super) fn write_checkpoints(&mut self) -> Result<()> {
        let requests = std::mem::take(&mut self.run.requests.checkpoints);
        requests.iter().try_for_each(|request| checkpointing::write(self, request))
    }

    /// Moves a batch to the device, in the dtype of the weights if that is not float32.
    pub(super) fn take(&self, batch: M::Batch) -> Result<M::Batch> {
        let batch = batch.to_device(self.plan.device)?;
        match self.plan.precision.true_dtype() {
            Some(dtype) => batch.to_dtype(dtype),
            None => Ok(batch),
        }
    }

    /// Runs one of the user's steps.
    pub(super) fn step<T>(
        &mut self,
        point: HookPoint,
        batch: BatchFacts,
        step: impl FnOnce(&M, &mut StepContext) -> anyhow::Result<T>,
    ) -> Result<T> {
        self.enter(point, batch);
        let module = &*self.module;
        let mut ctx = StepContext {
            metrics: &mut self.run.metrics,
            progress: &self.run.progress,
            batch_idx: batch.batch_idx,
            dataloader_idx: batch.dataloader_idx,
        };
        let region = self
            .plan
            .precision
            .autocast_dtype()
            .map(|dtype| autocast(self.plan.device, dtype))
            .transpose()?;
        let output = guarded(|| step(module, &mut ctx))
            .map_err(|source| hook_error(point.name, self.run.progress.global_step, source))?;
        drop(region);
        self.check_logged()?;
        Ok(output)
    }

    /// Gives metrics to all loggers, with the epoch as a column.
    pub(super) fn log(&mut self, mut metrics: Vec<(String, f64)>, step: u64) -> Result<()> {
        if metrics.is_empty() || self.is_sanity_check {
            return Ok(());
        }
        metrics.push(("epoch".to_owned(), self.run.progress.current_epoch as f64));
        self.run.loggers.iter_mut().try_for_each(|logger| logger.log_metrics(&metrics, step))
    }

    /// An error if a signal asked the run to end.
    pub(super) fn check_signals(&self) -> Result<()> {
        match self.signals.received() {
            Some(signal) => Err(Error::Interrupted { signal, global_step: self.run.progress.global_step }),
            None => Ok(()),
        }
    }

    /// Tells callbacks and loggers that the run failed.
    pub(super) fn on_exception(&mut self, error: &Error) {
        let run = &mut *self.run;
        run.requests.checkpoints.clear();
        run.requests.rows.clear();
        let mut ctx = HookContext {
            progress: &run.progress,
            facts: &run.facts,
            accelerator: run.accelerator.as_ref(),
            device: self.plan.device,
            metrics: &mut run.metrics,
            requests: &mut run.requests,
            optimizers: &self.optimizers,
            loss: None,
            batch_idx: 0,
            dataloader_idx: 0,
            is_sanity_check: self.is_sanity_check,
            is_training: self.stage == Stage::Fit,
            will_validate: false,
            log_step: None,
        };
        for callback in &mut run.callbacks {
            callback.on_exception(&mut ctx, error);
        }
        for request in std::mem::take(&mut self.run.requests.checkpoints) {
            if let Err(second) = checkpointing::write(self, &request) {
                tracing::warn!("the checkpoint after the failure could not be written: {second}");
            }
        }
        for logger in &mut self.run.loggers {
            if let Err(second) = logger.finalize(false) {
                tracing::warn!("a logger could not finish after the failure: {second}");
            }
        }
    }
}

pub(super) fn hook_error(hook: &'static str, global_step: u64, source: anyhow::Error) -> Error {
    Error::Hook { hook, rank: 0, global_step, source }
}
