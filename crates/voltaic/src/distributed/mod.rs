//! Ranks: who they are, how they are started, how they find each other, and what they exchange.
//!
//! [`Placement`] reads from the environment which rank this process is, or that the ranks are still to be started, which
//! `launcher` does. [`World::join`] brings the ranks together at a store and connects them to a [`ProcessGroup`], whose
//! operations all ranks call in the same order. What the operations are for is decided above: in `strategy`.

mod cluster;
mod connect;
mod cores;
mod deadline;
mod environment;
mod facts;
mod flight;
mod host;
mod launch;
mod launcher;
mod libraries;
mod mesh;
mod placement;
mod process_group;
mod rendezvous;
mod roll_call;
#[cfg(test)]
mod scale;
mod signals;
mod slurm;
mod variables;
mod world;

pub use crate::ffi::{JobSecret, ReduceOp};
pub use connect::JoinOptions;
pub use environment::ClusterEnvironment;
pub use facts::Facts;
#[doc(hidden)]
pub(crate) use flight::record::IN_BACKGROUND;
pub use flight::record::keep_record;
pub use flight::scope::{CollectiveScope, ScopeName, collective_scope};
pub(crate) use flight::watchdog::write_records_below;
pub use launch::Launch;
pub use launcher::launch;
pub(crate) use launcher::{report_config_error, wait_for_launcher};
pub(crate) use libraries::found as collective_libraries;
pub use mesh::{DeviceMesh, ParallelDims, SubMesh};
pub(crate) use placement::Wanted;
pub use placement::{Placement, RankPlacement};
pub(crate) use process_group::AbsentRanks;
pub use process_group::{ProcessGroup, Work};
pub use rendezvous::RunStore;
pub(crate) use signals::Signals;
pub use slurm::{RequeueSignal, SlurmEnvironment};
pub(crate) use slurm::{SlurmJob, keep_notice};
pub use variables::Variables;
pub use world::{World, global_rank, is_global_zero};

/// Default time that ranks wait for each other, as in PyTorch.
pub const DEFAULT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1800);
