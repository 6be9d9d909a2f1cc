//! A pass over the training data that takes the running statistics of batch normalisation again.

use crate::accelerator::rng;
use crate::data::{Batch, EpochRange};
use crate::error::Result;
use crate::module::{BatchFacts, LightningModule};
use crate::nn::{EqualBatches, reset_running_statistics};
use crate::profiler::actions;
use crate::trainer::run::loaders::FitLoaders;
use crate::trainer::session::session::Session;
use crate::trainer::session::step::Step;

impl<M: LightningModule> Session<'_, M> {
    /// Runs `training_step` on the batches of an epoch, without backward, hooks and log, if a callback has requested it.
    pub(crate) fn update_running_statistics(&mut self, loaders: &FitLoaders<M::Batch>) -> Result<()> {
        if !std::mem::take(&mut self.run.requests.updates_running_statistics) {
            return Ok(());
        }
        if !self.module.automatic_optimization() {
            tracing::warn!(
                "with manual optimization the running statistics stay those of the weights before"
            );
            return Ok(());
        }
        let rng = rng::states(self.plan.device)?;
        reset_running_statistics(self.module)?;
        self.run.log.metrics.begin_eval()?; // what is logged from here on is forgotten
        let result = self.pass(loaders);
        self.run.log.metrics.discard_eval();
        rng::set_states(&rng)?; // a checkpoint of now has the random numbers of training
        result
    }

    fn pass(&mut self, loaders: &FitLoaders<M::Batch>) -> Result<()> {
        // with grad: the step may take gradients itself, which libtorch does not survive without
        let _equal = EqualBatches::begin();
        let range = EpochRange {
            epoch: self.run.at.progress.current_epoch + 1,
            first_batch: 0,
            num_batches: Some(loaders.plan.num_training_batches),
        };
        let mut batches = loaders.train.iter(range)?;
        while let Some(batch) = self.next_batch(&mut batches, actions::NEXT_TRAINING_BATCH)? {
            let batch = self.take(batch, 0)?;
            let facts = BatchFacts {
                batch_idx: batches.next_batch_idx() - 1,
                batch_size: batch.batch_size(),
                ..BatchFacts::default()
            };
            let _loss = self.step(Step::RunningStatistics, &batch, facts, M::training_step)?;
            self.check_signals()?;
        }
        Ok(())
    }
}
