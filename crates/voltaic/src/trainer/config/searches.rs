//! What the callbacks that search before a fit try: a learning rate, a batch size.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use crate::error::{ConfigError, ConfigProblem};

/// Of a trial; more are a mistake.
const MAX_STEPS: u64 = 1_000_000;

/// How the learning rate grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LrGrowth {
    /// By the same factor at each step.
    #[default]
    Exponential,
    /// By the same amount at each step.
    Linear,
}

/// What [`Trainer::lr_find`](crate::trainer::Trainer::lr_find) tries.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LearningRateFinderConfig {
    /// Smallest learning rate.
    #[default(1e-8)]
    pub min_lr: f64,
    /// Largest learning rate.
    #[default(1.0)]
    pub max_lr: f64,
    /// Training steps.
    #[default(100)]
    pub num_training_steps: u64,
    /// How the learning rate grows: `exponential` or `linear`.
    pub mode: LrGrowth,
    /// Stop when the smoothed loss is so many times the best; null for never.
    #[default(Some(4.0))]
    pub early_stop_threshold: Option<f64>,
    /// Train with what is found; otherwise it is only reported and plotted.
    #[default(true)]
    pub update_attr: bool,
}

impl LearningRateFinderConfig {
    /// All that is not valid.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, what: String, remedy: &'static str| {
            problems.push(ConfigProblem::new(format!("LearningRateFinder.{key}"), what, remedy));
        };
        if !(self.min_lr > 0.0 && self.min_lr < self.max_lr && self.max_lr.is_finite()) {
            let what = format!("{} to max_lr {}", self.min_lr, self.max_lr);
            refuse("min_lr", what, "use 0 < min_lr < max_lr, such as 1e-8 and 1");
        }
        if !(2..=MAX_STEPS).contains(&self.num_training_steps) {
            refuse(
                "num_training_steps",
                format!("{}", self.num_training_steps),
                "use a number from 2 to 1000000, such as 100",
            );
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    /// The learning rate of a step, from 0. The first two are the smallest, as in Lightning.
    pub(crate) fn lr(&self, step: u64) -> f64 {
        if step == 0 {
            return self.min_lr;
        }
        let r = (step + 1) as f64 / self.num_training_steps as f64;
        match self.mode {
            LrGrowth::Exponential => self.min_lr * (self.max_lr / self.min_lr).powf(r),
            LrGrowth::Linear => self.min_lr + r * (self.max_lr - self.min_lr),
        }
    }
}

/// How the batch size grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BatchSizeSearch {
    /// Doubled until memory runs out; the last that fitted is taken.
    #[default]
    Power,
    /// Doubled until memory runs out, then halfway between what fits and what does not.
    Binsearch,
}

/// What [`Trainer::scale_batch_size`](crate::trainer::Trainer::scale_batch_size) tries.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BatchSizeFinderConfig {
    /// How the batch size grows: `power` or `binsearch`.
    pub mode: BatchSizeSearch,
    /// Steps with each batch size.
    #[default(3)]
    pub steps_per_trial: u64,
    /// The first batch size.
    #[default(2)]
    pub init_val: usize,
    /// Most batch sizes that are tried.
    #[default(25)]
    pub max_trials: u64,
    /// Part of the batch size that is left free after `binsearch`, since a run may need more memory than a trial.
    #[default(0.05)]
    pub margin: f64,
    /// Largest batch size.
    #[default(8192)]
    pub max_val: usize,
}

impl BatchSizeFinderConfig {
    /// All that is not valid.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, what: String, remedy: &'static str| {
            problems.push(ConfigProblem::new(format!("BatchSizeFinder.{key}"), what, remedy));
        };
        for (key, number) in [("steps_per_trial", self.steps_per_trial), ("max_trials", self.max_trials)] {
            if !(1..=MAX_STEPS).contains(&number) {
                refuse(key, format!("{number}"), "use a number from 1 to 1000000");
            }
        }
        if self.init_val == 0 || self.init_val > self.max_val {
            let what = format!("{} is not between 1 and max_val {}", self.init_val, self.max_val);
            refuse("init_val", what, "use a small number, such as 2");
        }
        if !(0.0..1.0).contains(&self.margin) {
            refuse(
                "margin",
                format!("{} is not a part of it", self.margin),
                "use a number from 0 and below 1",
            );
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }
}

/// What is searched for before a fit.
#[derive(Debug, Default)]
pub(crate) struct Searches {
    /// There with the callback LearningRateFinder.
    pub lr: Option<LearningRateFinderConfig>,
    /// There with the callback BatchSizeFinder.
    pub batch_size: Option<BatchSizeFinderConfig>,
    /// The model summary shows operations.
    pub counts_flops: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_refused() {
        let default = BatchSizeFinderConfig::default;
        for (config, key) in [
            (BatchSizeFinderConfig { steps_per_trial: 0, ..default() }, "steps_per_trial"),
            (BatchSizeFinderConfig { max_trials: 0, ..default() }, "max_trials"),
            (BatchSizeFinderConfig { init_val: 0, ..default() }, "init_val"),
            (BatchSizeFinderConfig { init_val: 9000, ..default() }, "init_val"),
            (BatchSizeFinderConfig { margin: 1.0, ..default() }, "margin"),
        ] {
            let error = config.check().expect_err(key).to_string();
            assert!(error.contains(&format!("BatchSizeFinder.{key}")), "{error}");
        }
    }
}
