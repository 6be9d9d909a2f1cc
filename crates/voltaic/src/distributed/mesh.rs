//! The ranks of a run as a device mesh: over which of them data is split, states are sharded, layers and tensors are divided.
//!
//! [`ParallelDims`] says how many ranks there are along each dimension. [`DeviceMesh`] has this rank's place along each, and the
//! process group of the ranks that differ from it in this dimension only. Code that reduces names the dimension:
//!
//! ```no_run
//! # use voltaic::distributed::{ParallelDims, ReduceOp, World};
//! # fn f(world: World, grad: voltaic::Tensor, partial: voltaic::Tensor) -> voltaic::error::Result<()> {
//! let world = world.with_dims(ParallelDims { dp_replicate: 2, tp: 4, ..ParallelDims::default() })?;
//! if let Some(group) = world.mesh().dp.group() {
//!     group.all_reduce(&grad, ReduceOp::Avg)?; // over the ranks that have other batches
//! }
//! if let Some(group) = world.mesh().tp.group() {
//!     group.all_reduce(&partial, ReduceOp::Sum)?; // over the ranks that have other slices of this layer
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Names and order are torchtitan's: `pp`, `dp_replicate`, `dp_shard`, `tp`. Ranks that differ in `tp` only are neighbours.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use super::process_group::ProcessGroup;
use crate::error::{ConfigError, Result};

/// How many ranks there are along each dimension of a [`DeviceMesh`]. Their product is the number of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelDims {
    /// Pipeline stages: ranks with other layers.
    pub pp: usize,
    /// Copies of the model that are trained on other batches: data parallelism as DDP's.
    pub dp_replicate: usize,
    /// Ranks with other batches that shard one copy of the states among each other: ZeRO, FSDP.
    pub dp_shard: usize,
    /// Ranks with other slices of the same layers.
    pub tp: usize,
}

impl Default for ParallelDims {
    /// One rank.
    fn default() -> Self {
        Self { pp: 1, dp_replicate: 1, dp_shard: 1, tp: 1 }
    }
}

impl fmt::Display for ParallelDims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [pp, dp_replicate, dp_shard, tp] = self.sizes();
        write!(f, "pp={pp} x dp_replicate={dp_replicate} x dp_shard={dp_shard} x tp={tp}")
    }
}

/// The dimensions in their order, as indices into [`ParallelDims::sizes`].
const PP: usize = 0;
const DP_REPLICATE: usize = 1;
const DP_SHARD: usize = 2;
const TP: usize = 3;
const NUM_DIMS: usize = 4;

impl ParallelDims {
    /// All ranks are data-parallel. Whether they shard states among each other is for the strategy to say.
    pub fn data_parallel(world_size: usize) -> Self {
        Self { dp_shard: world_size, ..Self::default() }
    }

    /// The sizes, in their order.
    fn sizes(self) -> [usize; NUM_DIMS] {
        [self.pp, self.dp_replicate, self.dp_shard, self.tp]
    }

    /// Ranks with other batches: `dp_replicate * dp_shard`.
    pub fn dp(self) -> usize {
        self.dp_replicate.saturating_mul(self.dp_shard)
    }

    /// Checks the sizes against the number of ranks.
    ///
    /// # Errors
    /// If a size is 0 or the product is not `world_size`.
    pub fn check(self, world_size: usize) -> Result<(), ConfigError> {
        let product = self.sizes().into_iter().try_fold(1_usize, usize::checked_mul);
        if product == Some(world_size) && world_size > 0 {
            return Ok(());
        }
        let product = product.map_or_else(|| "more ranks than can be counted".to_owned(), |n| n.to_string());
        let what = format!("{self} is {product}, but there are {world_size} rank(s)");
        Err(ConfigError::new(
            "device mesh",
            what,
            "choose sizes of at least 1 whose product is the number of ranks",
        ))
    }

    /// Where a rank is along each dimension.
    fn coordinates(self, rank: usize) -> [usize; NUM_DIMS] {
        let mut rest = rank;
        let mut coordinates = [0; NUM_DIMS];
        for (place, size) in coordinates.iter_mut().zip(self.sizes()).rev() {
            *place = rest % size;
            rest /= size;
        }
        coordinates
    }

    /// The groups of ranks that differ in these dimensions only, each in the order of its ranks.
    fn groups(self, along: &[usize]) -> Vec<Vec<usize>> {
        let mut groups: BTreeMap<[usize; NUM_DIMS], Vec<usize>> = BTreeMap::new();
        for rank in 0..self.sizes().into_iter().product() {
            let mut others = self.coordinates(rank);
            along.iter().for_each(|dim| others[*dim] = 0);
            groups.entry(others).or_default().push(rank);
        }
        groups.into_values().collect()
    }
}

/// The ranks along one dimension of a [`DeviceMesh`], or along several that are taken together.
#[derive(Defaults, Debug, Clone)]
pub struct SubMesh {
    /// This rank's place, from 0.
    pub rank: usize,
    /// Number of ranks.
    #[default(1)]
    pub size: usize,
    group: Option<Arc<ProcessGroup>>,
}

impl SubMesh {
    /// Their process group; `None` for a single rank.
    pub fn group(&self) -> Option<&Arc<ProcessGroup>> {
        self.group.as_ref()
    }
}

/// The ranks as a mesh (`torch.distributed.DeviceMesh`), seen from one of them.
#[derive(Debug, Clone, Default)]
pub struct DeviceMesh {
    /// The sizes of all dimensions.
    pub dims: ParallelDims,
    /// Pipeline stages.
    pub pp: SubMesh,
    /// Ranks with other batches, `dp_replicate` and `dp_shard` together: gradients and metrics are averaged over them, and data
    /// is split among them.
    pub dp: SubMesh,
    /// Ranks that hold copies of the same shards.
    pub dp_replicate: SubMesh,
    /// Ranks that shard one copy of the states.
    pub dp_shard: SubMesh,
    /// Ranks with other slices of the same layers, which get identical batches.
    pub tp: SubMesh,
}

impl DeviceMesh {
    /// The mesh of all ranks of a group. A dimension that has all of them shares this group; the others get groups of their own.
    ///
    /// # Collective
    /// All ranks must call it with the same sizes.
    ///
    /// # Errors
    /// As [`ParallelDims::check`]; as [`ProcessGroup::split`].
    pub(super) fn new(dims: ParallelDims, all: Option<&Arc<ProcessGroup>>) -> Result<Self> {
        let (rank, world_size) = all.map_or((0, 1), |all| (all.rank(), all.world_size()));
        dims.check(world_size)?;
        let along = |along: &[usize]| -> Result<SubMesh> {
            let groups = dims.groups(along);
            let own = groups.iter().find(|ranks| ranks.contains(&rank));
            let size = own.map_or(1, Vec::len);
            let place = own.and_then(|ranks| ranks.iter().position(|other| *other == rank)).unwrap_or(0);
            let group = match all {
                Some(all) if size > 1 && size == world_size => Some(all.clone()),
                Some(all) if size > 1 => all.split(&groups)?.map(Arc::new),
                _ => None,
            };
            Ok(SubMesh { rank: place, size, group })
        };
        let (pp, dp_replicate, dp_shard) = (along(&[PP])?, along(&[DP_REPLICATE])?, along(&[DP_SHARD])?);
        let dp = match (dp_replicate.size, dp_shard.size) {
            (1, _) => dp_shard.clone(),
            (_, 1) => dp_replicate.clone(),
            _ => along(&[DP_REPLICATE, DP_SHARD])?,
        };
        Ok(Self { dims, pp, dp, dp_replicate, dp_shard, tp: along(&[TP])? })
    }

    /// The process groups of all dimensions; several may share one.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Arc<ProcessGroup>> {
        [&self.pp, &self.dp, &self.dp_replicate, &self.dp_shard, &self.tp]
            .into_iter()
            .filter_map(SubMesh::group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: ParallelDims = ParallelDims { pp: 1, dp_replicate: 2, dp_shard: 2, tp: 2 };

    #[test]
    fn sizes_are_checked_against_the_number_of_ranks() {
        assert!(DIMS.check(8).is_ok() && ParallelDims::default().check(1).is_ok());
        let max = ParallelDims { dp_shard: usize::MAX, tp: 2, ..ParallelDims::default() };
        for (dims, world_size, text) in [
            (DIMS, 4, "pp=1 x dp_replicate=2 x dp_shard=2 x tp=2 is 8, but there are 4 rank(s)"),
            (ParallelDims { tp: 0, ..DIMS }, 8, "tp=0 is 0, but there are 8"),
            (ParallelDims { tp: 0, ..DIMS }, 0, "tp=0 is 0, but there are 0"),
            (max, 8, "more ranks than can be counted"),
        ] {
            let error = dims.check(world_size).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn neighbours_differ_in_tp_and_groups_partition_the_ranks() {
        assert_eq!(DIMS.groups(&[TP]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(DIMS.groups(&[DP_SHARD]), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(DIMS.groups(&[DP_REPLICATE]), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(DIMS.groups(&[DP_REPLICATE, DP_SHARD]), [[0, 2, 4, 6], [1, 3, 5, 7]]);
        assert_eq!(DIMS.groups(&[PP]).len(), 8);
    }
}
