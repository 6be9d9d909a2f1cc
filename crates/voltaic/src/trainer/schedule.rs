//! Learning rate schedules of a run: when each is stepped, and with which metric.

use super::session::Session;
use crate::error::{ConfigError, Result};
use crate::module::LightningModule;
use crate::optim::{Interval, LrScheduler, LrSchedulerSpec};

/// A schedule at work on the optimizer of the same index.
pub(super) struct ActiveScheduler {
    pub optimizer: usize,
    pub scheduler: Box<dyn LrScheduler>,
    pub spec: LrSchedulerSpec,
}

impl<M: LightningModule> Session<'_, M> {
    /// Steps the schedules of `interval` that are due. Those that watch a metric are stepped apart from the others,
    /// after validation.
    pub(super) fn step_schedulers(&mut self, interval: Interval, watch_metric: bool) -> Result<()> {
        let progress = &self.run.progress;
        let position = match interval {
            Interval::Step if watch_metric => progress.batch_idx, // the batch is counted already
            Interval::Step => progress.batch_idx + 1,
            Interval::Epoch => progress.current_epoch + 1,
        };
        for active in &mut self.schedulers {
            let spec = &active.spec;
            let is_due = spec.interval == interval
                && active.scheduler.needs_metric() == watch_metric
                && position.is_multiple_of(spec.frequency);
            if !is_due {
                continue;
            }
            let mut metric = None;
            if watch_metric {
                let monitor = spec.monitor.as_deref().unwrap_or("val_loss");
                metric = self.run.metrics.callback_metric(monitor); // sync point
                if metric.is_none() && spec.strict {
                    return Err(missing_metric(monitor, &self.run.metrics.callback_metric_names()));
                }
                if metric.is_none() {
                    tracing::warn!("the schedule waits: no metric `{monitor}` has been logged");
                    continue;
                }
            }
            active.scheduler.step(self.optimizers[active.optimizer].param_groups_mut(), metric)?;
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
