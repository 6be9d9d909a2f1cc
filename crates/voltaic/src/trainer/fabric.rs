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

mod data;
mod module;

use std::cell::Cell;
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::Tensor;

pub use self::data::{FabricBatches, FabricDataLoader};
use self::data::{Place, locked};
pub use self::module::{FabricModule, FabricOptimizers};
use crate::accelerator::{AcceleratorChoice, Devices, rng};
use crate::data::{Batch, DataLoader, EpochRange, Loaders, Remainder};
use crate::device::Device;
use crate::distributed::{ReduceOp, World, collective_scope};
use crate::error::{ConfigError, Error, Result};
use crate::ffi;
use crate::logger::Logger;
use crate::module::CheckpointRequest;
use crate::nn::{
    CallInterceptor, IncompatibleKeys, InterceptorHandle, InterceptorLevel, Module, ModuleExt, Next,
    SyncBatchNorm, intercept_calls, set_training,
};
use crate::optim::{GradientClip, Optimizers};
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
use crate::trainer::state::restore::{load, restore_module, restore_training, restore_weights};
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
        let place = Arc::default();
        let (is_inside, calls) = (Rc::default(), None);
        let [has_module, steps_schedules] = [false; 2];
        Ok(Fabric { plan, run, options, has_module, syncs: true, steps_schedules, place, is_inside, calls })
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
    place: Arc<Mutex<Place>>,
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

    /// Leaves the loader with this rank's part of the samples, as the trainer does; its batches come on the device. Set the loader of
    /// the training data up first, before [`Fabric::load`]: checkpoints have the position in it.
    ///
    /// # Errors
    /// As [`DataLoader::shard`].
    pub fn setup_dataloaders<B: Batch>(&self, mut loader: DataLoader<B>) -> Result<FabricDataLoader<B>> {
        let mut place = locked(&self.place);
        place.seed.get_or_insert_with(rng::global_seed);
        let dp = &self.run.world().mesh().dp;
        if dp.size > 1 && self.plan.ranks.use_distributed_sampler {
            loader.shard(dp.rank, dp.size, Remainder::Repeat)?;
        }
        let (device, dtype) = (self.plan.device, self.plan.precision.true_dtype());
        let is_first = place.shape.is_none();
        place.shape.get_or_insert((loader.num_batches(), loader.batch_size()));
        Ok(FabricDataLoader { loader, place: self.place.clone(), is_first, device, dtype })
    }

    /// Where the loop stands in the loader that was set up first: at the batch after those that it has given, or after those of a
    /// checkpoint that was loaded. `loader.iter(fabric.position())` resumes there.
    pub fn position(&self) -> EpochRange {
        let place = locked(&self.place);
        match place.epoch_ended() {
            true => EpochRange::epoch(place.epoch + 1),
            false => EpochRange::epoch(place.epoch).from_batch(place.batch_idx as usize),
        }
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
        self.backward_from(module, loss, false)
    }

    /// [`Fabric::backward`] after which another pass can go through the same graph, such as that of a second loss: PyTorch's
    /// `retain_graph=True`.
    ///
    /// # Errors
    /// As [`Fabric::backward`].
    pub fn backward_retaining_graph<M: Module>(
        &mut self,
        module: &FabricModule<M>,
        loss: &Tensor,
    ) -> Result<()> {
        self.backward_from(module, loss, true)
    }

    fn backward_from<M: Module>(
        &mut self,
        module: &FabricModule<M>,
        loss: &Tensor,
        retains_graph: bool,
    ) -> Result<()> {
        let _named = collective_scope("backward");
        let Run { engine, at, facts, .. } = &mut self.run;
        let hooks = facts.module_hooks.clone();
        let _inside = Inside::begin(&self.is_inside);
        engine.backward(loss, self.syncs, Votes::default(), |loss| {
            let run = || {
                guarded(|| Ok(ffi::backward(loss, retains_graph)?))
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

    /// Limits the gradients, after a backward pass that has averaged them. Returns the norm of all gradients before, of shape `[]` on the
    /// device, with [`GradientClip::Norm`]; each optimizer's are limited by themselves.
    ///
    /// # Errors
    /// As [`Fabric::step`]; as [`Optimizer::clip`](crate::optim::Optimizer::clip).
    pub fn clip_gradients(
        &mut self,
        optimizers: &mut FabricOptimizers,
        clip: GradientClip,
    ) -> Result<Option<Tensor>> {
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
    ) -> Result<Option<Tensor>> {
        optimizers.check(index)?;
        self.clip_some(optimizers, index..index + 1, clip)
    }

    fn clip_some(
        &mut self,
        optimizers: &mut FabricOptimizers,
        which: Range<usize>,
        clip: GradientClip,
    ) -> Result<Option<Tensor>> {
        let _named = collective_scope("clip_gradients");
        self.unscale(optimizers, which.clone())?;
        let all = optimizers.training.optimizers[which.clone()].iter_mut();
        let norms: Vec<Tensor> =
            all.filter_map(|optimizer| optimizer.clip(clip).transpose()).collect::<Result<_>>()?;
        self.run.engine.of_call.gradients.note_changed(which)?;
        match norms.len() {
            0 | 1 => Ok(norms.into_iter().next()),
            _ => Ok(Some(Tensor::f_stack(&norms, 0)?.f_norm()?)),
        }
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
    /// were added to others without; as [`Optimizer::step`](crate::optim::Optimizer::step).
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
                self.plan.clip.map(|clip| optimizer.clip(clip)).transpose()?;
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
    /// has weights, optimizers, schedules, gradients that there are, random states, the position in the data ([`Fabric::position`]), and
    /// `state`. Save when the work on a batch is done.
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
    /// dropped. A checkpoint of the trainer has no such state: load it as an `Option<S>`, and go on at [`Fabric::position`].
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
            if session.run.facts.num_training_batches > 0 {
                resumed.find_position(session.run, session.plan, 1)?;
            }
            let rows = session.run.resume_loggers();
            agreed(session.run.world(), "write", &session.run.facts.log_dir, rows)?;
            resumed.set_rng()
        })?;
        let at = &mut self.run.at.progress;
        at.enter_next_epoch();
        let mut place = locked(&self.place);
        (place.seed, place.epoch, place.batch_idx) = (Some(self.run.seed), at.current_epoch, at.batch_idx);
        drop(place);
        serde_json::from_value(module.state.take())
            .map_err(|error| Error::io("read the state of", path, error.into()))
    }

    /// Writes the weights of the module alone, as [`Trainer::save_weights`](super::Trainer::save_weights): tensor by tensor where they are
    /// sharded among ranks, so that no rank needs all of them.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save_weights<M: Module>(
        &mut self,
        module: &FabricModule<M>,
        path: impl AsRef<Path>,
    ) -> Result<()> {
        self.save_weights_if(module, path, &|_| true)
    }

    /// [`Fabric::save_weights`] of the parameters and buffers whose fqn passes the filter, the same on all ranks.
    ///
    /// # Errors
    /// As [`Fabric::save_weights`].
    pub fn save_weights_if<M: Module>(
        &mut self,
        module: &FabricModule<M>,
        path: impl AsRef<Path>,
        filter: &dyn Fn(&str) -> bool,
    ) -> Result<()> {
        let _named = collective_scope("save_weights");
        save_weights(&mut self.run, module, path.as_ref(), None, filter)
    }

    /// Takes the weights alone of a checkpoint, of weights or of a whole run. Returns the names that are on one side only, of which
    /// there are none if it is `strict`: their weights stay as they are.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::error::CheckpointError) if it is no checkpoint or does not fit.
    pub fn load_weights<M: Module>(
        &mut self,
        path: impl AsRef<Path>,
        module: &mut FabricModule<M>,
        strict: bool,
    ) -> Result<IncompatibleKeys> {
        let path = path.as_ref();
        self.with_session(module, &mut FabricOptimizers::default(), |session| {
            let mut loaded = load(session, path, true)?;
            restore_weights(session, &mut loaded, ("load_weights", path), strict)
        })
    }

    /// Ends training: gathers the weights, closes the loggers, and returns the module, whole on each rank. Where no rank has memory for
    /// that, call [`Fabric::save_weights`] in place of it.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone; if memory is short; if a logger cannot write.
    pub fn finish<M: Module>(mut self, module: FabricModule<M>) -> Result<M> {
        self.run.engine.strategy.finish(&module)?;
        self.run.engine.strategy.gather_weights(&module)?; // another call, to which sharded ones could be left, cannot follow
        std::mem::take(&mut self.run.loggers).iter_mut().try_for_each(|logger| logger.finalize(true))?;
        Ok(module.module)
    }

    /// Gives values to the loggers; does nothing on other ranks than 0.
    ///
    /// # Errors
    /// If a logger cannot write.
    pub fn log(&mut self, name: &str, value: f64, step: u64) -> Result<()> {
        self.log_dict([(name, value)], step)
    }

    /// [`Fabric::log`] of several values, as one row. After [`Fabric::load`], rows of an earlier run in the same folder stay that
    /// were logged before the checkpoint.
    ///
    /// # Errors
    /// If a logger cannot write.
    pub fn log_dict<N: Into<String>>(
        &mut self,
        metrics: impl IntoIterator<Item = (N, f64)>,
        step: u64,
    ) -> Result<()> {
        let metrics: Vec<(String, f64)> =
            metrics.into_iter().map(|(name, value)| (name.into(), value)).collect();
        let next = &mut self.run.at.progress.batches_that_stepped; // from which step on rows are written, as in the trainer
        *next = step.saturating_add(1).max(*next);
        self.run.loggers.iter_mut().try_for_each(|logger| logger.log_metrics(&metrics, step))
    }

    /// Prints on rank 0.
    pub fn print(&self, text: impl std::fmt::Display) {
        if self.is_global_zero() {
            println!("{text}");
        }
    }

    /// Each tensor of `values` reduced over all ranks, as a new one: of a tensor, a tuple, a `Vec`, or a `HashMap` by name.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective).
    pub fn all_reduce<B: Batch>(&self, values: B, op: ReduceOp) -> Result<B> {
        values.map_tensors(&mut |tensor| {
            let own = tensor.f_detach()?.f_contiguous()?.copy();
            self.run.world().group().map_or(Ok(()), |group| group.all_reduce(&own, op))?;
            Ok(own)
        })
    }

    /// Each tensor of `values`, as of [`Fabric::all_reduce`], of all ranks, stacked along a new first dimension.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective).
    pub fn all_gather<B: Batch>(&self, values: B) -> Result<B> {
        values.map_tensors(&mut |tensor| {
            let own = tensor.f_detach()?.f_contiguous()?;
            match self.run.world().group() {
                Some(group) => group.all_gather(&own),
                None => Ok(own.f_unsqueeze(0)?),
            }
        })
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

    /// Runs `body` on rank 0, and then on the others: such as what fetches a file that all read. With `local` on the first rank of each
    /// node before its others.
    ///
    /// # Errors
    /// Of this rank; on all ranks if the first has failed.
    pub fn rank_zero_first<T>(&self, local: bool, mut body: impl FnMut() -> anyhow::Result<T>) -> Result<T> {
        let world = self.run.world();
        let _named = collective_scope("rank_zero_first");
        let mut run = || {
            guarded(&mut body).map_err(|source| hook_error("rank_zero_first", &self.run.at.progress, source))
        };
        let is_first = if local { world.local_rank == 0 } else { world.rank == 0 };
        let done = if is_first { run().map(Some) } else { Ok(None) };
        match agreed(world, "run", Path::new("rank_zero_first"), done)? {
            Some(done) => Ok(done),
            None => run(),
        }
    }

    /// A batch, or any tensors, on the device of this rank.
    ///
    /// # Errors
    /// As [`Batch::move_to`].
    pub fn to_device<B: Batch>(&self, batch: B) -> Result<B> {
        batch.move_to(self.device())
    }

    /// The loggers, in the order in which they were added; none on other ranks than 0.
    pub fn loggers(&self) -> &[Box<dyn Logger>] {
        &self.run.loggers
    }

    /// Name of the strategy, such as `ddp`.
    pub fn strategy(&self) -> &'static str {
        self.run.engine.strategy.name()
    }

    /// Number of this process among all ranks.
    pub fn global_rank(&self) -> usize {
        self.run.world().rank
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
        let place = locked(&self.place);
        let (epoch, batch_idx, epoch_ended) = (place.epoch, place.batch_idx, place.epoch_ended());
        let (batches, size) = place.shape.unwrap_or_default();
        self.run.seed = place.seed.unwrap_or_else(rng::global_seed);
        drop(place);
        let Run { at, facts, .. } = &mut self.run;
        (at.progress.current_epoch, at.progress.batch_idx) = (epoch, batch_idx);
        (at.progress.epoch_ended, at.progress.total_batches) =
            (epoch_ended, epoch * batches as u64 + batch_idx);
        (facts.num_training_batches, facts.train_batch_size) = (batches, size);
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
