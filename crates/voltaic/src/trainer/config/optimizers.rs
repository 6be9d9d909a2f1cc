//! An optimizer and a schedule in place of the module's.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::{ConfigProblem, Error};
use crate::nn::{Module, Parameter};
use crate::optim::{Interval, LrSchedulerConfig, LrSchedulerSpec, OptimizerConfig, Optimizers, Sgd};

/// A schedule, and when it is stepped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LrSchedulerSettings {
    /// The schedule.
    #[serde(flatten)]
    pub scheduler: LrSchedulerConfig,
    /// After what it is stepped: `step` or `epoch`.
    #[serde(default)]
    pub interval: Interval,
    /// The schedule is stepped at every so many batches of an epoch, if they end with an optimizer step, or every so many
    /// epochs.
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
pub(crate) struct OptimizerOverride {
    pub optimizer: OptimizerConfig,
    pub lr_scheduler: Option<LrSchedulerSettings>,
}

/// A module of one parameter, to try settings on.
#[derive(Module)]
struct OneParameter {
    weight: Parameter,
}

impl OptimizerOverride {
    /// What is wrong with the settings, found by building optimizer and schedule for a parameter that is not trained.
    pub fn problems(&self) -> Vec<ConfigProblem> {
        let weight = Parameter::new(Tensor::from(0.0_f32).reshape([1_i64, 1])); // a matrix, which Muon needs
        let module = OneParameter { weight };
        let problems_of = |given: &Self| match Optimizers::from(given.clone()).build(&module) {
            Err(Error::Config(error)) => error.problems,
            _ => Vec::new(), // what else there is shows in the fit
        };
        let alone = Self { lr_scheduler: None, ..self.clone() };
        let mut problems = problems_of(&alone);
        // on another optimizer if this one cannot be had, so that both are looked at
        let optimizer = if problems.is_empty() { self.optimizer.clone() } else { Sgd::new(0.1).into() };
        problems.extend(problems_of(&Self { optimizer, lr_scheduler: self.lr_scheduler.clone() }));
        problems
    }
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
