//! Ends training when its time is over.

use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::time_span::TimeSpan;
use crate::error::ConfigError;
use crate::lightning::Callback;
use crate::module::{Hook, HookContext};
use crate::nn::Module;
use crate::optim::Interval;

/// How long a run may train.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TimerConfig {
    /// Time for training, validation within it included: `DD:HH:MM:SS`, or `{hours: 12}`. No limit unless set.
    pub duration: Option<TimeSpan>,
    /// When to look at the clock: after each `step` or `epoch`. `step` unless set.
    pub interval: Option<Interval>,
    /// Log a line when the time is over.
    pub verbose: Option<bool>,
}

/// Asks the run to stop when it has trained for so long; a resumed run has the time that is left.
/// Source: Lightning's `Timer`.
#[derive(Debug)]
pub struct Timer {
    limit: Option<Duration>,
    interval: Interval,
    verbose: bool,
    /// Training time of the runs before this one.
    before: Duration,
    started: Option<Instant>,
    /// Set when training has ended.
    trained: Option<Duration>,
}

impl Timer {
    /// A limit for training, looked at after each batch.
    pub fn new(limit: Duration) -> Self {
        Self { limit: Some(limit), ..Self::unlimited() }
    }

    fn unlimited() -> Self {
        Self {
            limit: None,
            interval: Interval::Step,
            verbose: true,
            before: Duration::ZERO,
            started: None,
            trained: None,
        }
    }

    /// From its configuration.
    ///
    /// # Errors
    /// [`ConfigError`] if the duration is none.
    pub fn from_config(config: TimerConfig) -> Result<Self, ConfigError> {
        let limit = config.duration.map(|span| span.duration("Timer.duration")).transpose()?;
        Ok(Self {
            limit,
            interval: config.interval.unwrap_or(Interval::Step),
            verbose: config.verbose.unwrap_or(true),
            ..Self::unlimited()
        })
    }

    /// Time spent in training, that of the run before a checkpoint included.
    pub fn time_elapsed(&self) -> Duration {
        let now = self.trained.or_else(|| self.started.map(|started| started.elapsed()));
        self.before + now.unwrap_or_default()
    }

    /// Time left; `None` without a limit.
    pub fn time_remaining(&self) -> Option<Duration> {
        Some(self.limit?.saturating_sub(self.time_elapsed()))
    }

    fn check(&self, ctx: &mut HookContext) {
        if self.time_remaining() != Some(Duration::ZERO) {
            return;
        }
        let elapsed = self.time_elapsed().as_secs();
        if self.verbose {
            tracing::info!("the time for training is over after {elapsed} s");
        }
        ctx.request_stop(format!("the time for training is over after {elapsed} s"));
    }
}

impl Callback for Timer {
    fn state_dict(&self) -> Option<Value> {
        Some(json!({ "time_elapsed": { "train": self.time_elapsed().as_secs_f64() } }))
    }

    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()> {
        let seconds = state["time_elapsed"]["train"].as_f64().unwrap_or(0.0);
        self.before = Duration::try_from_secs_f64(seconds)?;
        Ok(())
    }

    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        match hook {
            Hook::OnFitStart => {
                (self.started, self.trained) = (None, None);
                self.check(ctx); // the time may have been over when the checkpoint was written
            }
            Hook::OnTrainStart => self.started = Some(Instant::now()),
            Hook::OnTrainBatchEnd if self.interval == Interval::Step && self.limit.is_some() => {
                self.check(ctx)
            }
            Hook::OnTrainEpochEnd if self.interval == Interval::Epoch && self.limit.is_some() => {
                self.check(ctx)
            }
            Hook::OnTrainEnd => self.trained = self.started.map(|started| started.elapsed()),
            _ => {}
        }
        Ok(())
    }
}
