//! Learning rate schedules of a run: when each is stepped, and with which metric.

use super::session::Session;
use crate::error::{ConfigError, Result};
use crate::module::LightningModule;
use crate::optim::{ConfiguredLrScheduler, Interval};

/// A schedule at work on one of the optimizers.
pub(super) struct ActiveScheduler {
    /// Index of the optimizer.
    pub optimizer: usize,
    pub configured: ConfiguredLrScheduler,
}

impl<M: LightningModule> Session<'_, M> {
    /// Steps the schedules of `interval` that are due. Those that watch a metric are stepped apart from the others,
    /// after validation.
    pub(super) fn step_schedulers(&mut self, interval: Interval, watch_metric: bool) -> Result<()> {
        let progress = &self.run.progress;
        let position = match interval {
            Interval::Step => progress.global_step,
            Interval::Epoch => progress.current_epoch + 1,
        };
        for ActiveScheduler { optimizer, configured } in &mut self.schedulers {
            let is_due = configured.interval == interval
                && configured.monitor.is_some() == watch_metric
                && position.is_multiple_of(configured.frequency);
            if !is_due {
                continue;
            }
            let metric = match &configured.monitor {
                Some(monitor) => Some(
                    self.run
                        .metrics
                        .callback_metric(monitor) // sync point
                        .ok_or_else(|| missing_metric(monitor, &self.run.metrics.callback_metric_names()))?,
                ),
                None => None,
            };
            configured.scheduler.step(self.optimizers[*optimizer].param_groups_mut(), metric)?;
        }
        Ok(())
    }
}

fn missing_metric(monitor: &str, known: &[String]) -> crate::Error {
    ConfigError::new(
        "lr_scheduler.monitor",
        format!("no metric `{monitor}` has been logged"),
        format!("log it, or choose one of: {}", known.join(", ")),
    )
    .into()
}
