//! How hooks are called: of the callbacks, of the module, of the callbacks that look at what was logged; with an error
//! that names the hook.

use tch::Tensor;

use crate::accelerator::Accelerator;
use crate::callback::Callback;
use crate::data::Stage;
use crate::device::Device;
use crate::distributed::global_rank;
use crate::error::{Error, Result};
use crate::ffi::AnomalyWatch;
use crate::module::{
    Action, HookContext, Level, LightningModule, LogScope, Phase, Profiling, Progress, Requests, RunFacts,
    StepState,
};
use crate::nn::{Module, Parameter};
use crate::optim::{ActiveLrScheduler, Optimizer};
use crate::precision::GradScaler;
use crate::strategy::{Strategy, Votes};
use crate::trainer::session::captured_optimizers::CapturedOptimizers;
use crate::trainer::session::guard::guarded;
use crate::trainer::session::session::Session;

/// A hook by name, with what logging in it means.
#[derive(Clone, Copy)]
pub(crate) struct HookPoint {
    pub name: &'static str,
    pub phase: Phase,
    pub level: Level,
}

/// Facts of the batch that a batch hook is about.
#[derive(Clone, Copy, Default)]
pub(crate) struct BatchFacts<'a> {
    pub batch_idx: usize,
    pub dataloader_idx: usize,
    pub batch_size: Option<usize>,
    pub batch_indices: &'a [usize],
    pub prediction: Option<&'a Tensor>,
    pub loss: Option<&'a Tensor>,
    pub will_validate: bool,
    /// Step under which the loggers take rows of this batch, if they do.
    pub log_step: Option<u64>,
    /// Set if there are several loaders, so that metrics get a suffix.
    pub metric_suffix: Option<usize>,
}

type CallbackHook = fn(&mut dyn Callback, &mut HookContext, &mut dyn Module) -> anyhow::Result<()>;
type ModuleHook<M> = fn(&mut M, &mut HookContext) -> anyhow::Result<()>;
pub(crate) type SharedCallbackHook =
    fn(&mut dyn Callback, &mut HookContext, &dyn Module) -> anyhow::Result<()>;
pub(crate) type SharedModuleHook<M> = fn(&M, &mut HookContext) -> anyhow::Result<()>;

/// A [`HookPoint`]: `hook_point!(on_train_start, Train, Epoch)`.
macro_rules! hook_point {
    ($hook:ident, $phase:ident, $level:ident) => {
        $crate::trainer::session::hooks::HookPoint {
            name: stringify!($hook),
            phase: $crate::module::Phase::$phase,
            level: $crate::module::Level::$level,
        }
    };
}
pub(crate) use hook_point;

/// Calls a hook of all callbacks and of the module: `call_hook!(session, on_train_start, Train, Epoch, batch)`.
macro_rules! call_hook {
    ($session:expr, $hook:ident, $phase:ident, $level:ident) => {
        call_hook!($session, $hook, $phase, $level, $crate::trainer::session::hooks::BatchFacts::default())
    };
    ($session:expr, $hook:ident, $phase:ident, $level:ident, $batch:expr) => {
        $session.hook(
            $crate::trainer::session::hooks::hook_point!($hook, $phase, $level),
            $batch,
            |callback, ctx, module| callback.$hook(ctx, module),
            |module, ctx| module.$hook(ctx),
        )
    };
}
pub(crate) use call_hook;

/// Calls a hook around backward or the optimizer: `call_shared_hook!(session, on_before_backward, batch)`.
macro_rules! call_shared_hook {
    ($session:expr, $hook:ident, $batch:expr) => {{
        let (mut parts, state, module) = $session.parts();
        let point = $crate::trainer::session::hooks::hook_point!($hook, Train, Step);
        parts.shared_hook(
            state,
            &*module,
            point,
            &$batch,
            (|callback, ctx, module| callback.$hook(ctx, module), |module, ctx| module.$hook(ctx)),
        )
    }};
}
pub(crate) use call_shared_hook;

/// Calls a hook that the module has and callbacks have not: `module_hook!(session, on_validation_model_eval)`.
macro_rules! module_hook {
    ($session:expr, $hook:ident $(, $argument:expr)*) => {{
        let session = &mut *$session;
        let _action = session.profile_hook(stringify!($hook))?;
        $crate::trainer::session::guard::guarded(|| session.module.$hook($($argument),*))
            .map_err(|source| session.hook_error(stringify!($hook), source))
    }};
}
pub(crate) use module_hook;

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
    let _action = profiling.start(|| format!("[Callback]{}.{name}", callback.state_key()))?;
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
            loss: batch.loss,
            batch_idx: batch.batch_idx,
            batch_size: batch.batch_size,
            batch_indices: batch.batch_indices,
            prediction: batch.prediction,
            dataloader_idx: batch.dataloader_idx,
            is_sanity_check: self.is_sanity_check,
            is_training: self.is_training,
            has_begun: self.has_begun,
            will_validate: batch.will_validate,
            log_step: batch.log_step,
        };
        (ctx, self.callbacks)
    }

    /// Calls a hook that a step may call while it runs, so that it sees the module only to read.
    pub(crate) fn shared_hook<M: LightningModule>(
        &mut self,
        state: StepState<'_>,
        module: &M,
        point: HookPoint,
        batch: &BatchFacts<'_>,
        (hook_of_callback, hook_of_module): (SharedCallbackHook, SharedModuleHook<M>),
    ) -> Result<()> {
        let outer = state.metrics.enter(point.scope(batch));
        let profiling = self.profiling;
        let (mut ctx, callbacks) = self.context(state, batch);
        let mut call = || -> anyhow::Result<()> {
            for is_late in [false, true] {
                for callback in callbacks.iter_mut().filter(|c| c.runs_after_module() == is_late) {
                    of_callback(profiling, callback.as_mut(), point.name, |callback| {
                        hook_of_callback(callback, &mut ctx, module)
                    })?;
                }
                if !is_late {
                    let _action = profiling.of_module(module, point.name)?;
                    guarded(|| hook_of_module(module, &mut ctx))?;
                }
            }
            Ok(())
        };
        let result = call().map_err(|source| (source, ctx.progress.clone()));
        let problem = ctx.metrics.take_problem();
        ctx.metrics.enter(outer);
        result.map_err(|(source, progress)| hook_error(point.name, &progress, source))?;
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
        let point = HookPoint { name, phase: Phase::Train, level: Level::Step };
        let outer = state.metrics.enter(point.scope(batch));
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

impl HookPoint {
    pub(crate) fn scope(self, batch: &BatchFacts<'_>) -> LogScope {
        let (batch_size, dataloader_idx) = (batch.batch_size, batch.metric_suffix);
        LogScope { hook: self.name, phase: self.phase, level: self.level, batch_size, dataloader_idx }
    }
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
    pub(crate) fn hook(
        &mut self,
        point: HookPoint,
        batch: BatchFacts,
        hook_of_callback: CallbackHook,
        hook_of_module: ModuleHook<M>,
    ) -> Result<()> {
        let scope = point.scope(&batch);
        let (mut parts, state, module) = self.parts();
        state.metrics.enter(scope);
        let profiling = parts.profiling;
        let (mut ctx, callbacks) = parts.context(state, &batch);
        for is_late in [false, true] {
            for callback in callbacks.iter_mut().filter(|c| c.runs_after_module() == is_late) {
                of_callback(profiling, callback.as_mut(), point.name, |callback| {
                    hook_of_callback(callback, &mut ctx, module)
                })
                .map_err(|source| hook_error(point.name, ctx.progress, source))?;
            }
            if !is_late {
                let _action = profiling.of_module(module, point.name)?;
                guarded(|| hook_of_module(module, &mut ctx))
                    .map_err(|source| hook_error(point.name, ctx.progress, source))?;
                if point.name == "on_train_epoch_end" {
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
