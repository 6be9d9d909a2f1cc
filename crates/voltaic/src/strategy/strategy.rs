//! The seam between the trainer and how training is spread.

use std::fmt;
use std::time::Duration;

use tch::Tensor;

use super::config::{DdpConfig, HpuDeepSpeedStrategy, StrategyClass, StrategyConfig};
use super::deepspeed::config::DeepSpeedStrategy;
use super::votes::Votes;
use crate::distributed::{DEFAULT_TIMEOUT, World};
use crate::error::Result;
use crate::nn::{Module, ModuleHooks};
use crate::optim::{ConfiguredOptimizer, Optimizers};

/// How training is spread over ranks.
///
/// # Collective
/// All ranks call [`Strategy::prepare`], [`Strategy::begin_forward`], [`Strategy::begin_backward`], [`Strategy::end_backward`] and [`Strategy::agree`] in the
/// same order.
pub trait Strategy: fmt::Debug + Send {
    /// The name that chooses it, such as `ddp`.
    fn name(&self) -> &'static str;

    /// The ranks, and which of them this process is.
    fn world(&self) -> &World;

    /// Called when the module is on its device, before its optimizers are made: all ranks start from rank 0's values. `calls`
    /// are the hooks of the calls of modules that are in force in the steps of the run; those that the strategy registers stay
    /// until it removes them, such as in [`Strategy::teardown`]. When the gradients of a part of the module are complete is told
    /// by [`UnitGrads`](crate::nn::UnitGrads).
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if the modules of the ranks differ or a rank is gone.
    fn prepare(&mut self, _module: &dyn Module, _calls: &ModuleHooks) -> Result<()> {
        Ok(())
    }

    /// Makes the optimizers and schedules that the module asks for. A strategy that divides weights or optimizer states
    /// among ranks makes its own, which then also know the norm of all gradients, and save and load the whole state.
    ///
    /// # Errors
    /// As [`Optimizers::build`]; why the strategy has no such optimizer.
    fn optimizers(&mut self, asked: Optimizers, module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        asked.build(module)
    }

    /// Which part of the data this rank takes, of how many. Ranks that hold parts of one model take the same.
    fn data_share(&self) -> (usize, usize) {
        (self.world().rank, self.world().world_size)
    }

    /// Keys of what may differ between ranks, each for itself and those below it; the trainer compares everything else that it
    /// knows of a run before it trains: `module` for a strategy that gives each rank a module of its own.
    fn allowed_differences(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether ranks hold parts of the weights or of optimizer states, so that all ranks must take part when rank 0 saves:
    /// then `state_dict` of the module and of the optimizers is called on all of them. Hooks for checkpoints run on all
    /// ranks then, too.
    fn divides_state(&self) -> bool {
        false
    }

    /// Called before the first forward of a training step and before an evaluation: buffers become rank 0's.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn begin_forward(&mut self, _module: &dyn Module) -> Result<()> {
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

    /// Before an optimizer step of a module with manual optimization: whether all ranks have the same gradients.
    ///
    /// # Errors
    /// If the module ran a backward pass of its own.
    fn check_averaged(&self) -> Result<()> {
        Ok(())
    }

    /// Puts the votes of all ranks together.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn agree(&self, votes: Votes) -> Result<Votes> {
        Ok(votes)
    }

    /// Called at the end of a fit that went well: weights that the strategy keeps are given back, so that the module is whole.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn finish(&mut self, _module: &dyn Module) -> Result<()> {
        Ok(())
    }

    /// Called when a fit is over or has failed: hooks are removed.
    fn teardown(&mut self) {}
}

/// Makes a strategy of your own when the ranks have met; given to
/// [`TrainerBuilder::strategy`](crate::trainer::TrainerBuilder::strategy) as a value.
///
/// Any function from the ranks to a strategy is one: `.strategy(|world| Ok(Box::new(MyStrategy::new(world)) as _))`.
pub trait BuildStrategy: Send {
    /// How long ranks wait for each other.
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
    DeepSpeedStrategy,
    HpuDeepSpeedStrategy
);

impl<B: BuildStrategy + 'static> From<B> for StrategyChoice {
    fn from(value: B) -> Self {
        Self::Value(Box::new(value))
    }
}
