//! State that a strategy shards among ranks: what each rank saves of it, and reads back.

use tch::Tensor;

use crate::checkpoint::{Shard, ShardSpec};
use crate::error::Result;
use crate::nn::Module;
use crate::optim::{Optimizer, OptimizerState};

/// A rank's gradients of an accumulation window that may be open.
#[derive(Debug, Default)]
pub struct ShardedGrads {
    /// Unsharded gradients that are this rank's alone, by fqn.
    pub own: Vec<(String, Tensor)>,
    /// This rank's shards of the mean gradients of all ranks so far, named by fqn.
    pub shards: Vec<Shard>,
    /// Parameters, of those in `shards`, that have had a gradient on this rank.
    pub had_grad: Vec<String>,
}

/// State that is sharded among ranks. None of these functions communicates with other ranks.
pub trait ShardedState {
    /// This rank's shards of the weights, named by fqn; none of those that are unsharded and belong to no optimizer.
    ///
    /// # Errors
    /// libtorch's.
    fn save_weights(&self) -> Result<Vec<Shard>>;

    /// What this rank has of a weight if weights are sharded; `None` if each rank has all of it.
    fn weight_shard(&self, fqn: &str) -> Option<ShardSpec>;

    /// Takes the elements of [`ShardedState::weight_shard`].
    ///
    /// # Errors
    /// If the weight is in use, and so unsharded, at this moment; libtorch's.
    fn load_weight(&self, fqn: &str, values: &Tensor) -> Result<()>;

    /// What this rank has of an optimizer's states of a parameter; `None` if they are not sharded.
    fn state_shard(&self, fqn: &str) -> Option<ShardSpec>;

    /// The state of the optimizer at `index`: its numbers (those of a parameter from one rank only) and groups, and this rank's shards
    /// of what is like a parameter, all named `<kind>.<fqn>`.
    ///
    /// # Errors
    /// libtorch's.
    fn save_optimizer(&self, index: usize, optimizer: &dyn Optimizer)
    -> Result<(OptimizerState, Vec<Shard>)>;

    /// Gives an optimizer its state: numbers and groups, and the shards of [`ShardedState::state_shard`].
    ///
    /// # Errors
    /// As [`Optimizer::load_state_dict`].
    fn load_optimizer(
        &self,
        optimizer: &mut dyn Optimizer,
        state: OptimizerState,
        shards: Vec<Shard>,
    ) -> Result<()>;

    /// Gradients of an accumulation window that may be open.
    ///
    /// # Errors
    /// libtorch's.
    fn save_grads(&self, module: &dyn Module) -> Result<ShardedGrads>;

    /// What this rank has of a gradient if gradients are sharded; `None` if they are not.
    fn grad_shard(&self, fqn: &str) -> Option<ShardSpec>;

    /// Takes the elements of [`ShardedState::grad_shard`] of a parameter that has had a gradient on some rank.
    ///
    /// # Errors
    /// libtorch's.
    fn load_grad(&self, fqn: &str, values: &Tensor) -> Result<()>;
}
