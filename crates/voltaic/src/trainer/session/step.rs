//! Runs the user's steps, and their backward pass.

use crate::distributed::collective_scope;
use crate::error::Result;
use crate::graph::{self, MadeInCapture};
use crate::module::{
    BatchFacts, HookContext, HookFacts, Level, LightningModule, ManualOptimization, Phase, StepContext,
    StepModuleGraphs, StepOutput,
};
use crate::nn::{GatherWatch, ModuleExt};
use crate::precision::{LossScale, autocast};
use crate::trainer::session::agree::votes;
use crate::trainer::session::anomaly::check_gradients;
use crate::trainer::session::guard::without_panic;
use crate::trainer::session::hooks::{InStep, call_method, scope};
use crate::trainer::session::session::Session;

pub(crate) const OPTIMIZER_STEP: HookFacts = HookFacts::of_training_step("optimizer_step");

/// A step that the user writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Training,
    /// `training_step`, for the running statistics of batch normalization alone.
    RunningStatistics,
    Validation,
    Test,
    Predict,
}

impl Step {
    pub(crate) const fn facts(self) -> HookFacts {
        let (name, phase, level) = match self {
            Self::Training => ("training_step", Phase::Train, Level::Step),
            Self::RunningStatistics => ("training_step", Phase::Eval, Level::Step),
            Self::Validation => ("validation_step", Phase::Eval, Level::Epoch),
            Self::Test => ("test_step", Phase::Eval, Level::Epoch),
            Self::Predict => ("predict_step", Phase::Eval, Level::Denied),
        };
        HookFacts { name, phase, level }
    }

    fn is_training(self) -> bool {
        matches!(self, Self::Training | Self::RunningStatistics)
    }
}

impl<M: LightningModule> Session<'_, M> {
    /// Runs one of the user's steps, such as `M::training_step`. What it gives by name is in `self.outputs` then.
    pub(crate) fn step<T>(
        &mut self,
        of: Step,
        batch: &M::Batch,
        facts: BatchFacts,
        step: impl FnOnce(&M, &M::Batch, &mut StepContext) -> anyhow::Result<T>,
    ) -> Result<T> {
        let point = of.facts();
        let scope = scope(point, &facts);
        let plan = self.plan;
        let _named = collective_scope(point.name);
        let _action = self.profile_strategy(point.name)?;
        let is_training = of.is_training();
        let is_manual = is_training && !self.module.automatic_optimization();
        if is_manual {
            self.prepare_replays()?;
        }
        let mut graphs = self.graphs.modules.take();
        let hooks = self.run.facts.module_hooks.clone();
        let mut outputs = StepOutput::default();
        let (ctx, mut in_step) = self.lend_in_step(&facts);
        ctx.log.metrics.enter(scope);
        let module = in_step.module;
        let mut ctx = StepContext {
            ctx,
            outputs: &mut outputs,
            manual: is_manual.then_some(&mut in_step as &mut dyn ManualOptimization),
            graphs: graphs.as_mut().map(|graphs| StepModuleGraphs {
                graphs,
                root: module.as_dyn(),
                is_training,
            }),
        };
        let region = plan.precision.autocast_dtype().map(|dtype| autocast(plan.device, dtype)).transpose()?;
        let watch = GatherWatch::begin();
        let output = match hooks.is_empty() {
            true => Ok(without_panic(|| step(module, batch, &mut ctx))), // two frames less in a backtrace
            false => hooks.within(module.as_dyn(), || without_panic(|| step(module, batch, &mut ctx))),
        };
        drop(region);
        if is_manual {
            self.run.at.progress.global_step += graph::take_replayed_steps();
            graph::forbid_replayed_steps(None);
            self.adapt_loss_scale()?; // after the steps of all optimizers, whose losses had the same scale
        }
        self.graphs.modules = graphs;
        let output = output?;
        if is_manual && output.is_ok() {
            self.check_made_in_captures()?;
        }
        if let Some(failure) = watch.end() {
            return Err(failure); // the step has failed of it, or gone on without a weight
        }
        let output = output.map_err(|source| self.hook_error(point.name, source))?;
        self.check_logged()?;
        if is_training {
            hooks.check_called()?;
        }
        outputs.detach()?;
        self.outputs = outputs;
        Ok(output)
    }

    /// Before a step with manual optimization, which may replay steps of optimizers: they read the learning rates in force.
    fn prepare_replays(&mut self) -> Result<()> {
        graph::take_replayed_steps(); // of others than this run
        graph::forbid_replayed_steps(
            self.run.engine.of_call.captured_optimizers.refresh(&mut self.training.optimizers)?,
        );
        Ok(())
    }

    /// Refuses a capture by hand in which optimizers or the module have made what they keep from step to step.
    fn check_made_in_captures(&self) -> Result<()> {
        let made = MadeInCapture::take();
        if made.is_empty() {
            return Ok(());
        }
        for optimizer in &self.training.optimizers {
            for (name, tensor) in optimizer.state_dict().tensors {
                made.check(&tensor, || format!("`{name}` of optimizer {}", optimizer.name()))?;
            }
        }
        for (fqn, parameter) in self.module.named_parameters() {
            made.check(parameter.leaf(), || format!("parameter `{fqn}`"))?;
        }
        for (fqn, buffer) in self.module.named_buffers() {
            made.check(buffer.tensor(), || format!("buffer `{fqn}`"))?;
        }
        Ok(())
    }

    /// After optimizer steps, done or left out.
    pub(crate) fn adapt_loss_scale(&mut self) -> Result<()> {
        self.run.engine.loss_scale.iter_mut().try_for_each(LossScale::adapt)
    }
}

impl<M: LightningModule> InStep<'_, M> {
    /// The module's backward; with `syncs` all ranks have the mean gradients and know each other's votes afterwards. With
    /// `detect_anomaly` the gradients are checked.
    pub(crate) fn run_backward(
        &mut self,
        ctx: &mut HookContext,
        loss: &tch::Tensor,
        syncs: bool,
    ) -> Result<()> {
        let _named = collective_scope("backward");
        let (engine, module) = (&mut *self.engine, self.module);
        let _action = ctx.run.profiling.of_strategy(engine.strategy.name(), "backward")?;
        let votes = votes(engine, ctx.asks);
        // modules are called in backward, too, where a segment is recomputed
        let hooks = ctx.run.module_hooks.clone();
        engine.backward(loss, syncs, votes, |loss| {
            let run = || call_method(module, ctx, "backward", |module, ctx| module.backward(loss, ctx));
            hooks.within(module.as_dyn(), run).and_then(|done| done)
        })?;
        if engine.loss_scale.as_ref().is_some_and(|scale| scale.get_scale() != 1.0) {
            return Ok(()); // which leaves out steps whose gradients are not finite
        }
        let anomaly = engine.of_call.anomaly.as_ref();
        check_gradients(anomaly, engine.strategy.as_ref(), self.module.as_dyn(), &ctx.at.progress)
    }
}
