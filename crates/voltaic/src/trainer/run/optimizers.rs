//! Optimizers and learning rate schedules of a run: which they are, when each schedule is stepped, and with which metric.

use crate::error::{ConfigError, Result};
use crate::module::LightningModule;
use crate::optim::{ActiveLrScheduler, Interval, Optimizers};
use crate::trainer::plan::contradictions;
use crate::trainer::session::gradients::Gradients;
use crate::trainer::session::hooks::{guarded, hook_error};
use crate::trainer::session::session::Session;

/// Gives a session its optimizers and schedules: those that the trainer was given, else the module's.
pub(crate) fn configure_optimizers<M: LightningModule>(session: &mut Session<M>) -> Result<()> {
    let configured: Optimizers = match session.options.optimizers.clone() {
        Some(given) => given.into(),
        None => {
            let _action = session.profile_hook("configure_optimizers")?;
            let configured = guarded(|| session.module.configure_optimizers());
            configured.map_err(|source| session.hook_error("configure_optimizers", source))?
        }
    };
    let configured = match session.plan.ranks.strategy.deepspeed() {
        Some(deepspeed) => deepspeed.optimizers(configured)?,
        None => configured,
    };
    let configured = match session.options.lr {
        Some(lr) => configured.with_lr(lr),
        None => configured,
    };
    for (index, built) in
        session.run.engine.strategy.optimizers(configured, session.module)?.into_iter().enumerate()
    {
        session.training.optimizers.push(built.optimizer);
        session
            .training
            .schedulers
            .extend(built.scheduler.map(|configured| ActiveLrScheduler { optimizer: index, configured }));
    }
    session.run.engine.of_call.gradients = Gradients::of(session.training.optimizers.len());
    if session.options.is_trial {
        session.training.schedulers.clear();
    }
    if session.options.is_own_loop {
        return Ok(());
    }
    if !session.module.automatic_optimization() {
        return Ok(contradictions::refuse_beside_manual(session.plan)?);
    }
    match session.training.optimizers.len() {
        0 => tracing::warn!("configure_optimizers gave no optimizer, so nothing is trained"),
        1 => {}
        several => {
            let what = format!("{several} optimizers with automatic optimization");
            let remedy =
                "return exactly one, with several groups if need be, or false from automatic_optimization";
            return Err(ConfigError::new("configure_optimizers", what, remedy).into());
        }
    }
    Ok(())
}

impl<M: LightningModule> Session<'_, M> {
    /// Steps the schedules of `interval` that are due: `frequency` counts the batches of the epoch, of which those without an
    /// optimizer step step no schedule, or epochs. Those that watch a metric are stepped apart from the others, after
    /// validation. With manual optimization the module steps them itself. Source: Lightning's `_update_learning_rates`.
    pub(crate) fn step_schedulers(&mut self, interval: Interval, watch_metric: bool) -> Result<()> {
        if self.training.schedulers.is_empty() || !self.module.automatic_optimization() {
            return Ok(());
        }
        let progress = &self.run.at.progress;
        let is_cut_short =
            interval == Interval::Epoch && progress.has_batches_left(self.run.facts.num_training_batches);
        let position = match interval {
            // schedules that watch a metric are stepped when the batch is counted already
            Interval::Step => progress.batch_idx + u64::from(!watch_metric),
            Interval::Epoch => progress.current_epoch + 1,
        };
        // a validation that is still to come may log the metric
        let awaits_validation = self.run.facts.num_eval_batches > 0 && progress.validation_batches.is_empty();
        for ActiveLrScheduler { optimizer, configured } in &mut self.training.schedulers {
            let is_due = configured.interval == interval
                && configured.monitor.is_some() == watch_metric
                && position.is_multiple_of(configured.frequency);
            if !is_due {
                continue;
            }
            let metric = match &configured.monitor {
                Some(monitor) => {
                    let metric = self.run.log.metrics.callback_metric(monitor); // sync point
                    match metric {
                        Some(metric) => Some(metric),
                        None if configured.strict && !is_cut_short && !awaits_validation => {
                            return Err(missing_metric(
                                monitor,
                                &self.run.log.metrics.callback_metric_names(),
                            ));
                        }
                        None => {
                            if interval == Interval::Epoch || !awaits_validation {
                                tracing::warn!(
                                    "no metric `{monitor}` has been logged, so its schedule waits"
                                );
                            }
                            continue;
                        }
                    }
                }
                None => None,
            };
            let groups = self.training.optimizers[*optimizer].param_groups_mut();
            let scheduler = configured.scheduler.as_mut();
            let _action = self.run.facts.profiling.of_module(self.module, "lr_scheduler_step")?;
            guarded(|| self.module.lr_scheduler_step(scheduler, groups, metric))
                .map_err(|source| own_error(source, &self.run.at.progress))?;
        }
        Ok(())
    }
}

/// An error of voltaic's stays what it is; one of the module's names the hook.
fn own_error(source: anyhow::Error, progress: &crate::module::Progress) -> crate::Error {
    source
        .downcast::<crate::Error>()
        .unwrap_or_else(|source| hook_error("lr_scheduler_step", progress, source))
}

fn missing_metric(monitor: &str, known: &[String]) -> crate::Error {
    ConfigError::new(
        "lr_scheduler.monitor",
        format!("no metric `{monitor}` has been logged"),
        format!("log it, or choose one of: {}", known.join(", ")),
    )
    .into()
}
