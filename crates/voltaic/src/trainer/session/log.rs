//! What is logged, on its way to the loggers.

use crate::error::Result;
use crate::module::LightningModule;
use crate::trainer::session::session::Session;

impl<M: LightningModule> Session<'_, M> {
    /// Gives metrics to all loggers, with the epoch as a column unless one is called `epoch`. One that is called `step` takes
    /// the place of the step.
    pub(crate) fn log(&mut self, metrics: Vec<(String, f64)>, step: u64) -> Result<()> {
        self.log_with(metrics, step, true)
    }

    /// Gives a row of a callback to all loggers: it has the columns that the callback gives, and no epoch, as in Lightning.
    pub(crate) fn log_row(&mut self, metrics: Vec<(String, f64)>, step: u64) -> Result<()> {
        self.log_with(metrics, step, false)
    }

    fn log_with(&mut self, mut metrics: Vec<(String, f64)>, mut step: u64, has_epoch: bool) -> Result<()> {
        if let Some(index) = metrics.iter().position(|(name, _)| name == "step") {
            step = metrics.remove(index).1 as u64;
        }
        if metrics.is_empty() || self.run.at.is_sanity_check {
            return Ok(());
        }
        if has_epoch && !metrics.iter().any(|(name, _)| name == "epoch") {
            metrics.push(("epoch".to_owned(), self.run.at.progress.current_epoch as f64));
        }
        self.give_to_loggers(&metrics, step)
    }

    /// Gives a row to all loggers, unless one has failed in this call.
    pub(crate) fn give_to_loggers(&mut self, row: &[(String, f64)], step: u64) -> Result<()> {
        if self.run.engine.of_call.failure.is_some() {
            return Ok(()); // all ranks end with that
        }
        let given = self.run.loggers.iter_mut().try_for_each(|logger| logger.log_metrics(row, step));
        self.keep_failure(given)
    }

    /// Reports a mistake made in logging.
    pub(crate) fn check_logged(&mut self) -> Result<()> {
        self.run.log.metrics.take_problem().map_or(Ok(()), Err)
    }
}
