//! The interface between the trainer and the distribution of training over ranks.

use std::fmt;
use std::time::Duration;

use tch::{Kind, Tensor};

use super::config::{DdpConfig, HpuDeepSpeedStrategy, ModelParallelStrategy, StrategyClass, StrategyConfig};
use super::deepspeed::config::DeepSpeedStrategy;
use super::sharded::ShardedState;
use super::votes::Votes;
use crate::device::Device;
use crate::distributed::{DEFAULT_TIMEOUT, World};
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::nn::{Module, ModuleExt, ModuleHooks};
use crate::optim::{ConfiguredOptimizer, Optimizers};
use crate::precision::{LossScaler, Precision};

/// How training is distributed over ranks. In a step the trainer calls [`Strategy::begin_forward`], [`Strategy::begin_backward`] and
/// [`Strategy::end_backward`]. [`Votes`] are the requests of each rank (stop, signals, failures): they are reduced together with the
/// gradients, so that all ranks act on them after the same batch.
///
/// # Collective
/// All ranks call [`Strategy::prepare`], [`Strategy::begin_forward`], [`Strategy::begin_backward`], [`Strategy::end_backward`] and [`Strategy::agree`] in the
/// same order.
pub trait Strategy: fmt::Debug + Send {
    /// The name that chooses it, such as `ddp`.
    fn name(&self) -> &'static str;

    /// The ranks, which of them this process is, and its place in their mesh: data is split, and metrics are averaged, over
    /// `world().mesh().dp`.
    fn world(&self) -> &World;

    /// Whether it knows what each rank of the mesh has of the weights: what is saved, clipped by norm and unscaled is then all of them. By
    /// default it knows copies of all weights on all ranks, so no mesh with `tp` or `pp` above 1.
    fn knows_mesh(&self) -> bool {
        let mesh = self.world().mesh();
        mesh.tp.size == 1 && mesh.pp.size == 1
    }

    /// How long ranks wait for each other in a collective; with `None` the time-out of [`BuildStrategy::timeout`], which applied
    /// when they met, stays.
    fn timeout(&self) -> Option<Duration> {
        None
    }

    /// Moves the module to the device of the run, and casts it to `dtype` if there is one, before [`Strategy::prepare`]. A strategy
    /// that shards weights may leave them where they are until then, so that a device need not hold all of them.
    ///
    /// # Errors
    /// If the device is absent or out of memory, or has no such dtype.
    fn place(&mut self, module: &dyn Module, device: Device, dtype: Option<Kind>) -> Result<()> {
        module.to_device(device)?;
        dtype.map_or(Ok(()), |dtype| module.to_dtype(dtype))
    }

    /// Called when the module is on its device, before its optimizers are made: all ranks start from rank 0's values. `calls`
    /// are the hooks of the calls of modules that are active in the steps of the run; those that the strategy registers stay
    /// until it removes them, such as in [`Strategy::teardown`]. A [`GradHook`](crate::ffi::GradHook) of a
    /// parameter's leaf is called when its gradient is complete.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if the modules of the ranks differ or a rank is gone.
    fn prepare(&mut self, _module: &dyn Module, _calls: &ModuleHooks) -> Result<()> {
        Ok(())
    }

    /// Makes the optimizers and schedules that the module asks for. A strategy that shards weights or optimizer states makes its own,
    /// which then also compute the norm of all gradients.
    ///
    /// # Errors
    /// As [`Optimizers::build`]; why the strategy has no such optimizer.
    fn optimizers(&mut self, asked: Optimizers, module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        asked.build(module)
    }

    /// Keys of what may differ between ranks, each for itself and those below it, such as `module` for a strategy that gives each rank
    /// a module of its own. The trainer compares everything else before it trains.
    fn allowed_differences(&self) -> Vec<String> {
        Vec::new()
    }

    /// The state that is sharded among ranks: each rank saves its shards of it, and reads them back. Hooks for checkpoints run on all
    /// ranks then.
    fn sharded_state(&self) -> Option<&dyn ShardedState> {
        None
    }

    /// Called before the forward of each training batch and before an evaluation. Unless the batch continues an accumulation
    /// window (`opens` is false), buffers become rank 0's.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn begin_forward(&mut self, _module: &dyn Module, _opens: bool) -> Result<()> {
        Ok(())
    }

    /// Called before the batches of an evaluation, with how many of each loader each rank has: ranks may have different numbers.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn begin_evaluation(&mut self, _module: &dyn Module, _num_batches: &[Vec<usize>]) -> Result<()> {
        Ok(())
    }

    /// Called before backward from `loss`. With `syncs` the gradients are to be averaged over the ranks; without it (an
    /// accumulation window is open) they stay this rank's.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn begin_backward(&mut self, loss: &Tensor, syncs: bool, votes: Votes) -> Result<()>;

    /// Called after backward, with how it went: gradients are averaged when it returns. Returns the votes of all ranks;
    /// none if this backward did not average, since they wait for one that does.
    ///
    /// # Errors
    /// Why backward failed; [`DistributedError`](crate::error::DistributedError) if a rank is gone or a parameter has no
    /// part in the loss.
    fn end_backward(&mut self, done: Result<()>) -> Result<Votes>;

    /// Called in place of [`Strategy::begin_backward`] and [`Strategy::end_backward`] if this rank's batch has no loss. That is
    /// allowed if no rank has one. With `syncs` the gradients of the window's other batches are averaged when it returns. Returns the
    /// votes of all ranks.
    ///
    /// # Errors
    /// On all ranks, if some have a loss and some have none.
    fn without_loss(&mut self, _syncs: bool, _votes: Votes) -> Result<Votes> {
        Ok(Votes::default())
    }

    /// Before an optimizer step: whether all ranks have the same gradients.
    ///
    /// # Errors
    /// If the module ran a backward pass of its own.
    fn check_averaged(&self) -> Result<()> {
        Ok(())
    }

    /// This rank's gradients of an accumulation window that may be open, by name: unsharded ones by their parameter's fqn; a
    /// strategy that shards gradients gives its shards under names of its own.
    ///
    /// # Errors
    /// libtorch's.
    fn grads(&self, module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
        Ok(grads_of(module))
    }

    /// Drops all gradients of this rank, those of an open accumulation window too.
    ///
    /// # Errors
    /// libtorch's.
    fn drop_grads(&mut self, module: &dyn Module) -> Result<()> {
        drop_grads_of(module)
    }

    /// Puts back what [`Strategy::grads`] gave on this rank, perhaps in an earlier run. Other gradients stay, such as those that
    /// [`ShardedState::load_grad`] has loaded; [`Strategy::drop_grads`] drops them.
    ///
    /// # Errors
    /// If the gradients are sharded otherwise; libtorch's.
    fn set_grads(&mut self, module: &dyn Module, grads: &[(String, Tensor)]) -> Result<()> {
        set_grads_of(module, grads)
    }

    /// What scales the loss and leaves out steps whose gradients are not finite, with this precision: of a strategy that keeps
    /// weights of 16 bits in float32, too. None unless overridden; `16-mixed` has its own
    /// ([`GradScaler`](crate::precision::GradScaler)) then.
    fn loss_scaler(&self, _precision: Precision) -> Option<LossScaler> {
        None
    }

    /// Puts the votes of all ranks together.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn agree(&self, votes: Votes) -> Result<Votes> {
        Ok(votes)
    }

    /// Called at the end of a fit or an evaluation that went well: weights that the strategy keeps are given back, so that the module
    /// is unsharded, or stay sharded until the next call ([`Strategy::gather_weights`]).
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn finish(&mut self, _module: &dyn Module) -> Result<()> {
        Ok(())
    }

    /// Whether [`Strategy::sharded_state`] is about this module, in a call or after it, so that its weights are saved as shards.
    fn keeps(&self, _module: &dyn Module) -> bool {
        self.sharded_state().is_some()
    }

    /// Unshards a module whose weights [`Strategy::finish`] has left sharded; another one stays as it is.
    ///
    /// # Collective
    /// All ranks must call it.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone; if memory is short.
    fn gather_weights(&mut self, _module: &dyn Module) -> Result<()> {
        Ok(())
    }

    /// Whether checkpoints of a run leave out frozen parameters, whose values the module has by itself. DeepSpeed's
    /// `exclude_frozen_parameters`.
    fn excludes_frozen_parameters(&self) -> bool {
        false
    }

    /// Called when a fit is over or has failed: hooks are removed.
    fn teardown(&mut self) {}
}

/// What ends the name of a shard of a gradient, also in files.
pub(super) const PART: &str = " (part";

/// The gradients of unsharded parameters.
pub(super) fn grads_of(module: &dyn Module) -> Vec<(String, Tensor)> {
    let parameters = module.named_parameters().into_iter();
    parameters.map(|(fqn, parameter)| (fqn, parameter.grad())).filter(|(_, grad)| grad.defined()).collect()
}

/// Drops the gradients of unsharded parameters.
pub(super) fn drop_grads_of(module: &dyn Module) -> Result<()> {
    Ok(ffi::clear_grads(module.parameters().iter().map(|parameter| parameter.leaf()))?)
}

/// Gives unsharded parameters these gradients.
pub(super) fn set_grads_of(module: &dyn Module, grads: &[(String, Tensor)]) -> Result<()> {
    let parameters = module.named_parameters();
    for (fqn, grad) in grads {
        if let Some((name, _)) = fqn.split_once(PART) {
            let what = format!("the gradient of {name} in an open accumulation window is sharded over ranks");
            let remedy = "resume with the strategy and the number of ranks that saved it, or from a checkpoint at the end of a window";
            return Err(ConfigError::new("ckpt_path", what, remedy).into());
        }
        if let Some((_, parameter)) = parameters.iter().find(|(name, _)| name == fqn) {
            let grad = grad.f_to_device(parameter.device())?.f_to_kind(parameter.leaf().kind())?;
            ffi::set_grad(parameter.leaf(), &grad)?;
        }
    }
    Ok(())
}

/// Makes a strategy of your own when the ranks have met; given to
/// [`TrainerBuilder::strategy`](crate::trainer::TrainerBuilder::strategy) as a value.
///
/// Any function from the ranks to a strategy is one: `.strategy(|world| Ok(Box::new(MyStrategy::new(world)) as _))`.
pub trait BuildStrategy: Send {
    /// How long ranks wait for each other until they have met; afterwards [`Strategy::timeout`] applies, if it gives one.
    fn timeout(&self) -> Duration {
        DEFAULT_TIMEOUT
    }

    /// The same as [`Strategy::allowed_differences`] for what is compared when the ranks meet, before there is a strategy:
    /// versions and the configuration.
    fn allowed_differences(&self) -> Vec<String> {
        Vec::new()
    }

    /// Makes it for these ranks, or for a process alone.
    ///
    /// # Errors
    /// What does not fit.
    fn build(self: Box<Self>, world: World) -> Result<Box<dyn Strategy>>;
}

impl<F: FnOnce(World) -> Result<Box<dyn Strategy>> + Send> BuildStrategy for F {
    fn build(self: Box<Self>, world: World) -> Result<Box<dyn Strategy>> {
        self(world)
    }
}

/// The strategy that a program asks for: by name or settings, or as a value.
pub enum StrategyChoice {
    /// By name, or by class with its settings.
    Config(StrategyConfig),
    /// This one.
    Value(Box<dyn BuildStrategy>),
}

impl fmt::Debug for StrategyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(config) => config.fmt(f),
            Self::Value(_) => f.write_str("a strategy of the program's own"),
        }
    }
}

macro_rules! choice_of_config {
    ($($given:ty),*) => {$(
        impl From<$given> for StrategyChoice {
            fn from(given: $given) -> Self {
                Self::Config(given.into())
            }
        }
    )*};
}

choice_of_config!(
    &str,
    String,
    StrategyConfig,
    StrategyClass,
    DdpConfig,
    ModelParallelStrategy,
    DeepSpeedStrategy,
    HpuDeepSpeedStrategy
);

impl<B: BuildStrategy + 'static> From<B> for StrategyChoice {
    fn from(value: B) -> Self {
        Self::Value(Box::new(value))
    }
}
