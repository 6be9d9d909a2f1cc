//! Training states that are kept for checkpoints to come.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, TrainingState};
use crate::module::{MetricsState, Progress};
use crate::precision::GradScaler;

/// The part of the training state that is not tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoopState {
    pub(crate) progress: Progress,
    pub(crate) metrics: MetricsState,
    pub(crate) seed: u64,
    /// Training batches of an epoch and their size: what the position within an epoch means.
    pub(crate) num_training_batches: usize,
    pub(crate) batch_size: Option<usize>,
    /// Name and groups of each optimizer.
    pub(crate) optimizers: Vec<(String, Value)>,
    pub(crate) schedulers: Vec<Value>,
    /// Name and state of each callback that has some.
    pub(crate) callbacks: Vec<(String, Value)>,
    /// There with `16-mixed`.
    #[serde(default)]
    pub(crate) grad_scaler: Option<GradScaler>,
    /// State of the data module, if it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) data: Option<Value>,
    /// What the module gave in `on_save_checkpoint`.
    pub(crate) module: Value,
    /// Of its tensors those that were on the run's device; the others were on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) module_on_device: Vec<String>,
}

/// A run as it was when training was cut short. Checkpoints that are written later hold this, so that a resumed run does
/// the rest of the epoch as if it had not been stopped.
pub(crate) enum Frozen {
    /// Of rank 0: all that a checkpoint holds, on the host.
    Whole(Box<Checkpoint>),
    /// Of another rank: what it has to itself, as it is sent to rank 0.
    Own(Vec<u8>),
}

/// What `Trainer::save_checkpoint` writes of a fit that is over.
pub(crate) enum AfterFit {
    /// Training was cut short.
    Frozen(Frozen),
    /// Of rank 0: all but what callbacks, data and module add, on the host.
    Whole(Box<(LoopState, TrainingState)>),
    /// Of another rank.
    Own(Vec<u8>),
}
