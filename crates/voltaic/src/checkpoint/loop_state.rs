//! Where a run stands, apart from its tensors.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoint::progress::Progress;
use crate::precision::{GradScaler, LossScaler};

/// Gradients that a checkpoint holds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedGradients {
    /// They are those of each rank, for others to be added.
    pub window_is_open: bool,
    /// By optimizer: whether all are finite, if the scale of the loss is taken out of them.
    pub unscaled: Vec<Option<bool>>,
}

/// An accumulation window of which some batches are done, but not all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OpenWindow {
    /// Batches whose gradients make one step. The loss of each is divided by it.
    pub size: u64,
    /// Those that are done.
    pub done: u64,
}

/// The part of the training state that is not tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoopState {
    pub progress: Progress,
    /// What was logged in the epoch that is not over.
    pub metrics: Value,
    pub seed: u64,
    /// Training batches of an epoch and their size: what the position within an epoch means.
    pub num_training_batches: usize,
    pub batch_size: Option<usize>,
    /// Ranks among which batches were split, of which rank 0 may have saved alone. Files of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world_size: Option<usize>,
    /// Name and groups of each optimizer.
    pub optimizers: Vec<(String, Value)>,
    pub schedulers: Vec<Value>,
    /// Name and state of each callback that has some.
    pub callbacks: Vec<(String, Value)>,
    /// There with `16-mixed`.
    #[serde(default)]
    pub grad_scaler: Option<GradScaler>,
    /// There where the strategy scales the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaler: Option<LossScaler>,
    /// What is known of the gradients, with manual optimization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradients: Option<SavedGradients>,
    /// There with automatic optimization if an accumulation window is open. Files of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<OpenWindow>,
    /// Rows of each logger up to here. Files of earlier versions lack them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<u64>,
    /// State of the data module, if it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
    /// What the module gave in `on_save_checkpoint`.
    pub module: Value,
    /// Of its tensors those that were on the run's device; the others were on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub module_on_device: Vec<String>,
    /// Why the run is to stop as soon as `min_epochs` and `min_steps` are reached, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_stop: Option<String>,
    /// The Slurm job that the run was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slurm_job: Option<String>,
}
