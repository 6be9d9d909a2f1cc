//! Which of how many ranks this process is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tch::Tensor;
use voltaic_macros::Defaults;

use super::connect::JoinOptions;
use super::facts::{Facts, differences};
use super::mesh::{DeviceMesh, ParallelDims};
use super::placement::RankPlacement;
use super::process_group::ProcessGroup;
use super::rendezvous::{self, Joined, RunStore};
use super::roll_call::Terms;
use crate::device::Device;
use crate::error::{DistributedError, Result};

/// Rank of this process, 0 before it joins others.
static RANK: AtomicUsize = AtomicUsize::new(0);

/// Global rank of this process: 0 unless it has joined others.
pub fn global_rank() -> usize {
    RANK.load(Ordering::Relaxed)
}

/// Whether this process is the one that prints and writes files: rank 0, or the only one.
pub fn is_global_zero() -> bool {
    global_rank() == 0
}

/// The ranks of a run, and which of them this process is.
///
/// Of a process alone it is rank 0 of 1 without a group, and nothing is exchanged.
#[derive(Defaults, Debug, Clone)]
pub struct World {
    /// Global rank of this process.
    pub rank: usize,
    /// Ranks on all nodes.
    #[default(1)]
    pub world_size: usize,
    /// Rank within the node.
    pub local_rank: usize,
    /// Number of the node.
    pub node_rank: usize,
    /// How often the ranks have been started again after a failure; the same on all ranks.
    pub attempt: u64,
    group: Option<Arc<ProcessGroup>>,
    mesh: DeviceMesh,
    store: Option<Arc<RunStore>>,
    hosted_elastic_run: Option<String>,
}

impl World {
    /// Joins the other ranks; returns when all are connected.
    ///
    /// # Errors
    /// [`DistributedError::Rendezvous`](crate::error::DistributedError::Rendezvous) if they do not come within the
    /// time-out or do not fit; [`ConfigError`](crate::error::ConfigError) if there is no back end for the device.
    pub fn join(placement: &RankPlacement, device: Device, timeout: Duration) -> Result<Self> {
        Self::join_alike(placement, JoinOptions { device, timeout }, Facts::default(), &[])
    }

    /// [`World::join`], if all ranks bring the same `facts`. Those of the `allowed` keys, and below them, may differ. The
    /// versions of voltaic and of libtorch (keys `voltaic` and `libtorch`) and the library of the collectives (`backend`) are
    /// compared in any case.
    ///
    /// # Errors
    /// As [`World::join`]; on all ranks if facts differ, with the first of them by key, both values and both ranks.
    pub fn join_alike(
        placement: &RankPlacement,
        options: JoinOptions,
        facts: Facts,
        allowed: &[String],
    ) -> Result<Self> {
        let terms = Terms { facts, allowed: allowed.to_vec() };
        let Joined { group, run, attempt } = rendezvous::join(placement, &options, terms)?;
        RANK.store(placement.rank, Ordering::Relaxed);
        let group = Arc::new(group);
        Ok(Self {
            rank: placement.rank,
            world_size: placement.world_size,
            local_rank: placement.local_rank,
            node_rank: placement.node_rank,
            attempt,
            mesh: DeviceMesh::new(ParallelDims::data_parallel(placement.world_size), Some(&group))?,
            group: Some(group),
            store: Some(Arc::new(run)),
            hosted_elastic_run: placement.elastic_run.clone().filter(|_| placement.hosts_store),
        })
    }

    /// Compares the ranks.
    ///
    /// # Collective
    /// All ranks must call it.
    ///
    /// # Errors
    /// [`DistributedError::Different`] on all ranks if their `facts` differ in other keys than the `allowed` ones and those
    /// below them; [`DistributedError::Collective`].
    pub fn check_alike(&self, facts: &Facts, allowed: &[String]) -> Result<()> {
        let Some(group) = self.peers() else { return Ok(()) };
        let digest = Tensor::f_from_slice(&facts.digest())?;
        let digests: Vec<Vec<u8>> = Vec::try_from(&group.all_gather(&digest)?)?;
        if digests.iter().all(|digest| *digest == digests[0]) {
            return Ok(());
        }
        let mut all = group.all_gather_object(facts)?.into_iter().enumerate();
        let Some((_, first)) = all.next() else { return Ok(()) };
        match differences(&first, &all.collect::<Vec<_>>(), allowed) {
            None => Ok(()),
            Some(what) => Err(DistributedError::Different { rank: self.rank, what }.into()),
        }
    }

    /// A single process that its launcher restarts if it fails.
    ///
    /// # Errors
    /// [`DistributedError::Rendezvous`](crate::error::DistributedError::Rendezvous) if the launcher's store does not
    /// answer within `timeout`.
    pub fn supervised(placement: &RankPlacement, timeout: Duration) -> Result<Self> {
        let (_, run) = rendezvous::open_group(placement, timeout)?;
        Ok(Self { attempt: placement.attempt, store: Some(Arc::new(run)), ..Self::default() })
    }

    /// Whether this is the rank that prints and writes files.
    pub fn is_global_zero(&self) -> bool {
        self.rank == 0
    }

    /// The group of all ranks; `None` for a process alone.
    pub fn group(&self) -> Option<&Arc<ProcessGroup>> {
        self.group.as_ref()
    }

    /// The group of all ranks, if there are several.
    pub(crate) fn peers(&self) -> Option<&Arc<ProcessGroup>> {
        self.group.as_ref().filter(|_| self.world_size > 1)
    }

    /// The ranks as a mesh: all of them along its data-parallel dimension, unless [`World::with_dims`] has said otherwise.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The same ranks as a mesh of these sizes, with a process group for each dimension that has some of them.
    ///
    /// # Collective
    /// All ranks must call it with the same sizes.
    ///
    /// # Errors
    /// As [`ParallelDims::check`]; as [`ProcessGroup::split`].
    pub fn with_dims(self, dims: ParallelDims) -> Result<Self> {
        if dims == self.mesh.dims {
            return Ok(self);
        }
        let mesh = DeviceMesh::new(dims, self.group.as_ref())?;
        Ok(Self { mesh, ..self })
    }

    /// Changes how long ranks wait for each other, in the group of all and in those of the mesh. All ranks are to set the same.
    ///
    /// # Errors
    /// The back end's.
    pub(crate) fn set_timeout(&self, timeout: Duration) -> Result<()> {
        self.group.iter().chain(self.mesh.groups()).try_for_each(|group| group.set_timeout(timeout))
    }

    /// What ranks, also those started again, can leave for each other; `None` for a process alone.
    pub fn store(&self) -> Option<&RunStore> {
        self.store.as_deref()
    }

    /// torchrun's name of the run, on the rank whose end is the end of the store although it may be started again.
    pub(crate) fn hosted_elastic_run(&self) -> Option<&str> {
        self.hosted_elastic_run.as_deref()
    }

    /// Returns when all ranks have called it; at once for a process alone.
    ///
    /// # Collective
    /// All ranks must call it.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective).
    pub fn barrier(&self) -> Result<()> {
        self.group.as_ref().map_or(Ok(()), |group| group.barrier())
    }

    /// The value of rank 0; of this process if it is alone.
    ///
    /// # Collective
    /// All ranks must call it.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective).
    pub fn of_rank_zero<T: serde::Serialize + serde::de::DeserializeOwned>(&self, value: T) -> Result<T> {
        match self.peers() {
            Some(group) => group.broadcast_object(&value, 0),
            None => Ok(value),
        }
    }
}
