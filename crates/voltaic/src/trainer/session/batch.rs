//! Where a batch stands.

use crate::module::{LightningModule, Progress};
use crate::trainer::session::session::Session;

/// Where a batch stands in its accumulation window.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    /// Batches whose gradients make one step.
    pub size: u64,
    pub opens: bool,
    pub closes: bool,
}

impl<M: LightningModule> Session<'_, M> {
    /// Where the batch to come stands in its accumulation window. The last batch of an epoch closes it; under DeepSpeed's
    /// strategies it does not, since DeepSpeed counts batches over epochs.
    pub(crate) fn window(&self, num_training_batches: usize) -> Window {
        let size = self.accumulate_grad_batches;
        let Progress { batch_idx, .. } = self.run.at.progress;
        let at = self.batches_of_windows();
        let is_last = batch_idx as usize + 1 >= num_training_batches;
        Window {
            size,
            opens: at.is_multiple_of(size),
            closes: (at + 1).is_multiple_of(size) || (is_last && !self.windows_cross_epochs()),
        }
    }

    /// Whether the last training batch has left an accumulation window open.
    pub(crate) fn is_window_open(&self) -> bool {
        let has_batches_left = self.run.at.progress.has_batches_left(self.run.facts.num_training_batches);
        !self.batches_of_windows().is_multiple_of(self.accumulate_grad_batches)
            && (has_batches_left || self.windows_cross_epochs())
    }

    /// The batches so far that windows are counted from.
    fn batches_of_windows(&self) -> u64 {
        let Progress { batch_idx, total_batches, .. } = self.run.at.progress;
        if self.windows_cross_epochs() { total_batches } else { batch_idx }
    }

    fn windows_cross_epochs(&self) -> bool {
        self.plan.ranks.strategy.deepspeed().is_some()
    }
}
