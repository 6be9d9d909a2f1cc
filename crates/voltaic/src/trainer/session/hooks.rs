//! Calls of the user's code: hooks of the callbacks, of the module, and of the callbacks that look at what was logged; what they log
//! goes to the loggers.
//!
//! tch's operators panic when shapes do not fit. Inside a guarded call such a panic is not printed; its message and place become the
//! error, which names the hook.

use std::backtrace::Backtrace;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use tch::TchError;

use crate::callback::Callback;
use crate::data::Batch;
use crate::distributed::{collective_scope, global_rank};
use crate::error::{Error, Result};
use crate::ffi::panic_text;
use crate::module::{
    Action, AnyBatch, BatchFacts, Hook, HookContext, HookFacts, LightningModule, LogScope, Profiling,
    Progress, StepHook, StepOutput,
};
use crate::nn::{ModuleExt, UnshardWatch, with_fqn};
use crate::profiler::actions;
use crate::trainer::session::engine::Engine;
use crate::trainer::session::place::{Place, torch_message};
use crate::trainer::session::session::{Run, Session};

/// The error of a hook, with where the run stands. One that comes from a hook within a step keeps its own name.
pub(crate) fn hook_error(hook: &'static str, progress: &Progress, source: anyhow::Error) -> Error {
    let source = match source.downcast_ref() {
        Some(Error::Hook { .. }) => match source.downcast::<Error>() {
            Ok(error) => return error,
            Err(source) => source,
        },
        _ => without_stack(source),
    };
    let (epoch, global_step) = (progress.current_epoch, progress.global_step);
    Error::Hook { hook, rank: global_rank(), epoch, global_step, source }
}

/// tch's error as ours, which has libtorch's text without its C++ stack; what was said about it stays.
fn without_stack(source: anyhow::Error) -> anyhow::Error {
    let Some(TchError::Torch(text)) = source.root_cause().downcast_ref() else { return source };
    let contexts: Vec<String> = source.chain().map(ToString::to_string).collect();
    let own = anyhow::Error::from(Error::from(TchError::Torch(text.clone())));
    contexts.into_iter().rev().skip(1).fold(own, |error, context| error.context(context))
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

/// What has hooks within a step, beside what its context borrows. The module can only be read.
pub(crate) struct InStep<'a, M> {
    pub callbacks: &'a mut [Box<dyn Callback>],
    pub engine: &'a mut Engine,
    pub module: &'a M,
}

impl<M: LightningModule> InStep<'_, M> {
    /// Calls a hook that a step may call while it runs.
    pub(crate) fn call(&mut self, ctx: &mut HookContext, hook: StepHook) -> Result<()> {
        let outer = ctx.log.metrics.enter(scope(hook.facts(), ctx.of_batch));
        let _named = collective_scope(hook.name());
        let profiling = &ctx.run.profiling;
        let mut call = || -> anyhow::Result<()> {
            for is_late in [false, true] {
                for callback in self.callbacks.iter_mut().filter(|c| c.runs_after_module() == is_late) {
                    of_callback(profiling, callback.as_mut(), hook.name(), |callback| {
                        callback.on_step_hook(hook, ctx, self.module)
                    })?;
                }
                if !is_late {
                    let _action = profiling.of_module(self.module, hook.name())?;
                    guarded(|| hook.call_module(self.module, ctx))?;
                }
            }
            Ok(())
        };
        let result = call();
        leave(ctx, outer, hook.name(), result)
    }

    /// [`call_method`] of the module.
    pub(crate) fn method(
        &mut self,
        ctx: &mut HookContext,
        name: &'static str,
        call: impl FnOnce(&M, &mut HookContext) -> anyhow::Result<()>,
    ) -> Result<()> {
        call_method(self.module, ctx, name, call)
    }
}

/// Calls a method of the module that does a part of the step, such as `backward`.
pub(crate) fn call_method<M: LightningModule>(
    module: &M,
    ctx: &mut HookContext,
    name: &'static str,
    call: impl FnOnce(&M, &mut HookContext) -> anyhow::Result<()>,
) -> Result<()> {
    let outer = ctx.log.metrics.enter(scope(HookFacts::of_training_step(name), ctx.of_batch));
    let _named = collective_scope(name);
    let _action = ctx.run.profiling.of_module(module, name)?;
    let result = guarded(|| call(module, ctx));
    leave(ctx, outer, name, result)
}

/// Ends a hook within a step: what is logged belongs to the step again.
fn leave(
    ctx: &mut HookContext,
    outer: LogScope,
    name: &'static str,
    result: anyhow::Result<()>,
) -> Result<()> {
    let problem = ctx.log.metrics.take_problem();
    ctx.log.metrics.enter(outer);
    result.map_err(|source| hook_error(name, &ctx.at.progress, source))?;
    problem.map_or(Ok(()), Err)
}

/// What logging in a hook or step means.
pub(crate) fn scope(of: HookFacts, batch: &BatchFacts<'_>) -> LogScope {
    let (batch_size, dataloader_idx) = (batch.batch_size, batch.metric_suffix);
    LogScope { hook: of.name, phase: of.phase, level: of.level, batch_size, dataloader_idx }
}

impl<M: LightningModule> Session<'_, M> {
    /// The context of a hook, and the callbacks and the module that have it.
    pub(crate) fn lend<'s>(
        &'s mut self,
        batch: &'s BatchFacts<'s>,
    ) -> (HookContext<'s>, &'s mut [Box<dyn Callback>], &'s mut M) {
        let Session { run, module, training, .. } = self;
        let Run { at, facts, log, requests, callbacks, .. } = &mut **run;
        training.is_in_step = false;
        let ctx = HookContext { at, run: facts, of_batch: batch, log, requests, training, batch: None };
        (ctx, callbacks, module)
    }

    /// The same for what a step calls while it runs.
    pub(crate) fn lend_in_step<'s>(
        &'s mut self,
        batch: &'s BatchFacts<'s>,
    ) -> (HookContext<'s>, InStep<'s, M>) {
        let Session { run, module, training, .. } = self;
        let Run { at, facts, log, requests, callbacks, engine, .. } = &mut **run;
        training.is_in_step = true;
        let ctx = HookContext { at, run: facts, of_batch: batch, log, requests, training, batch: None };
        (ctx, InStep { callbacks, engine, module })
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
        self.call_on(hook, BatchFacts { output: outputs, ..facts }, Some(batch))
    }

    fn call_on(
        &mut self,
        hook: Hook,
        facts: BatchFacts,
        batch: Option<&mut (dyn AnyBatch + 'static)>,
    ) -> Result<()> {
        let _named = collective_scope(hook.name());
        let (ctx, callbacks, module) = self.lend(&facts);
        let mut ctx = HookContext { batch, ..ctx };
        ctx.log.metrics.enter(scope(hook.facts(), &facts));
        let profiling = &ctx.run.profiling;
        for is_late in [false, true] {
            for callback in callbacks.iter_mut().filter(|c| c.runs_after_module() == is_late) {
                of_callback(profiling, callback.as_mut(), hook.name(), |callback| {
                    callback.on_hook(hook, &mut ctx, module)
                })
                .map_err(|source| hook_error(hook.name(), &ctx.at.progress, source))?;
            }
            if !is_late {
                let _action = profiling.of_module(module, hook.name())?;
                guarded(|| hook.call_module(module, &mut ctx))
                    .map_err(|source| hook_error(hook.name(), &ctx.at.progress, source))?;
                if hook == Hook::OnTrainEpochEnd {
                    ctx.log.metrics.publish_train_epoch()?; // what the epoch's end logged may be monitored
                }
            }
        }
        self.check_logged()?;
        if self.run.log.rows.is_empty() {
            return Ok(());
        }
        let rows = std::mem::take(&mut self.run.log.rows);
        rows.into_iter().try_for_each(|(metrics, step)| self.log_row(metrics, step))
    }

    /// Calls a hook around backward or the optimizer.
    pub(crate) fn call_in_step(&mut self, hook: StepHook, batch: BatchFacts) -> Result<()> {
        let (mut ctx, mut step) = self.lend_in_step(&batch);
        step.call(&mut ctx, hook)
    }

    /// Calls a method that the module has and callbacks have not: `module_method("setup", |module| module.setup(stage))`.
    pub(crate) fn module_method<T>(
        &mut self,
        name: &'static str,
        method: impl FnOnce(&mut M) -> anyhow::Result<T>,
    ) -> Result<T> {
        let _named = collective_scope(name);
        let _action = self.profile_hook(name)?;
        guarded(|| method(self.module)).map_err(|source| self.hook_error(name, source))
    }

    /// Begins an action for the profiler.
    pub(crate) fn profile(&self, action: &str) -> Result<Action> {
        self.run.facts.profiling.start(|| action.to_owned())
    }

    /// Begins a hook of the module for the profiler.
    pub(crate) fn profile_hook(&self, hook: &str) -> Result<Action> {
        self.run.facts.profiling.of_module(self.module, hook)
    }

    /// Begins what the strategy does for the profiler.
    pub(crate) fn profile_strategy(&self, method: &str) -> Result<Action> {
        self.run.facts.profiling.of_strategy(self.run.engine.strategy.name(), method)
    }

    /// The error of a hook of this session.
    pub(crate) fn hook_error(&self, hook: &'static str, source: anyhow::Error) -> Error {
        hook_error(hook, &self.run.at.progress, with_fqn(self.module.as_dyn(), source))
    }
}

impl<M: LightningModule> Session<'_, M> {
    /// Gives metrics to all loggers, with the epoch as a column unless one is called `epoch`. One that is called `step` takes
    /// the place of the step.
    pub(crate) fn log(&mut self, metrics: Vec<(String, f64)>, step: u64) -> Result<()> {
        self.log_with(metrics, step, true)
    }

    /// Gives a row of a callback to all loggers: it has the columns that the callback gives, and no epoch, as in Lightning.
    pub(crate) fn log_row(&mut self, metrics: Vec<(String, f64)>, step: u64) -> Result<()> {
        self.log_with(metrics, step, false)
    }

    fn log_with(&mut self, mut metrics: Vec<(String, f64)>, mut step: u64, has_epoch: bool) -> Result<()> {
        if let Some(index) = metrics.iter().position(|(name, _)| name == "step") {
            step = metrics.remove(index).1 as u64;
        }
        if metrics.is_empty() || self.run.at.is_sanity_check {
            return Ok(());
        }
        if has_epoch && !metrics.iter().any(|(name, _)| name == "epoch") {
            metrics.push(("epoch".to_owned(), self.run.at.progress.current_epoch as f64));
        }
        self.give_to_loggers(&metrics, step)
    }

    /// Gives a row to all loggers, unless one has failed in this call.
    pub(crate) fn give_to_loggers(&mut self, row: &[(String, f64)], step: u64) -> Result<()> {
        if self.run.engine.of_call.failure.is_some() {
            return Ok(()); // all ranks end with that
        }
        let given = self.run.loggers.iter_mut().try_for_each(|logger| logger.log_metrics(row, step));
        self.keep_failure(given)
    }

    /// Reports a mistake made in logging.
    pub(crate) fn check_logged(&mut self) -> Result<()> {
        self.run.log.metrics.take_problem().map_or(Ok(()), Err)
    }
}

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Chains a panic hook that keeps quiet inside guarded calls of its thread and notes what happened.
fn install_panic_hook() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                return previous(info);
            }
            let text = panic_text(info.payload());
            let location = || info.location().map(|place| format!("{}:{}", place.file(), place.line()));
            let (text, place) = match torch_message(&text) {
                // the location is in tch
                Some(message) => {
                    let place = Place::of(&Backtrace::force_capture()).map(|place| place.to_string());
                    (format!("libtorch: {message}"), place.or_else(location))
                }
                None => (text, location()),
            };
            MESSAGE.set(Some(place.map_or(text.clone(), |place| format!("{text} at {place}"))));
        }));
    });
}

/// Calls `body`; a panic becomes an error, and so does a weight that could not be unsharded.
pub(crate) fn guarded<T>(body: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let watch = UnshardWatch::begin();
    let result = without_panic(body);
    watch.end().map_or(result, |failure| Err(failure.into()))
}

/// Calls `body`; a panic becomes an error. With `RUST_BACKTRACE=1` one of libtorch's names the user's file and line.
#[inline(never)] // backtraces are searched up to here
pub(crate) fn without_panic<T>(body: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    install_panic_hook();
    let was_guarded = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    GUARDED.set(was_guarded);
    result.unwrap_or_else(|_| Err(of_panic())).map_err(with_place)
}

/// The error of the panic that was caught last.
fn of_panic() -> anyhow::Error {
    let message = MESSAGE.take().unwrap_or_else(|| "panic without a message".to_owned());
    anyhow::anyhow!("panicked: {message}")
}

/// An error of libtorch with the user's file and line, if its backtrace has them.
fn with_place(error: anyhow::Error) -> anyhow::Error {
    let is_of_torch = error.root_cause().is::<TchError>() && error.downcast_ref::<Place>().is_none();
    match is_of_torch.then(|| Place::of(error.backtrace())).flatten() {
        Some(place) => error.context(place),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_message_and_place() {
        let error = guarded(|| -> anyhow::Result<()> {
            let a = tch::Tensor::ones([2, 3], (tch::Kind::Float, tch::Device::Cpu));
            let _ = a.matmul(&a);
            Ok(())
        })
        .expect_err("shapes do not fit")
        .to_string();
        assert!(error.contains("mat1 and mat2 shapes cannot be multiplied"), "{error}");
        assert!(error.contains(".rs:") && !error.contains("Exception raised from"), "{error}");
        assert_eq!(guarded(|| Ok(3)).expect("no panic"), 3);
    }
}
