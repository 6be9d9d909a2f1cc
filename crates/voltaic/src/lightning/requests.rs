//! What hooks ask of the trainer.

use std::path::PathBuf;

/// A checkpoint that a callback asks the trainer to write after its hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointRequest {
    /// Where to write it.
    pub path: PathBuf,
    /// Leave out optimizers, schedules, random states and loop positions.
    pub weights_only: bool,
    /// Make `path` a symbolic link to this checkpoint instead of writing it.
    pub link_to: Option<PathBuf>,
    /// Checkpoints to delete once this one is safely on disk.
    pub then_remove: Vec<PathBuf>,
}

/// What a callback or hook asked for.
#[derive(Debug, Default)]
pub struct Requests {
    pub(crate) stop: Option<String>,
    pub(crate) skips_epoch: bool,
    /// A hook has asked for the batch to change it.
    pub(crate) changed_batch: bool,
    pub(crate) updates_running_statistics: bool,
    pub(crate) accumulate_grad_batches: Option<u64>,
    pub(crate) checkpoints: Vec<CheckpointRequest>,
}

/// Metrics for the loggers, and their step.
pub(crate) type LoggerRow = (Vec<(String, f64)>, u64);
