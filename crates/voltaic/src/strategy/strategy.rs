//! The seam between the trainer and how training is spread.

use std::fmt;

use tch::Tensor;

use super::votes::Votes;
use crate::distributed::World;
use crate::error::Result;
use crate::nn::Module;

/// How training is spread over ranks.
///
/// # Collective
/// All ranks call [`Strategy::setup`], [`Strategy::begin_forward`], [`Strategy::begin_backward`], [`Strategy::end_backward`] and [`Strategy::agree`] in the
/// same order.
pub trait Strategy: fmt::Debug + Send {
    /// The name that chooses it, such as `ddp`.
    fn name(&self) -> &'static str;

    /// The ranks, and which of them this process is.
    fn world(&self) -> &World;

    /// Called when the module is on its device, before its optimizers are made: all ranks start from rank 0's values.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if the modules of the ranks differ or a rank is gone.
    fn setup(&mut self, _module: &dyn Module) -> Result<()> {
        Ok(())
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

    /// Called when a fit is over or has failed: hooks are removed.
    fn teardown(&mut self) {}
}
