//! Training in a loop of your own, with the parts of the [`Trainer`](super::Trainer): ranks, strategies, precision, checkpoints, loggers.
//!
//! ```no_run
//! use voltaic::prelude::*;
//! use voltaic::trainer::Fabric;
//! # fn train(net: Linear, loader: DataLoader<(Tensor, Tensor)>) -> anyhow::Result<()> {
//! let mut fabric = Fabric::builder().accelerator("cpu").devices(2).strategy("zero2").precision("bf16-mixed").launch()?;
//! let (net, mut optimizer) = fabric.setup(net, AdamW::new(1e-3))?;
//! let loader = fabric.setup_dataloaders(loader)?;
//! for epoch in 0..3 {
//!     for batch in loader.epoch(epoch)? {
//!         let (x, y) = batch?;
//!         let loss = fabric.forward(&net, |net| Ok(cross_entropy(&net.call(&x)?, &y)?))?;
//!         fabric.backward(&net, &loss)?;
//!         fabric.step(&mut optimizer)?;
//!         optimizer.zero_grad()?;
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! Source: `lightning.fabric.Fabric`. `examples/fabric_gpt.rs` is nanoGPT's loop.

use std::cell::Cell;
use std::collections::HashSet;
use std::ops::{Deref, DerefMut, Index, Range};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::Tensor;

use crate::accelerator::{AcceleratorChoice, Devices, rng};
use crate::data::{Batch, BatchIter, DataLoader, EpochRange, Loaders, Remainder};
use crate::device::Device;
use crate::distributed::{ReduceOp, World, collective_scope};
use crate::error::{ConfigError, Error, Result};
use crate::ffi;
use crate::logger::Logger;
use crate::module::{CheckpointRequest, LightningModule, ModuleTensors, StepContext, Training};
use crate::nn::{
    CallInterceptor, InterceptorHandle, InterceptorLevel, Member, Metric, Module, ModuleExt, Next,
    SyncBatchNorm, intercept_calls, set_training,
};
use crate::optim::{GradientClip, OffloadState, OffloadStates, Optimizer, Optimizers, ParamGroup};
use crate::precision::fp8::reduce_amaxes;
use crate::precision::{AutocastGuard, LossScale, autocast};
use crate::strategy::{StrategyChoice, Votes};
use crate::trainer::builder::TrainerBuilder;
use crate::trainer::config::activations::ActivationCheckpointing;
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::values::PluginConfig;
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::run::optimizers::configure_optimizers;
use crate::trainer::run::stages::{checkpoint_calls, no_module};
use crate::trainer::session::agree::agreed;
use crate::trainer::session::hooks::{guarded, hook_error};
use crate::trainer::session::session::{CallOptions, Run, Session};
use crate::trainer::state::restore::{load, restore_module, restore_training};
use crate::trainer::state::write::save_weights;

/// Describes a [`Fabric`]; each setter is the one of [`TrainerBuilder`] with this name.
pub struct FabricBuilder {
    builder: TrainerBuilder,
}

macro_rules! setters {
    ($($name:ident: $type:ty;)*) => {$(
        #[doc = concat!("As [`TrainerBuilder::", stringify!($name), "`].")]
        #[must_use]
        pub fn $name(self, $name: impl Into<$type>) -> Self {
            Self { builder: self.builder.$name($name) }
        }
    )*};
}

impl FabricBuilder {
    setters! {
        accelerator: AcceleratorChoice;
        strategy: StrategyChoice;
        devices: Devices;
        num_nodes: u64;
        precision: Value;
        plugin: PluginConfig;
        use_distributed_sampler: bool;
        sync_batchnorm: bool;
        activation_checkpointing: ActivationCheckpointing;
        max_restarts: u64;
        default_root_dir: PathBuf;
    }

    /// Adds a logger, which writes on rank 0. There is none unless added.
    #[must_use]
    pub fn with_logger(self, logger: impl Logger + 'static) -> Self {
        Self { builder: self.builder.with_logger(logger) }
    }

    /// Checks the settings and joins the other ranks.
    ///
    /// With several ranks on this node and no launcher around it, the call starts them by running this program again, waits for
    /// them, and ends the process with their exit code: what follows it runs in the ranks.
    ///
    /// # Errors
    /// As [`TrainerBuilder::build`].
    pub fn launch(self) -> Result<Fabric> {
        let (plan, run) = self.builder.assemble()?;
        let options = CallOptions { is_own_loop: true, ..CallOptions::default() };
        let seed = Arc::default();
        let (is_inside, calls) = (Rc::default(), None);
        let [has_module, steps_schedules] = [false; 2];
        Ok(Fabric { plan, run, options, has_module, syncs: true, steps_schedules, seed, is_inside, calls })
    }
}

/// Ranks, a strategy, a precision and loggers for a training loop of your own.
///
/// # Collective
/// All methods but getters, [`Fabric::print`] and the loggers': all ranks must call them in the same order.
pub struct Fabric {
    plan: TrainPlan,
    run: Run,
    options: CallOptions,
    has_module: bool,
    /// The next backward pass averages gradients over the ranks.
    syncs: bool,
    /// Schedules are those of DeepSpeed's settings, which follow the steps.
    steps_schedules: bool,
    /// The seed of loaders that have none of their own: of the first that was set up, or of a checkpoint.
    seed: Arc<Mutex<Option<u64>>>,
    /// In `forward` or `backward`.
    is_inside: Rc<Cell<bool>>,
    calls: Option<InterceptorHandle>,
}

/// Calls of a fabric's module, or of a part of it, outside of [`Fabric::forward`]: they run in its precision, too.
struct CallsOutside {
    /// Of the parameters.
    ids: HashSet<u64>,
    is_inside: Rc<Cell<bool>>,
    plan: TrainPlan,
}

impl CallInterceptor for CallsOutside {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Activations // the outermost: a checkpointed segment is run again as it ran
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        !self.is_inside.get()
            && module.parameters().iter().any(|parameter| self.ids.contains(&parameter.id()))
    }

    fn call(&self, _: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        let _inside = Inside::begin(&self.is_inside);
        let _region = self.plan.enter_precision()?;
        next.run(inputs)
    }
}

/// Calls are in the precision already, until this is dropped.
struct Inside {
    is_inside: Rc<Cell<bool>>,
    before: bool,
}

impl Inside {
    fn begin(is_inside: &Rc<Cell<bool>>) -> Self {
        Self { before: is_inside.replace(true), is_inside: is_inside.clone() }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.is_inside.set(self.before);
    }
}

impl Fabric {
    /// A new builder.
    pub fn builder() -> FabricBuilder {
        let builder = TrainerBuilder::default()
            .max_epochs(-1)
            .logger(false)
            .graph(GraphMode::Off)
            .enable_checkpointing(false)
            .enable_progress_bar(false)
            .enable_model_summary(false);
        FabricBuilder { builder }
    }

    /// Moves the module to the device of this rank, in the dtype of the precision, lets all ranks start from rank 0's values, and
    /// makes the optimizers. A fabric has one module.
    ///
    /// # Errors
    /// [`ConfigError`] if it has a module already; as [`Optimizers::build`];
    /// [`DistributedError`](crate::error::DistributedError) if the modules of the ranks differ.
    pub fn setup<M: Module>(
        &mut self,
        module: M,
        optimizers: impl Into<Optimizers>,
    ) -> Result<(FabricModule<M>, FabricOptimizers)> {
        if std::mem::replace(&mut self.has_module, true) {
            let remedy = "put all modules that are trained together into one struct with #[derive(Module)]";
            return Err(ConfigError::new("Fabric::setup", "a second module", remedy).into());
        }
        if let Some(inference) = self.plan.ranks.strategy.inference() {
            return Err(inference.refuse_fit().into());
        }
        let asked = optimizers.into();
        let deepspeed = self.plan.ranks.strategy.deepspeed();
        self.steps_schedules =
            deepspeed.is_some_and(|plan| plan.settings.scheduler.is_some()) && !asked.has_scheduler();
        let optimizers = Cell::new(Some(asked));
        let mut module = FabricModule { module, optimizers, state: Value::Null };
        let mut optimizers = FabricOptimizers::default();
        self.with_session(&mut module, &mut optimizers, |session| {
            session.setup()?;
            set_training(session.module, true);
            session.run.engine.of_call.checkpoints =
                checkpoint_calls(session.module.as_dyn(), &session.plan.activations)?;
            configure_optimizers(session)
        })?;
        if self.plan.precision.autocast_dtype().is_some() || self.plan.fp8.is_some() {
            let ids = module.parameters().iter().map(|parameter| parameter.id()).collect();
            let calls = CallsOutside { ids, is_inside: self.is_inside.clone(), plan: self.plan.clone() };
            self.calls = Some(intercept_calls(Rc::new(calls)));
        }
        Ok((module, optimizers))
    }

    /// Leaves the loader with this rank's part of the samples, as the trainer does; its batches come on the device.
    ///
    /// # Errors
    /// As [`DataLoader::shard`].
    pub fn setup_dataloaders<B: Batch>(&self, mut loader: DataLoader<B>) -> Result<FabricDataLoader<B>> {
        let mut seed = self.seed.lock().unwrap_or_else(PoisonError::into_inner);
        seed.get_or_insert_with(rng::global_seed);
        let dp = &self.run.world().mesh().dp;
        if dp.size > 1 && self.plan.ranks.use_distributed_sampler {
            loader.shard(dp.rank, dp.size, Remainder::Repeat)?;
        }
        let (device, dtype) = (self.plan.device, self.plan.precision.true_dtype());
        Ok(FabricDataLoader { loader, seed: self.seed.clone(), device, dtype })
    }

    /// Calls the module: `body` runs under the precision's autocast, and a strategy that shards weights gathers those of each layer
    /// that it calls. A call of the module or of a layer of it outside, such as `net.call(&x)`, has the same precision; operations that
    /// are no call have not, see [`Fabric::autocast`].
    ///
    /// # Errors
    /// [`Error::Hook`](crate::Error::Hook) named `forward` if `body` fails or panics.
    pub fn forward<M: Module, T>(
        &mut self,
        module: &FabricModule<M>,
        body: impl FnOnce(&M) -> anyhow::Result<T>,
    ) -> Result<T> {
        let _named = collective_scope("forward");
        let opens = !self.run.engine.of_call.gradients.window_is_open;
        self.run.engine.strategy.begin_forward(module, opens)?;
        let ranks = self.run.world().mesh().dp.group().cloned();
        let _sync = ranks.filter(|_| self.plan.ranks.sync_batchnorm).map(SyncBatchNorm::over);
        let _settings = self.plan.checkpoints.enter();
        if let Some(checkpoints) = &self.run.engine.of_call.checkpoints {
            let root = module.as_module();
            checkpoints.calls.refresh(root).map_err(|name| no_module(root, &name))?; // it may lie elsewhere now
        }
        let _region = self.plan.enter_precision()?;
        let _inside = Inside::begin(&self.is_inside);
        let hooks = self.run.facts.module_hooks.clone();
        let output = guarded(|| hooks.within(module.as_module(), || body(&module.module))?);
        output.map_err(|source| hook_error("forward", &self.run.at.progress, source))
    }

    /// A region in which operators cast as in [`Fabric::forward`]; `None` if the precision casts nothing.
    ///
    /// # Errors
    /// As [`autocast`](crate::precision::autocast).
    pub fn autocast(&self) -> Result<Option<AutocastGuard>> {
        self.plan.precision.autocast_dtype().map(|dtype| autocast(self.plan.device, dtype)).transpose()
    }

    /// Computes gradients from a loss of shape `[]`, and averages them over the ranks unless it is called within
    /// [`Fabric::no_backward_sync`].
    ///
    /// # Errors
    /// If the loss has another shape or requires no grad; libtorch's; [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    pub fn backward<M: Module>(&mut self, module: &FabricModule<M>, loss: &Tensor) -> Result<()> {
        let _named = collective_scope("backward");
        let Run { engine, at, facts, .. } = &mut self.run;
        let hooks = facts.module_hooks.clone();
        let _inside = Inside::begin(&self.is_inside);
        engine.backward(loss, self.syncs, Votes::default(), |loss| {
            let run = || {
                guarded(|| Ok(loss.f_backward()?))
                    .map_err(|source| hook_error("backward", &at.progress, source))
            };
            hooks.within(module.as_module(), run).and_then(|done| done)
        })?;
        self.run.world().group().map_or(Ok(()), |group| reduce_amaxes(group))?;
        self.run.choose_kept_activations()
    }

    /// With `enabled`, backward passes in `body` leave their gradients to this rank, to which those of the next pass outside are
    /// added: `fabric.no_backward_sync(is_accumulating, |fabric| ..)`.
    ///
    /// # Errors
    /// Those of `body`.
    pub fn no_backward_sync<T>(
        &mut self,
        enabled: bool,
        body: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let before = std::mem::replace(&mut self.syncs, !enabled);
        let done = body(self);
        self.syncs = before;
        done
    }

    /// Limits the gradients, after a backward pass that has averaged them.
    ///
    /// # Errors
    /// As [`Fabric::step`]; as [`Optimizer::clip`].
    pub fn clip_gradients(&mut self, optimizers: &mut FabricOptimizers, clip: GradientClip) -> Result<()> {
        self.clip_some(optimizers, 0..optimizers.len(), clip)
    }

    /// [`Fabric::clip_gradients`] of one of several optimizers.
    ///
    /// # Errors
    /// As [`Fabric::clip_gradients`]; [`ConfigError`] if there is no such optimizer.
    pub fn clip_gradients_of(
        &mut self,
        optimizers: &mut FabricOptimizers,
        index: usize,
        clip: GradientClip,
    ) -> Result<()> {
        optimizers.check(index)?;
        self.clip_some(optimizers, index..index + 1, clip)
    }

    fn clip_some(
        &mut self,
        optimizers: &mut FabricOptimizers,
        which: Range<usize>,
        clip: GradientClip,
    ) -> Result<()> {
        let _named = collective_scope("clip_gradients");
        self.unscale(optimizers, which.clone())?;
        for optimizer in &mut optimizers.training.optimizers[which.clone()] {
            optimizer.clip(clip)?;
        }
        self.run.engine.of_call.gradients.note_changed(which)
    }

    /// Takes the scale of the loss out of the gradients, once before a step.
    fn unscale(&mut self, optimizers: &mut FabricOptimizers, which: Range<usize>) -> Result<bool> {
        let (engine, step) = (&mut self.run.engine, self.run.at.progress.global_step);
        if let Some(scale) = &engine.loss_scale {
            engine.of_call.gradients.check_scaled(scale.get_scale())?;
        }
        engine.unscale(&mut optimizers.training.optimizers, which, step)
    }

    /// Steps all optimizers, unless a precision with a loss scale has found gradients that are not finite. Returns whether they were stepped.
    ///
    /// The gradients stay until [`FabricOptimizers::zero_grad`]. Settings of DeepSpeed count: their `gradient_clipping` limits the gradients
    /// before the step, and their schedule follows it, so that [`FabricOptimizers::step_lr_schedulers`] is not to be called for it.
    ///
    /// # Errors
    /// If gradients are not averaged over the ranks yet, as within [`Fabric::no_backward_sync`]; if gradients with the scale of the loss
    /// were added to others without; as [`Optimizer::step`].
    pub fn step(&mut self, optimizers: &mut FabricOptimizers) -> Result<bool> {
        self.step_some(optimizers, 0..optimizers.len())
    }

    /// [`Fabric::step`] of one of several optimizers, which counts as a step.
    ///
    /// # Errors
    /// As [`Fabric::step`]; [`ConfigError`] if there is no such optimizer.
    pub fn step_optimizer(&mut self, optimizers: &mut FabricOptimizers, index: usize) -> Result<bool> {
        optimizers.check(index)?;
        self.step_some(optimizers, index..index + 1)
    }

    fn step_some(&mut self, optimizers: &mut FabricOptimizers, which: Range<usize>) -> Result<bool> {
        let _named = collective_scope("optimizer_step");
        let all_finite = self.unscale(optimizers, which.clone())?;
        if all_finite {
            for optimizer in &mut optimizers.training.optimizers[which.clone()] {
                self.plan.clip.map_or(Ok(()), |clip| optimizer.clip(clip))?;
                optimizer.step()?;
            }
            ffi::clear_autocast_cache()?; // it has the weights from before the step, in another dtype
        }
        let engine = &mut self.run.engine;
        let follows = all_finite || !engine.loss_scale.as_ref().is_some_and(LossScale::holds_schedules);
        engine.of_call.gradients.note_step(which)?;
        engine.adapt_loss_scale(&mut optimizers.training.optimizers)?;
        self.run.facts.hardware.accelerator.step_boundary()?;
        self.run.at.progress.global_step += 1;
        if self.steps_schedules && follows {
            optimizers.step_lr_schedulers(None)?;
        }
        Ok(all_finite)
    }

    /// Lets the parameters of one optimizer alone get gradients, until [`Fabric::untoggle_optimizer`]: such as those of a GAN's generator.
    ///
    /// # Errors
    /// [`ConfigError`] if there is no such optimizer.
    pub fn toggle_optimizer<M: Module>(
        &mut self,
        module: &FabricModule<M>,
        optimizers: &FabricOptimizers,
        index: usize,
    ) -> Result<()> {
        optimizers.check(index)?;
        self.run.engine.toggle(module, &optimizers.training.optimizers, index);
        Ok(())
    }

    /// Ends [`Fabric::toggle_optimizer`].
    pub fn untoggle_optimizer(&mut self) {
        self.run.engine.untoggle();
    }

    /// Writes a checkpoint that [`Fabric::load`] and the trainer's `ckpt_path` read: a file, or a folder if the strategy shards states. It
    /// has weights, optimizers, schedules, gradients that there are, random states, and `state`: your position in the data, say.
    ///
    /// # Errors
    /// If `state` cannot be serialized; [`CheckpointError`](crate::error::CheckpointError) on all ranks if one of them cannot write.
    pub fn save<M: Module>(
        &mut self,
        path: impl AsRef<Path>,
        (module, optimizers): (&mut FabricModule<M>, &mut FabricOptimizers),
        state: &impl Serialize,
    ) -> Result<()> {
        let path = path.as_ref().to_path_buf();
        module.state = serde_json::to_value(state)
            .map_err(|error| Error::io("serialize", "the state of Fabric::save", error.into()))?;
        self.with_session(module, optimizers, |session| {
            let request = CheckpointRequest {
                path: path.clone(),
                weights_only: false,
                link_to: None,
                then_remove: Vec::new(),
            };
            session.run.requests.checkpoints = vec![request];
            session.run.mark_rows();
            session.write_checkpoints()?;
            let done = session.run.checkpoint_io.teardown();
            agreed(session.run.world(), "save", &path, done)
        })
    }

    /// Restores what [`Fabric::save`] has written, by this number of ranks or another, and returns its `state`. Gradients of before are
    /// dropped.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::error::CheckpointError) if it is not such a checkpoint or does not fit; if its state is of another type.
    pub fn load<M: Module, S: DeserializeOwned>(
        &mut self,
        path: impl AsRef<Path>,
        (module, optimizers): (&mut FabricModule<M>, &mut FabricOptimizers),
    ) -> Result<S> {
        let path = path.as_ref();
        self.with_session(module, optimizers, |session| {
            let mut loaded = load(session, path, true)?;
            restore_module(session, &mut loaded, path)?;
            let resumed = restore_training(session, loaded, path.to_path_buf())?;
            let rows = session.run.resume_loggers();
            agreed(session.run.world(), "write", &session.run.facts.log_dir, rows)?;
            resumed.set_rng()
        })?;
        *self.seed.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.run.seed);
        serde_json::from_value(module.state.take())
            .map_err(|error| Error::io("read the state of", path, error.into()))
    }

    /// Writes the weights of the module alone, as [`Trainer::save_weights`](super::Trainer::save_weights): tensor by tensor where they are
    /// divided among ranks, so that no rank needs all of them.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save_weights<M: Module>(
        &mut self,
        module: &FabricModule<M>,
        path: impl AsRef<Path>,
    ) -> Result<()> {
        let _named = collective_scope("save_weights");
        save_weights(&mut self.run, module, path.as_ref(), None)
    }

    /// Ends training: gathers the weights, closes the loggers, and returns the module, whole on each rank. Where no rank has memory for
    /// that, call [`Fabric::save_weights`] in place of it.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone; if memory is short; if a logger cannot write.
    pub fn finish<M: Module>(mut self, module: FabricModule<M>) -> Result<M> {
        self.run.engine.strategy.finish(&module)?;
        self.run.engine.strategy.gather_weights(&module)?; // another call, to which divided ones could be left, cannot follow
        std::mem::take(&mut self.run.loggers).iter_mut().try_for_each(|logger| logger.finalize(true))?;
        Ok(module.module)
    }

    /// Gives values to the loggers; does nothing on other ranks than 0.
    ///
    /// # Errors
    /// If a logger cannot write.
    pub fn log(&mut self, name: &str, value: f64, step: u64) -> Result<()> {
        self.log_dict(&[(name.to_owned(), value)], step)
    }

    /// [`Fabric::log`] of several values, as one row. After [`Fabric::load`], rows of an earlier run in the same folder stay that
    /// were logged before the checkpoint.
    ///
    /// # Errors
    /// If a logger cannot write.
    pub fn log_dict(&mut self, metrics: &[(String, f64)], step: u64) -> Result<()> {
        let next = &mut self.run.at.progress.batches_that_stepped; // from which step on rows are written, as in the trainer
        *next = step.saturating_add(1).max(*next);
        self.run.loggers.iter_mut().try_for_each(|logger| logger.log_metrics(metrics, step))
    }

    /// Prints on rank 0.
    pub fn print(&self, text: impl std::fmt::Display) {
        if self.is_global_zero() {
            println!("{text}");
        }
    }

    /// `tensor` reduced over all ranks, as a new tensor.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective).
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let own = tensor.f_detach()?.f_contiguous()?.copy();
        if let Some(group) = self.run.world().group() {
            group.all_reduce(&own, op)?;
        }
        Ok(own)
    }

    /// `tensor` of all ranks, stacked along a new first dimension.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective).
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Tensor> {
        let own = tensor.f_detach()?.f_contiguous()?;
        match self.run.world().group() {
            Some(group) => group.all_gather(&own),
            None => Ok(own.f_unsqueeze(0)?),
        }
    }

    /// `value` of rank `src` on all ranks.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective); [`ConfigError`] if there is no such rank.
    pub fn broadcast<T: Serialize + DeserializeOwned + Clone>(&self, value: &T, src: usize) -> Result<T> {
        match self.run.world().group() {
            Some(group) => group.broadcast_object(value, src),
            None => Ok(value.clone()),
        }
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective).
    pub fn barrier(&self) -> Result<()> {
        self.run.world().barrier()
    }

    /// The ranks, and which of them this process is.
    pub fn world(&self) -> &World {
        self.run.world()
    }

    /// Whether this process is the one of all ranks that prints and writes files.
    pub fn is_global_zero(&self) -> bool {
        self.run.world().is_global_zero()
    }

    /// The device of this rank.
    pub fn device(&self) -> Device {
        self.plan.device
    }

    /// Steps so far, those of a checkpoint included.
    pub fn global_step(&self) -> u64 {
        self.run.at.progress.global_step
    }

    fn with_session<M: Module, T>(
        &mut self,
        module: &mut FabricModule<M>,
        optimizers: &mut FabricOptimizers,
        body: impl FnOnce(&mut Session<FabricModule<M>>) -> Result<T>,
    ) -> Result<T> {
        let mut data = Loaders::<Tensor>::new();
        self.run.seed =
            self.seed.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or_else(rng::global_seed);
        let mut session = Session::new(&self.plan, &self.options, &mut self.run, module, &mut data);
        session.training = std::mem::take(&mut optimizers.training);
        let done = body(&mut session);
        optimizers.training = std::mem::take(&mut session.training);
        done
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.run.engine.untoggle();
        for logger in &mut self.run.loggers {
            if let Err(error) = logger.finalize(false) {
                tracing::warn!("a logger could not end: {error}");
            }
        }
        self.run.engine.strategy.teardown();
    }
}

/// A module that a [`Fabric`] trains. Its fields and methods are there to read; [`Fabric::forward`] calls it.
pub struct FabricModule<M> {
    module: M,
    /// Until they are built.
    optimizers: Cell<Option<Optimizers>>,
    /// What is saved beside the module.
    state: Value,
}

impl<M> Deref for FabricModule<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M> DerefMut for FabricModule<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.module
    }
}

impl<M: Module> Module for FabricModule<M> {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.module.members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.module.children_mut(visit);
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        self.module.settings(visit);
    }

    fn set_training(&mut self, training: bool) {
        self.module.set_training(training);
    }

    fn is_training(&self) -> Option<bool> {
        self.module.is_training()
    }

    fn metric(&self) -> Option<std::sync::Arc<dyn Metric>> {
        self.module.metric()
    }

    fn wrapped(&self) -> Option<&dyn Module> {
        Some(self.module.as_module())
    }

    fn type_name(&self) -> &'static str {
        self.module.type_name()
    }
}

/// The trainer's parts see a module with manual optimization, whose loop is elsewhere.
impl<M: Module> LightningModule for FabricModule<M> {
    type Batch = Tensor;

    fn training_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        anyhow::bail!(
            "a module of Fabric is trained by a loop of its own; give the trainer the module itself"
        )
    }

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(self.optimizers.take().unwrap_or_default())
    }

    fn on_save_checkpoint(&mut self, _tensors: &mut ModuleTensors) -> anyhow::Result<Value> {
        Ok(self.state.clone())
    }

    fn on_load_checkpoint(&mut self, state: &Value, _tensors: &ModuleTensors) -> anyhow::Result<()> {
        self.state = state.clone();
        Ok(())
    }
}

/// The optimizers of a [`FabricModule`], usually one, with their schedules. `optimizers[0]` is the first, to read; it is stepped by
/// [`Fabric::step_optimizer`] and clipped by [`Fabric::clip_gradients_of`], which know the scale of the loss.
#[derive(Default)]
pub struct FabricOptimizers {
    training: Training,
}

impl FabricOptimizers {
    /// How many there are.
    #[allow(clippy::len_without_is_empty, reason = "there is one, as a rule")]
    pub fn len(&self) -> usize {
        self.training.optimizers.len()
    }

    fn check(&self, index: usize) -> Result<()> {
        if index < self.len() {
            return Ok(());
        }
        let what = format!("there is no optimizer {index}, the module has {}", self.len());
        Err(ConfigError::new("optimizers", what, "give the index of one that Fabric::setup was given").into())
    }

    /// Drops the gradients of all parameters.
    ///
    /// # Errors
    /// As [`Optimizer::zero_grad`].
    pub fn zero_grad(&mut self) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.zero_grad())
    }

    /// Drops the gradients of the parameters of one optimizer.
    ///
    /// # Errors
    /// As [`Optimizer::zero_grad`]; [`ConfigError`] if there is no such optimizer.
    pub fn zero_grad_of(&mut self, index: usize) -> Result<()> {
        self.check(index)?;
        self.training.optimizers[index].zero_grad()
    }

    /// The parameter groups of one optimizer, whose settings may be changed.
    ///
    /// # Errors
    /// [`ConfigError`] if there is no such optimizer.
    pub fn param_groups_mut(&mut self, index: usize) -> Result<&mut [ParamGroup]> {
        self.check(index)?;
        Ok(self.training.optimizers[index].param_groups_mut())
    }

    /// Moves states of all optimizers to memory of the host, until a step needs them.
    ///
    /// # Errors
    /// As [`Optimizer::offload_states`].
    pub fn offload_states(&mut self, states: &OffloadStates) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.offload_states(states))
    }

    /// Moves these states of all optimizers back to their device.
    ///
    /// # Errors
    /// As [`Optimizer::reload_states`].
    pub fn reload_states(&mut self, states: &[OffloadState]) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.reload_states(states))
    }

    /// Gives all groups this learning rate.
    pub fn set_lr(&mut self, lr: f64) {
        let groups = self.training.optimizers.iter_mut().flat_map(|optimizer| optimizer.param_groups_mut());
        groups.for_each(|group| group.lr = lr);
    }

    /// Steps all schedules; `metric` is for those that follow one.
    ///
    /// # Errors
    /// If a schedule that follows a metric gets none.
    pub fn step_lr_schedulers(&mut self, metric: Option<f64>) -> Result<()> {
        (0..self.training.schedulers.len())
            .try_for_each(|index| self.training.step_lr_scheduler(index, metric))
    }
}

impl Index<usize> for FabricOptimizers {
    type Output = Box<dyn Optimizer>;

    fn index(&self, index: usize) -> &Self::Output {
        &self.training.optimizers[index]
    }
}

/// A loader whose batches are this rank's, on its device.
pub struct FabricDataLoader<B: Batch> {
    loader: DataLoader<B>,
    seed: Arc<Mutex<Option<u64>>>,
    device: Device,
    dtype: Option<tch::Kind>,
}

impl<B: Batch> FabricDataLoader<B> {
    /// The batches of an epoch, which decides their order.
    ///
    /// # Errors
    /// As [`DataLoader::iter`].
    pub fn epoch(&self, epoch: u64) -> Result<FabricBatches<B>> {
        self.iter(EpochRange::epoch(epoch))
    }

    /// Some batches of an epoch, such as those after the one at which a checkpoint was saved.
    ///
    /// # Errors
    /// As [`DataLoader::iter`].
    pub fn iter(&self, range: EpochRange) -> Result<FabricBatches<B>> {
        let mut loader = self.loader.clone(); // its seed may be that of a checkpoint now
        if let Some(seed) = *self.seed.lock().unwrap_or_else(PoisonError::into_inner) {
            loader.set_seed(seed);
        }
        Ok(FabricBatches { batches: loader.iter(range)?, device: self.device, dtype: self.dtype })
    }
}

impl<B: Batch> Deref for FabricDataLoader<B> {
    type Target = DataLoader<B>;

    fn deref(&self) -> &DataLoader<B> {
        &self.loader
    }
}

/// The batches of a [`FabricDataLoader`].
pub struct FabricBatches<B: Batch> {
    batches: BatchIter<B>,
    device: Device,
    dtype: Option<tch::Kind>,
}

impl<B: Batch> Iterator for FabricBatches<B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        let moved = |batch: B| {
            let batch = batch.move_to(self.device)?;
            match self.dtype {
                Some(dtype) => batch.to_dtype(dtype),
                None => Ok(batch),
            }
        };
        Some(self.batches.next()?.and_then(moved))
    }
}
