//! Optimizer and schedule given to the trainer, in place of the module's own.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::optim::{Interval, LrSchedulerConfig, LrSchedulerSpec, OptimizerConfig, Optimizers};

/// A schedule, and when it is stepped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LrSchedulerSettings {
    /// The schedule.
    #[serde(flatten)]
    pub scheduler: LrSchedulerConfig,
    /// After what it is stepped: `step` or `epoch`.
    #[serde(default)]
    pub interval: Interval,
    /// How many intervals pass from one step of the schedule to the next.
    #[serde(default = "one")]
    pub frequency: u64,
    /// Metric that the schedule follows, for ReduceLROnPlateau.
    #[serde(default)]
    pub monitor: Option<String>,
    /// Whether a missing metric is an error; otherwise the schedule waits for it.
    #[serde(default = "yes")]
    pub strict: bool,
    /// Name under which the learning rate is logged.
    #[serde(default)]
    pub name: Option<String>,
}

fn one() -> u64 {
    1
}

fn yes() -> bool {
    true
}

impl From<LrSchedulerConfig> for LrSchedulerSettings {
    /// Stepped after each epoch.
    fn from(scheduler: LrSchedulerConfig) -> Self {
        Self { scheduler, interval: Interval::Epoch, frequency: 1, monitor: None, strict: true, name: None }
    }
}

/// What replaces `configure_optimizers`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OptimizerOverride {
    pub optimizer: OptimizerConfig,
    pub lr_scheduler: Option<LrSchedulerSettings>,
}

impl From<OptimizerOverride> for Optimizers {
    fn from(given: OptimizerOverride) -> Self {
        let optimizers = Self::new(given.optimizer);
        let Some(settings) = given.lr_scheduler else {
            return optimizers;
        };
        let LrSchedulerSettings { scheduler, interval, frequency, monitor, strict, name } = settings;
        let mut spec = LrSchedulerSpec::new(scheduler).interval(interval).frequency(frequency).strict(strict);
        if let Some(monitor) = monitor {
            spec = spec.monitor(monitor);
        }
        if let Some(name) = name {
            spec = spec.name(name);
        }
        optimizers.scheduler(spec)
    }
}
