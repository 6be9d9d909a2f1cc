//! The user's steps: the batch on its way to the device, the step, its backward pass, and manual optimization within it.

use tch::Tensor;

use crate::checkpoint::OpenWindow;
use crate::data::{Batch, BatchIter};
use crate::distributed::collective_scope;
use crate::error::Result;
use crate::ffi::{self, RecordingPause};
use crate::graph::{self, MadeInCapture};
use crate::module::{
    Action, BatchFacts, HookContext, HookFacts, Level, LightningModule, ManualOptimization, Phase, Progress,
    StepContext, StepHook, StepModuleGraphs, StepOutput,
};
use crate::nn::{Module, ModuleExt, UnshardWatch};
use crate::optim::OffloadState;
use crate::precision::disable_casts;
use crate::precision::fp8::reduce_amaxes;
use crate::profiler::actions;
use crate::trainer::session::agree::votes;
use crate::trainer::session::engine::{check_anomaly, check_gradients};
use crate::trainer::session::hooks::{InStep, call_method, guarded, hook_error, scope, without_panic};
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
        self.reload_states(if is_training { &OffloadState::ALL } else { &[OffloadState::LpParams] })?;
        if is_manual {
            self.prepare_replays()?;
        }
        let mut graphs = self.graphs.take_modules(is_training);
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
        let region = plan.enter_precision()?;
        let watch = UnshardWatch::begin();
        // a backward pass within the step, for a gradient's gradient or a graph, may run checkpointed modules again
        let output = match hooks.is_empty() && !is_training {
            true => Ok(without_panic(|| step(module, batch, &mut ctx))), // fewer frames in a backtrace
            false => hooks.within(module.as_dyn(), || without_panic(|| step(module, batch, &mut ctx))),
        };
        drop(region);
        if is_manual {
            self.run.at.progress.global_step += graph::take_replayed_steps();
            graph::forbid_replayed_steps(None);
            self.run.engine.adapt_loss_scale(&mut self.training.optimizers)?; // after the steps of all optimizers, whose losses had the same scale
        }
        if graphs.is_some() {
            self.graphs.modules = graphs;
        }
        let output = output?;
        if is_manual && output.is_ok() {
            self.check_made_in_captures()?;
        }
        if let Some(failure) = watch.end() {
            return Err(failure); // the step failed for this reason, or continued without a weight
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

    /// Moves states back to the device that a hook has offloaded, and that are needed.
    pub(crate) fn reload_states(&mut self, states: &[OffloadState]) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.reload_states(states))
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

    /// After a backward pass: the ranks share what layers in float8 have measured.
    pub(crate) fn share_amaxes(&self) -> Result<()> {
        let _named = collective_scope("amax of fp8");
        self.run.world().group().map_or(Ok(()), |group| reduce_amaxes(group))
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
        let votes = votes(engine, ctx.requests);
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

/// Where a batch stands in its accumulation window.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    /// Batches whose gradients make one step.
    pub size: u64,
    pub opens: bool,
    pub closes: bool,
}

impl<M: LightningModule> Session<'_, M> {
    /// Where the batch to come stands in its accumulation window. The last batch of an epoch closes it; under DeepSpeed's
    /// strategies it does not, since DeepSpeed counts batches over epochs.
    pub(crate) fn window(&self, num_training_batches: usize) -> Window {
        let size = self.accumulate_grad_batches;
        let Progress { batch_idx, .. } = self.run.at.progress;
        let at = self.batches_of_windows();
        let is_last = batch_idx as usize + 1 >= num_training_batches;
        Window {
            size,
            opens: at.is_multiple_of(size),
            closes: (at + 1).is_multiple_of(size) || (is_last && !self.windows_cross_epochs()),
        }
    }

    /// The accumulation window that the last training batch has left open.
    pub(crate) fn open_window(&self) -> Option<OpenWindow> {
        let size = self.accumulate_grad_batches;
        let done = self.batches_of_windows() % size;
        let has_batches_left = self.run.at.progress.has_batches_left(self.run.facts.num_training_batches);
        (done > 0 && (has_batches_left || self.windows_cross_epochs())).then_some(OpenWindow { size, done })
    }

    /// The batches so far that windows are counted from.
    fn batches_of_windows(&self) -> u64 {
        let Progress { batch_idx, total_batches, .. } = self.run.at.progress;
        if self.windows_cross_epochs() { total_batches } else { batch_idx }
    }

    /// Batches of the windows that begin with an epoch: a position within it begins one at each multiple. 1 if windows go on over epochs.
    pub(crate) fn windows_of_epoch(&self) -> u64 {
        if self.windows_cross_epochs() { 1 } else { self.accumulate_grad_batches }
    }

    /// Whether windows are counted over epochs, as DeepSpeed does.
    pub(crate) fn windows_cross_epochs(&self) -> bool {
        self.plan.ranks.strategy.deepspeed().is_some()
    }
}

impl<M: LightningModule> Session<'_, M> {
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

    /// Moves a batch to the device, in the dtype of the weights if that is not float32, with the hooks for it.
    pub(crate) fn take(&mut self, batch: M::Batch, dataloader_idx: usize) -> Result<M::Batch> {
        let _action = self.profile_strategy("batch_to_device")?;
        let (data, module, profiling) = (&mut *self.data, &mut *self.module, &self.run.facts.profiling);
        let (data_name, module_name) =
            if profiling.is_on() { (data.type_name(), Module::type_name(module)) } else { ("", "") };
        let of_data = |hook| profiling.of_data(data_name, hook);
        let of_module = |hook: &str| profiling.start(|| actions::of_module(module_name, hook));
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
        .map_err(|source| hook_error(hook, &self.run.at.progress, source))
    }

    /// Begins a hook of the data module for the profiler.
    pub(crate) fn profile_data(&self, hook: &str) -> Result<Action> {
        self.run.facts.profiling.of_data(self.data.type_name(), hook)
    }
}

impl<M: LightningModule> ManualOptimization for InStep<'_, M> {
    fn backward(&mut self, ctx: &mut HookContext<'_>, loss: &Tensor) -> Result<()> {
        let _no_casts = disable_casts(ctx.device())?; // those of the step are for its forward
        check_anomaly(self.engine.of_call.anomaly.as_ref(), "the loss", loss, &ctx.at.progress)?;
        self.call(ctx, StepHook::OnBeforeBackward)?;
        self.run_backward(ctx, loss, true)?;
        self.call(ctx, StepHook::OnAfterBackward)
    }

    fn step(&mut self, ctx: &mut HookContext<'_>, optimizer_idx: usize) -> Result<()> {
        let _no_casts = disable_casts(ctx.device())?;
        let which = optimizer_idx..optimizer_idx + 1;
        if let Some(scale) = &self.engine.loss_scale {
            self.engine.of_call.gradients.check_scaled(scale.get_scale())?;
        }
        let optimizers = &mut ctx.training.optimizers;
        let is_finite = self.engine.unscale(optimizers, which.clone(), ctx.at.progress.global_step)?;
        self.call(ctx, StepHook::OnBeforeOptimizerStep)?;
        if is_finite {
            let optimizer = &mut ctx.training.optimizers[optimizer_idx];
            let is_captured = graph::is_capturing();
            if is_captured {
                let _unrecorded = RecordingPause::begin(); // replays read the learning rate where it is put now
                optimizer.prepare_replay()?;
            }
            optimizer.step()?;
            ffi::clear_autocast_cache()?; // it holds the weights from before, in another dtype
            if is_captured {
                let _unrecorded = RecordingPause::begin();
                self.engine.of_call.captured_optimizers.note(optimizer_idx, optimizer.as_mut())?;
            }
            graph::note_optimizer_step();
        }
        ctx.run.hardware.accelerator.step_boundary()?;
        ctx.at.progress.global_step += 1;
        self.engine.of_call.gradients.note_step(which)?;
        Ok(())
    }

    fn toggle(&mut self, ctx: &HookContext<'_>, optimizer_idx: usize) {
        self.engine.toggle(self.module.as_dyn(), &ctx.training.optimizers, optimizer_idx);
    }

    fn untoggle(&mut self) {
        self.engine.untoggle();
    }
}
