//! Tensor parallelism: the ranks of a group hold slices of the same layers.
//!
//! [`parallelize_module`] divides the layers of a module in place, by a [`ParallelPlan`] or by rules for names (`auto_tp`). A layer
//! keeps how it is divided (`mode`), a parameter which slice it is (`shard`); `regions` are the collectives around a layer, forward and
//! backward. Source: `torch.distributed.tensor.parallel`; [Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053).

pub(super) mod auto_tp;
pub(super) mod mode;
pub(super) mod parallelize;
pub(super) mod plan;
pub(super) mod regions;
pub(super) mod shard;

pub(crate) use auto_tp::{InjectionPolicy, Unit, auto_tp, by_policy};
pub use parallelize::parallelize_module;
pub(crate) use parallelize::{Values, has_dropout, is_even, make_whole, parallelize};
pub use plan::{ColwiseParallel, ParallelPlan, ParallelStyle, RowwiseParallel};
pub use shard::TensorShard;
