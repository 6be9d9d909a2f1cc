//! How a call ends, above all if it fails.

use crate::data::Stage;
use crate::distributed::{collective_scope, global_rank, report_config_error, wait_for_launcher};
use crate::error::{Error, Result};
use crate::module::{BatchFacts, LightningModule};
use crate::trainer::session::agree::agreed;
use crate::trainer::session::hooks::{guarded, of_callback};
use crate::trainer::session::session::Session;
use crate::trainer::state::collect::{saves_shards, snapshot};
use crate::trainer::state::write::write;

impl<M: LightningModule> Session<'_, M> {
    /// Ends the call: reports a failure to callbacks, data and loggers, and lets the profiler report.
    pub(crate) fn conclude<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.on_exception(error);
        }
        let is_resumable = self.run.at.stage == Stage::Fit && (self.run.at.has_begun || result.is_ok());
        if let Err(second) = guarded(|| Ok(self.keep_for_checkpoints(is_resumable)?)) {
            tracing::warn!("save_checkpoint will have nothing to save of this fit: {second:#}");
        }
        if result.is_err() {
            self.run.log.metrics.abandon();
        }
        let described = self.run.facts.profiling.describe();
        match (result, described) {
            (Err(error), Err(second)) => {
                tracing::warn!("the profiler could not report after the failure: {second}");
                Err(error)
            }
            (Ok(done), described) => {
                let _named = collective_scope("profiles");
                agreed(self.run.world(), "write", &self.run.facts.log_dir, described).map(|()| done)
            }
            (result, Ok(())) => result,
        }
    }

    /// Keeps what `Trainer::save_checkpoint` needs of a fit, unless it is part of a search.
    fn keep_for_checkpoints(&mut self, is_resumable: bool) -> Result<()> {
        if is_resumable && !self.options.is_trial {
            let cut_short = self.snapshot.take();
            self.run.snapshot = Some(cut_short.map_or_else(|| snapshot(self, false), Ok)?);
        }
        Ok(())
    }

    /// Whether a checkpoint is written if the run fails.
    pub(crate) fn saves_on_exception(&self) -> bool {
        !saves_shards(self.run) && self.run.callbacks.iter().any(|callback| callback.saves_on_exception())
    }

    /// Reports the failure to callbacks, the data module and loggers, and writes the checkpoints that callbacks request.
    fn on_exception(&mut self, error: &Error) {
        report_config_error(error);
        wait_for_launcher(error, || self.run.engine.signal().is_some());
        self.run.requests.checkpoints.clear();
        self.run.log.rows.clear();
        // a run that resumes a checkpoint of now continues with the end of the epoch
        self.run.at.progress.epoch_ended &= !self.is_ending_epoch;
        let facts = BatchFacts::default();
        let (mut ctx, callbacks, _) = self.lend(&facts);
        let profiling = &ctx.run.profiling;
        for callback in callbacks {
            let done = of_callback(profiling, callback.as_mut(), "on_exception", |callback| {
                callback.on_exception(&mut ctx, error);
                Ok(())
            });
            if let Err(second) = done {
                tracing::warn!("on_exception failed, too: {second:#}");
            }
        }
        self.data.on_exception(error);
        let requests = std::mem::take(&mut self.run.requests.checkpoints);
        if let Some(undo) = self.undo.take()
            && let Err(second) = undo.restore(self.module, self.run, self.plan.device)
        {
            tracing::warn!("the batch that failed could not be undone: {second}");
        }
        let is_sharded = saves_shards(self.run);
        if is_sharded && !requests.is_empty() && global_rank() == 0 {
            tracing::warn!(
                "the checkpoint after the failure is not written: ranks have shards of its state, and some may be gone; resume from the last one"
            );
        }
        for request in requests.into_iter().filter(|_| global_rank() == 0 && !is_sharded) {
            // the other ranks may be gone, and their own states with them
            if let Err(second) = self.flush_loggers().and_then(|()| write(self, &request, &mut Vec::new())) {
                tracing::warn!("the checkpoint after the failure could not be written: {second}");
            }
        }
        if let Err(second) = self.run.checkpoint_io.teardown() {
            tracing::warn!("a checkpoint from before the failure could not be written: {second}");
        }
        self.run.callbacks.iter_mut().for_each(|callback| callback.on_checkpoints_written());
        for logger in &mut self.run.loggers {
            if let Err(second) = logger.finalize(false) {
                tracing::warn!("a logger could not finish after the failure: {second}");
            }
        }
    }
}
