//! Ends training when a metric stops improving.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use voltaic_macros::Defaults;

use super::model_checkpoint::Mode;
use crate::error::{ConfigError, ConfigProblem};
use crate::lightning::Callback;
use crate::module::HookContext;
use crate::nn::Module;

/// When [`EarlyStopping`] stops a run.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// Metric to look at, such as `val_loss`. Must be set.
    pub monitor: String,
    /// A change of this size or less is not an improvement.
    pub min_delta: f64,
    /// Checks in a row without improvement before the run stops.
    #[default(3)]
    pub patience: u64,
    /// Log a line at each improvement, and when a missing metric is left out.
    pub verbose: bool,
    /// Which direction of the metric is better: `min` or `max`.
    pub mode: Mode,
    /// A missing metric is an error, unless training ends within its epoch; otherwise the check is left out.
    #[default(true)]
    pub strict: bool,
    /// Stop when the metric is NaN or infinite.
    #[default(true)]
    pub check_finite: bool,
    /// Stop at once when the metric is better than this.
    pub stopping_threshold: Option<f64>,
    /// Stop at once when the metric is worse than this.
    pub divergence_threshold: Option<f64>,
    /// Check at the end of the training epoch rather than after validation; decided by the run unless set.
    pub check_on_train_epoch_end: Option<bool>,
    /// Log those lines on rank 0 only.
    pub log_rank_zero_only: bool,
}

/// Why a run was stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoppingReason {
    /// It was not.
    #[default]
    NotStopped,
    /// The metric is better than `stopping_threshold`.
    StoppingThreshold,
    /// The metric is worse than `divergence_threshold`.
    DivergenceThreshold,
    /// No improvement for `patience` checks.
    PatienceExhausted,
    /// The metric is NaN or infinite.
    NonFiniteMetric,
}

/// What is saved.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct State {
    wait_count: u64,
    stopped_epoch: u64,
    /// `None` before the first check.
    best_score: Option<f64>,
    stopping_reason: StoppingReason,
    stopping_reason_message: Option<String>,
}

/// Asks the run to stop when a metric stops improving; see [`EarlyStoppingConfig`]. A `fast_dev_run` is not stopped.
///
/// `min_epochs` and `min_steps` delay the stop. A new best value before they are reached cancels it; Lightning keeps it. A resumed run
/// that was stopped trains nothing, unless `patience` is larger now. Source: Lightning's `EarlyStopping`.
#[derive(Debug)]
pub struct EarlyStopping {
    config: EarlyStoppingConfig,
    state: State,
}

impl EarlyStopping {
    /// Stops when `monitor` has not become smaller at 3 checks in a row.
    ///
    /// # Errors
    /// [`ConfigError`] if the name is empty.
    pub fn monitor(monitor: impl Into<String>) -> Result<Self, ConfigError> {
        Self::new(EarlyStoppingConfig { monitor: monitor.into(), ..EarlyStoppingConfig::default() })
    }

    /// From its configuration.
    ///
    /// # Errors
    /// [`ConfigError`] with all invalid settings.
    pub fn new(config: EarlyStoppingConfig) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, what: String, remedy: &'static str| {
            problems.push(ConfigProblem::new(format!("EarlyStopping.{key}"), what, remedy));
        };
        if config.monitor.is_empty() {
            refuse("monitor", "no metric is named".to_owned(), "name one that is logged, such as val_loss");
        }
        let numbers = [
            ("min_delta", Some(config.min_delta)),
            ("stopping_threshold", config.stopping_threshold),
            ("divergence_threshold", config.divergence_threshold),
        ];
        for (key, number) in numbers {
            if number.is_some_and(f64::is_nan) {
                refuse(key, "NaN compares with nothing".to_owned(), "use a number");
            }
        }
        if problems.is_empty() {
            Ok(Self { config, state: State::default() })
        } else {
            Err(ConfigError { problems })
        }
    }

    /// Why it has stopped the run.
    pub fn stopping_reason(&self) -> StoppingReason {
        self.state.stopping_reason
    }

    /// The epoch in which it has stopped the run; 0 if it has not.
    pub fn stopped_epoch(&self) -> u64 {
        self.state.stopped_epoch
    }

    /// Whether it checks at the end of the training epoch rather than after validation.
    fn checks_on_train_epoch_end(&self, ctx: &HookContext) -> bool {
        let facts = ctx.facts();
        self.config
            .check_on_train_epoch_end
            .unwrap_or(facts.check_val_every_n_epoch == Some(1) && facts.validates_once_per_epoch)
    }

    /// Judges the metric's value of now, and requests a stop or takes it back.
    fn check(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if ctx.facts().fast_dev_run {
            return Ok(());
        }
        let tells = self.config.verbose && (ctx.is_global_zero() || !self.config.log_rank_zero_only);
        let monitor = &self.config.monitor;
        let Some(current) = ctx.metric(monitor) else {
            let known = ctx.metric_names().join(", ");
            let text = format!(
                "EarlyStopping.monitor: no metric `{monitor}` has been logged; choose one of: {known}"
            );
            anyhow::ensure!(!self.config.strict, "{text}, or set strict=false");
            if tells {
                tracing::warn!("{text}");
            }
            return Ok(());
        };
        let stop = self.judge(current, tells);
        let is_best = stop.is_none() && self.state.wait_count == 0;
        if (is_best || stop.is_some())
            && let Some(reason) = &self.state.stopping_reason_message
            && ctx.withdraw_stop(reason)
            && is_best
        {
            let monitor = &self.config.monitor;
            tracing::info!("{monitor} = {current} is the best so far, so the stop is taken back: {reason}");
            (self.state.stopping_reason, self.state.stopped_epoch) = (StoppingReason::NotStopped, 0);
            self.state.stopping_reason_message = None;
        }
        if let Some((reason, text)) = stop {
            self.state.stopping_reason = reason;
            self.state.stopping_reason_message = Some(text.clone());
            self.state.stopped_epoch = ctx.current_epoch();
            ctx.request_stop(text);
        }
        Ok(())
    }

    /// Takes a value in; returns why to stop, if so.
    fn judge(&mut self, current: f64, tells: bool) -> Option<(StoppingReason, String)> {
        let EarlyStoppingConfig { monitor, mode, min_delta, patience, .. } = &self.config;
        let best = self.state.best_score;
        if self.config.check_finite && !current.is_finite() {
            let text = format!("{monitor} = {current} is not finite");
            return Some((StoppingReason::NonFiniteMetric, text));
        }
        if let Some(threshold) = self.config.stopping_threshold.filter(|&t| mode.is_better(current, t)) {
            let text = format!("{monitor} = {current} has reached stopping_threshold {threshold}");
            return Some((StoppingReason::StoppingThreshold, text));
        }
        if let Some(threshold) = self.config.divergence_threshold.filter(|&t| mode.is_better(t, current)) {
            let text = format!("{monitor} = {current} is worse than divergence_threshold {threshold}");
            return Some((StoppingReason::DivergenceThreshold, text));
        }
        let delta = match mode {
            Mode::Min => -min_delta.abs(),
            Mode::Max => min_delta.abs(),
        };
        if mode.is_better(current - delta, best.unwrap_or(mode.worst())) {
            if tells {
                tracing::info!("{monitor} has improved to {current}");
            }
            self.state.best_score = Some(current);
            self.state.wait_count = 0;
            return None;
        }
        self.state.wait_count += 1;
        (self.state.wait_count >= *patience).then(|| {
            let best = best.map_or("nothing".to_owned(), |best| best.to_string());
            let text = format!(
                "{monitor} has not improved in the last {} checks; its best was {best}",
                self.state.wait_count
            );
            (StoppingReason::PatienceExhausted, text)
        })
    }
}

impl Callback for EarlyStopping {
    fn state_key(&self) -> String {
        format!("EarlyStopping{{monitor={}, mode={:?}}}", self.config.monitor, self.config.mode)
    }

    fn runs_after_module(&self) -> bool {
        true
    }

    fn has_ended_run(&self) -> Option<String> {
        let State { wait_count, stopping_reason, stopping_reason_message, .. } = &self.state;
        let goes_on = match stopping_reason {
            StoppingReason::NotStopped => true,
            StoppingReason::PatienceExhausted => *wait_count < self.config.patience,
            _ => false,
        };
        stopping_reason_message.clone().filter(|_| !goes_on)
    }

    fn state_dict(&self) -> Option<Value> {
        serde_json::to_value(&self.state).ok()
    }

    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()> {
        self.state = serde_json::from_value(state.clone())?;
        Ok(())
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let never_came = ctx.is_cut_short() && ctx.metric(&self.config.monitor).is_none();
        if self.checks_on_train_epoch_end(ctx) && !never_came {
            self.check(ctx)?;
        }
        Ok(())
    }

    fn on_validation_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if ctx.is_training() && !ctx.is_sanity_check() && !self.checks_on_train_epoch_end(ctx) {
            self.check(ctx)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of values looked at, and why the run stopped, as Lightning 2.6.6 gives them.
    #[test]
    fn it_stops_when_lightning_stops() {
        type Change = fn(&mut EarlyStoppingConfig);
        let cases: [(&[f64], Change, usize, StoppingReason); 8] = [
            (&[1.0, 0.9, 0.95, 0.95, 0.96, 0.1], |_| {}, 5, StoppingReason::PatienceExhausted),
            (&[1.0, 0.9, 0.8], |_| {}, 3, StoppingReason::NotStopped),
            (&[1.0, 0.95, 0.9, 0.85], |c| c.min_delta = 0.1, 4, StoppingReason::NotStopped),
            (&[1.0, 0.95, 0.92, 0.91], |c| c.min_delta = 0.1, 4, StoppingReason::PatienceExhausted),
            (&[1.0, f64::NAN], |_| {}, 2, StoppingReason::NonFiniteMetric),
            (&[1.0, 0.2, 0.1], |c| c.stopping_threshold = Some(0.3), 2, StoppingReason::StoppingThreshold),
            (&[1.0, 7.0], |c| c.divergence_threshold = Some(5.0), 2, StoppingReason::DivergenceThreshold),
            (
                &[0.1, 0.2, 0.2, 0.1],
                |c| (c.mode, c.patience) = (Mode::Max, 2),
                4,
                StoppingReason::PatienceExhausted,
            ),
        ];
        for (values, change, seen, expected) in cases {
            let mut config = EarlyStoppingConfig { monitor: "x".to_owned(), ..Default::default() };
            change(&mut config);
            let mut callback = EarlyStopping::new(config).unwrap();
            let stop = values.iter().position(|&value| {
                let stop = callback.judge(value, false);
                callback.state.stopping_reason = stop.map_or(StoppingReason::NotStopped, |stop| stop.0);
                callback.state.stopping_reason != StoppingReason::NotStopped
            });
            assert_eq!(stop.map_or(values.len(), |index| index + 1), seen, "{values:?}");
            assert_eq!(callback.state.stopping_reason, expected, "{values:?}");
        }
    }

    #[test]
    fn it_has_to_have_a_metric() {
        let error = EarlyStopping::new(EarlyStoppingConfig::default()).unwrap_err().to_string();
        assert!(error.contains("EarlyStopping.monitor") && error.contains("; name one"), "{error}");
    }
}
