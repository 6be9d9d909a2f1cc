//! How hooks are called: of the callbacks, of the module, of the callbacks that look at what was logged; with an error
//! that names the hook.

use crate::accelerator::Accelerator;
use crate::callback::Callback;
use crate::data::{Batch, Stage};
use crate::device::Device;
use crate::distributed::global_rank;
use crate::error::{Error, Result};
use crate::ffi::AnomalyWatch;
use crate::module::{
    Action, AnyBatch, BatchFacts, Hook, HookContext, HookFacts, LightningModule, LogScope, Profiling,
    Progress, Requests, RunFacts, StepHook, StepOutput, StepState,
};
use crate::nn::Parameter;
use crate::optim::{ActiveLrScheduler, Optimizer};
use crate::precision::GradScaler;
use crate::profiler::actions;
use crate::strategy::{Strategy, Votes};
use crate::trainer::session::captured_optimizers::CapturedOptimizers;
use crate::trainer::session::guard::guarded;
use crate::trainer::session::session::Session;

/// The error of a hook, with where the run stands. One that comes from a hook within a step keeps its own name.
pub(crate) fn hook_error(hook: &'static str, progress: &Progress, source: anyhow::Error) -> Error {
    let source = match source.downcast_ref() {
        Some(Error::Hook { .. }) => match source.downcast::<Error>() {
            Ok(error) => return error,
            Err(source) => source,
        },
        _ => source,
    };
    let (epoch, global_step) = (progress.current_epoch, progress.global_step);
    Error::Hook { hook, rank: global_rank(), epoch, global_step, source }
}

/// Calls one callback's hook; an error says whose it is.
pub(crate) fn of_callback<T>(
    profiling: &Profiling,
    callback: &mut dyn Callback,
    name: &str,
    hook: impl FnOnce(&mut dyn Callback) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let _action = profiling.start(|| actions::of_callback(&callback.state_key(), name))?;
    guarded(|| hook(&mut *callback)).map_err(|source| source.context(format!("in {}", callback.state_key())))
}

/// The parts of a session that hooks work on, apart from metrics, position and module, which a step holds while it runs.
pub(crate) struct Parts<'a> {
    pub callbacks: &'a mut [Box<dyn Callback>],
    pub run_facts: &'a RunFacts,
    pub accelerator: &'a dyn Accelerator,
    pub profiling: &'a Profiling,
    pub requests: &'a mut Requests,
    pub optimizers: &'a mut [Box<dyn Optimizer>],
    pub schedulers: &'a mut Vec<ActiveLrScheduler>,
    pub grad_scaler: &'a mut Option<GradScaler>,
    pub toggled: &'a mut Vec<(Parameter, bool)>,
    pub captured_optimizers: &'a mut CapturedOptimizers,
    pub has_scaled: &'a mut bool,
    pub strategy: &'a mut dyn Strategy,
    pub agreed: &'a mut Votes,
    /// There with `detect_anomaly`.
    pub anomaly: Option<&'a AnomalyWatch>,
    /// The signal that this rank has received.
    pub signal: Option<&'static str>,
    pub device: Device,
    pub is_sanity_check: bool,
    pub is_training: bool,
    pub has_begun: bool,
}

impl Parts<'_> {
    /// What a hook is given, and the callbacks.
    pub(crate) fn context<'c>(
        &'c mut self,
        state: StepState<'c>,
        batch: &BatchFacts<'c>,
    ) -> (HookContext<'c>, &'c mut [Box<dyn Callback>]) {
        let ctx = HookContext {
            progress: state.progress,
            facts: self.run_facts,
            accelerator: self.accelerator,
            device: self.device,
            metrics: state.metrics,
            profiling: self.profiling,
            requests: self.requests,
            optimizers: self.optimizers,
            schedulers: self.schedulers,
            batch: None,
            of_batch: *batch,
            no_output: StepOutput::default(),
            is_sanity_check: self.is_sanity_check,
            is_training: self.is_training,
            has_begun: self.has_begun,
        };
        (ctx, self.callbacks)
    }

    /// Calls a hook that a step may call while it runs, so that it sees the module only to read.
    pub(crate) fn call_in_step<M: LightningModule>(
        &mut self,
        state: StepState<'_>,
        module: &M,
        hook: StepHook,
        batch: &BatchFacts<'_>,
    ) -> Result<()> {
        let outer = state.metrics.enter(scope(hook.facts(), batch));
        let profiling = self.profiling;
        let (mut ctx, callbacks) = self.context(state, batch);
        let mut call = || -> anyhow::Result<()> {
            for is_late in [false, true] {
                for callback in callbacks.iter_mut().filter(|c| c.runs_after_module() == is_late) {
                    of_callback(profiling, callback.as_mut(), hook.name(), |callback| {
                        callback.on_step_hook(hook, &mut ctx, module)
                    })?;
                }
                if !is_late {
                    let _action = profiling.of_module(module, hook.name())?;
                    guarded(|| hook.call_module(module, &mut ctx))?;
                }
            }
            Ok(())
        };
        let result = call().map_err(|source| (source, ctx.progress.clone()));
        let problem = ctx.metrics.take_problem();
        ctx.metrics.enter(outer);
        result.map_err(|(source, progress)| hook_error(hook.name(), &progress, source))?;
        problem.map_or(Ok(()), Err)
    }

    /// Calls a method of the module that does a part of the step, such as `backward`.
    pub(crate) fn module_call<M: LightningModule>(
        &mut self,
        state: StepState<'_>,
        module: &M,
        name: &'static str,
        batch: &BatchFacts<'_>,
        call: impl FnOnce(&M, &mut HookContext) -> anyhow::Result<()>,
    ) -> Result<()> {
        let outer = state.metrics.enter(scope(HookFacts::of_training_step(name), batch));
        let _action = self.profiling.of_module(module, name)?;
        let (mut ctx, _) = self.context(state, batch);
        let result =
            guarded(|| call(module, &mut ctx)).map_err(|source| hook_error(name, ctx.progress, source));
        let problem = ctx.metrics.take_problem();
        ctx.metrics.enter(outer);
        result?;
        problem.map_or(Ok(()), Err)
    }
}

/// What logging in a hook or step means.
pub(crate) fn scope(of: HookFacts, batch: &BatchFacts<'_>) -> LogScope {
    let (batch_size, dataloader_idx) = (batch.batch_size, batch.metric_suffix);
    LogScope { hook: of.name, phase: of.phase, level: of.level, batch_size, dataloader_idx }
}

impl<M: LightningModule> Session<'_, M> {
    /// The session in parts that can be changed independently.
    pub(crate) fn parts(&mut self) -> (Parts<'_>, StepState<'_>, &mut M) {
        let run = &mut *self.run;
        let parts = Parts {
            callbacks: &mut run.callbacks,
            run_facts: &run.facts,
            accelerator: run.accelerator.as_ref(),
            profiling: &run.profiling,
            requests: &mut run.requests,
            optimizers: &mut self.optimizers,
            schedulers: &mut self.schedulers,
            grad_scaler: &mut run.grad_scaler,
            toggled: &mut self.toggled,
            captured_optimizers: &mut self.captured_optimizers,
            has_scaled: &mut self.has_scaled,
            strategy: run.strategy.as_mut(),
            agreed: &mut run.agreed,
            anomaly: self.anomaly.as_ref(),
            signal: self.signals.received(),
            device: self.plan.device,
            is_sanity_check: self.is_sanity_check,
            is_training: self.stage == Stage::Fit,
            has_begun: self.has_begun,
        };
        (parts, StepState { metrics: &mut run.metrics, progress: &mut run.progress }, self.module)
    }

    /// Calls a hook of the callbacks, then of the module, then of the callbacks that look at what was logged.
    pub(crate) fn call(&mut self, hook: Hook, batch: BatchFacts) -> Result<()> {
        self.call_on(hook, batch, None)
    }

    /// The same of a hook before a step, which may change the batch.
    pub(crate) fn call_on_start(
        &mut self,
        hook: Hook,
        facts: &mut BatchFacts,
        batch: &mut M::Batch,
    ) -> Result<()> {
        self.call_on(hook, *facts, Some(batch))?;
        if std::mem::take(&mut self.run.requests.changed_batch) {
            facts.batch_size = batch.batch_size();
        }
        Ok(())
    }

    /// The same of a hook after a step.
    pub(crate) fn call_on_end(
        &mut self,
        hook: Hook,
        facts: BatchFacts,
        batch: &mut M::Batch,
        outputs: &StepOutput,
    ) -> Result<()> {
        self.call_on(hook, BatchFacts { output: Some(outputs), ..facts }, Some(batch))
    }

    fn call_on(
        &mut self,
        hook: Hook,
        facts: BatchFacts,
        batch: Option<&mut (dyn AnyBatch + 'static)>,
    ) -> Result<()> {
        let (mut parts, state, module) = self.parts();
        state.metrics.enter(scope(hook.facts(), &facts));
        let profiling = parts.profiling;
        let (mut ctx, callbacks) = parts.context(state, &facts);
        ctx.batch = batch;
        for is_late in [false, true] {
            for callback in callbacks.iter_mut().filter(|c| c.runs_after_module() == is_late) {
                of_callback(profiling, callback.as_mut(), hook.name(), |callback| {
                    callback.on_hook(hook, &mut ctx, module)
                })
                .map_err(|source| hook_error(hook.name(), ctx.progress, source))?;
            }
            if !is_late {
                let _action = profiling.of_module(module, hook.name())?;
                guarded(|| hook.call_module(module, &mut ctx))
                    .map_err(|source| hook_error(hook.name(), ctx.progress, source))?;
                if hook == Hook::OnTrainEpochEnd {
                    ctx.metrics.publish_train_epoch()?; // what the epoch's end logged may be monitored
                }
            }
        }
        self.check_logged()?;
        if self.run.requests.rows.is_empty() {
            return Ok(());
        }
        let rows = std::mem::take(&mut self.run.requests.rows);
        rows.into_iter().try_for_each(|(metrics, step)| self.log(metrics, step))
    }

    /// Calls a hook around backward or the optimizer.
    pub(crate) fn call_in_step(&mut self, hook: StepHook, batch: BatchFacts) -> Result<()> {
        let (mut parts, state, module) = self.parts();
        parts.call_in_step(state, &*module, hook, &batch)
    }

    /// Calls a method that the module has and callbacks have not: `module_method("setup", |module| module.setup(stage))`.
    pub(crate) fn module_method<T>(
        &mut self,
        name: &'static str,
        method: impl FnOnce(&mut M) -> anyhow::Result<T>,
    ) -> Result<T> {
        let _action = self.profile_hook(name)?;
        guarded(|| method(self.module)).map_err(|source| self.hook_error(name, source))
    }

    /// Begins an action for the profiler.
    pub(crate) fn profile(&self, action: &str) -> Result<Action> {
        self.run.profiling.start(|| action.to_owned())
    }

    /// Begins a hook of the module for the profiler.
    pub(crate) fn profile_hook(&self, hook: &str) -> Result<Action> {
        self.run.profiling.of_module(self.module, hook)
    }

    /// Begins what the strategy does for the profiler.
    pub(crate) fn profile_strategy(&self, method: &str) -> Result<Action> {
        self.run.profiling.of_strategy(self.run.strategy.name(), method)
    }

    /// The error of a hook of this session.
    pub(crate) fn hook_error(&self, hook: &'static str, source: anyhow::Error) -> Error {
        hook_error(hook, &self.run.progress, source)
    }
}
