//! Which rank a process is, and where the ranks meet.

use std::borrow::Cow;

use super::environment::ClusterEnvironment;
use super::launch::Launch;
use crate::error::{DistributedError, Error, Problem};
use crate::ffi::JobSecret;

/// What the configuration asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Ranks per node.
    pub devices: usize,
    /// `devices` was not written, so that the launcher's number holds.
    pub is_auto: bool,
    pub num_nodes: usize,
    /// A process group is needed even for one rank.
    pub is_distributed: bool,
    /// A rank that fails is started again, so a launcher must supervise it.
    pub restarts: bool,
}

/// What this process is to a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// The only process.
    Single,
    /// The launcher: the ranks of this node are to be started.
    Launcher(Launch),
    /// One of the ranks.
    Rank(RankPlacement),
}

/// Which rank a process is, and where the ranks meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlacement {
    /// What started it.
    pub environment: ClusterEnvironment,
    /// Global rank.
    pub rank: usize,
    /// Ranks on all nodes.
    pub world_size: usize,
    /// Rank within the node.
    pub local_rank: usize,
    /// Number of the node.
    pub node_rank: usize,
    /// Host of the store: a loopback address if all ranks are on one host.
    pub master_addr: String,
    /// Port of the store; 0 with a single rank.
    pub master_port: u16,
    /// This rank is the store's server.
    pub hosts_store: bool,
    /// voltaic's launcher, if that has started this rank: a text that no other has.
    pub launcher: Option<String>,
    /// torchrun's name of the run, if that has started this rank.
    pub elastic_run: Option<String>,
    /// The secret of this job's ranks; without it, every process that reaches the store is trusted.
    pub secret: Option<JobSecret>,
    /// How often this rank's launcher has started it again. Launchers of other nodes may count otherwise.
    pub attempt: u64,
}

impl RankPlacement {
    /// Whether ranks are started again after a failure.
    pub(super) fn may_come_back(&self) -> bool {
        self.launcher.is_some() || self.elastic_run.is_some()
    }
}

/// The error of a rank that does not come together with the others.
pub(super) fn refuse(
    placement: &RankPlacement,
    reason: impl Into<String>,
    remedy: impl Into<Cow<'static, str>>,
) -> Error {
    DistributedError::Rendezvous {
        rank: placement.rank,
        world_size: placement.world_size,
        address: format!("{}:{}", placement.master_addr, placement.master_port),
        problem: Problem::new(reason, remedy),
    }
    .into()
}
