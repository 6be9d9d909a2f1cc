//! Unsharded parameters, for optimizers that need them where ranks have shards.

use std::fmt::Debug;

use tch::Tensor;

use crate::error::Result;
use crate::nn::Parameter;

/// Unshards tensors of which each rank has a shard, as large as its shard of a parameter. A strategy that shards parameters gives it
/// to optimizers ([`ParamGroupSpec::unsharded`](super::ParamGroupSpec::unsharded)).
pub trait UnshardedParameters: Debug + Send + Sync {
    /// The shape of the parameter that this is a shard of; `None` if it is none.
    fn shape(&self, shard: &Parameter) -> Option<Vec<i64>>;

    /// The unit of the strategy that this is in: those of a unit are updated together
    /// ([`Optimizer::step_unit`](super::Optimizer::step_unit)).
    fn unit(&self, _shard: &Parameter) -> usize {
        0
    }

    /// Says that tensors like this parameter will be unsharded. A rank that has no shard of it gets an empty gradient from now on whenever
    /// the parameter has one, so that all ranks know when to unshard.
    fn claim(&self, shard: &Parameter);

    /// A tensor of bfloat16 or float16 with as many elements as `shard`, which is of float32, on its device: each update of `shard` writes
    /// the new weights there too, rounded to nearest even, as [`Tensor::copy_`] does. An optimizer asks when it updates a shard for the
    /// first time, and after its state was loaded. A shard has none by default.
    fn rounded(&self, _shard: &Parameter) -> Option<Tensor> {
        None
    }

    /// Whether the strategy keeps the master weight of the parameter, or will keep it from when the parameter is trained: `shard` becomes
    /// float32 then. An optimizer makes no copy of its own.
    fn has_master(&self, _shard: &Parameter) -> bool {
        false
    }

    /// A tensor like the parameter that `shard` is a shard of, from what each rank has of it: `values` on this one, with the
    /// elements of `shard`. `None` on a rank that has no shard.
    ///
    /// # Collective
    /// All ranks must call it, in the same order.
    ///
    /// # Errors
    /// libtorch's; [`DistributedError`](crate::error::DistributedError) if a rank is gone or late.
    fn unshard(&self, shard: &Parameter, values: &Tensor) -> Result<Option<Tensor>>;

    /// This rank's shard of a tensor like the parameter that `shard` is a shard of.
    ///
    /// # Errors
    /// libtorch's.
    fn shard_of(&self, shard: &Parameter, unsharded: &Tensor) -> Result<Tensor>;
}
