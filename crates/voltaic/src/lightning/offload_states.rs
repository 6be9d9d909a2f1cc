//! States in memory of the host between phases of training, for hooks.

use super::hook_context::HookContext;
use crate::error::{ConfigError, Result};
use crate::optim::{OffloadState, OffloadStates};

impl HookContext<'_> {
    /// Moves states of the fit to memory of the host, so that the device has room for something else between two phases, such as a
    /// large evaluation or another model. DeepSpeed's `engine.offload_states`; with every strategy.
    ///
    /// ```
    /// # use voltaic::module::HookContext;
    /// # use voltaic::optim::OffloadState;
    /// fn on_train_epoch_end(ctx: &mut HookContext) -> anyhow::Result<()> {
    ///     ctx.offload_states([OffloadState::OptimStates, OffloadState::HpParams])?;
    ///     // what needs the room
    ///     ctx.reload_states()?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// The states are those of the optimizers and of the parameters that they have; with ZeRO frozen weights, too. What is on the host
    /// anyway stays there, and a state that there is none of moves nothing. They come back by [`HookContext::reload_states`], or by
    /// themselves: the weights for the next batch of any kind, the others for the next training batch or step. What is read meanwhile is
    /// read on the host: checkpoints, state dicts, values by name. No bit of training changes.
    ///
    /// # Errors
    /// [`ConfigError`] within a step, with `trainer.graph` or `trainer.compile`, and outside a fit; if one of the optimizers does not do so
    /// ([`Optimizer::offload_states`](crate::optim::Optimizer::offload_states)); if memory of the host is short.
    pub fn offload_states(&mut self, states: impl Into<OffloadStates>) -> Result<()> {
        let refuse = |what: String, remedy: &'static str| {
            Err(ConfigError::new("ctx.offload_states", what, remedy).into())
        };
        if self.training.is_in_step {
            let what = format!("{} is a part of a step, which needs all states", self.log.metrics.hook());
            return refuse(what, "call it between batches, such as in on_train_epoch_end");
        }
        if self.training.optimizers.is_empty() {
            return refuse("there are no optimizers".to_owned(), "call it in a hook of a fit");
        }
        if let Some(key) = &self.run.graph {
            let what = format!("{key}: graphs have the places of states in memory");
            return refuse(what, "use trainer.graph=off, and no trainer.compile");
        }
        let states = states.into();
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.offload_states(&states))
    }

    /// Moves all states back that [`HookContext::offload_states`] has moved. Does nothing if none are away.
    ///
    /// # Errors
    /// If memory of the device is short.
    pub fn reload_states(&mut self) -> Result<()> {
        let mut optimizers = self.training.optimizers.iter_mut();
        optimizers.try_for_each(|optimizer| optimizer.reload_states(&OffloadState::ALL))
    }
}
