//! Whole parameters, for optimizers that need them where ranks have parts.

use std::fmt::Debug;

use tch::Tensor;

use crate::error::Result;
use crate::nn::Parameter;

/// Makes tensors whole of which each rank has a part, as large as its part of a parameter. A strategy that divides parameters gives it
/// to optimizers ([`ParamGroupSpec::whole`](super::ParamGroupSpec::whole)).
pub trait WholeParameters: Debug + Send + Sync {
    /// The shape of the parameter that this is a part of; `None` if it is whole.
    fn shape(&self, part: &Parameter) -> Option<Vec<i64>>;

    /// The unit of the strategy that this is in: those of a unit are updated together
    /// ([`Optimizer::step_unit`](super::Optimizer::step_unit)).
    fn unit(&self, _part: &Parameter) -> usize {
        0
    }

    /// Says that tensors like this parameter will be gathered. A rank that has no part of it gets an empty gradient from now on whenever
    /// the parameter has one, so that all ranks know when to gather.
    fn claim(&self, part: &Parameter);

    /// A tensor of bfloat16 or float16 with as many elements as `part`, which is of float32, on its device: each update of `part` writes
    /// the new weights there too, rounded to nearest even, as [`Tensor::copy_`] does. An optimizer asks when it updates a part for the
    /// first time, and after its state was loaded. A part has none by default.
    fn rounded(&self, _part: &Parameter) -> Option<Tensor> {
        None
    }

    /// Whether the strategy keeps the master weight of the parameter, or will keep it from when the parameter is trained: `part` becomes
    /// float32 then. An optimizer makes no copy of its own.
    fn has_master(&self, _part: &Parameter) -> bool {
        false
    }

    /// A tensor like the parameter that `part` is a part of, from what each rank has of it: `values` on this one, with the
    /// elements of `part`. `None` on a rank that has no part.
    ///
    /// # Collective
    /// All ranks must call it, in the same order.
    ///
    /// # Errors
    /// libtorch's; [`DistributedError`](crate::error::DistributedError) if a rank is gone or late.
    fn gather(&self, part: &Parameter, values: &Tensor) -> Result<Option<Tensor>>;

    /// This rank's part of a tensor like the parameter that `part` is a part of.
    ///
    /// # Errors
    /// libtorch's.
    fn part_of(&self, part: &Parameter, whole: &Tensor) -> Result<Tensor>;
}
