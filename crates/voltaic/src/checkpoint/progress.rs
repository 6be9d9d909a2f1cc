//! Where a run stands.

/// Where a run stands; saved in every checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// The epoch in progress, from 0.
    pub current_epoch: u64,
    /// Optimizer steps done.
    pub global_step: u64,
    /// Batches of the current epoch done.
    pub batch_idx: u64,
    /// Batches done in all epochs.
    pub total_batches: u64,
    /// The current epoch is over: its end hooks have run.
    pub epoch_ended: bool,
    /// A validation after the batch done last has begun and is not over.
    #[serde(default)]
    pub validation_is_open: bool,
    /// Schedules by step that follow a metric have not been stepped since the last optimizer step.
    #[serde(default)]
    pub schedules_are_open: bool,
    /// Batches of each validation loader done in all epochs: the x-axis of what validation steps log.
    #[serde(default)]
    pub validation_batches: Vec<u64>,
    /// Batches that ended with an optimizer step: the x-axis of the loggers. With manual optimization, all batches.
    #[serde(default)]
    pub batches_that_stepped: u64,
}

impl Progress {
    /// Goes on to the epoch after one that is over.
    pub(crate) fn enter_next_epoch(&mut self) {
        if self.epoch_ended {
            self.current_epoch += 1;
            self.batch_idx = 0;
            self.epoch_ended = false;
        }
    }

    /// Whether batches of the current epoch are left.
    pub(crate) fn has_batches_left(&self, num_training_batches: usize) -> bool {
        (self.batch_idx as usize) < num_training_batches
    }
}
