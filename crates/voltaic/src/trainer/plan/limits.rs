//! Limits of a run: batches of its loaders, epochs and steps.

use crate::error::{ConfigError, ConfigProblem};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::values::Limit;
use crate::trainer::plan::train_plan::TrainPlan;

impl Limit {
    /// Whether it leaves no batch at all.
    pub(crate) fn is_none(self) -> bool {
        matches!(self, Self::Batches(0)) || self == Self::Fraction(0.0)
    }

    /// How many of `available` batches.
    pub(crate) fn of(self, available: usize) -> usize {
        match self {
            Self::Batches(batches) => available.min(usize::try_from(batches).unwrap_or(usize::MAX)),
            Self::Fraction(fraction) => (available as f64 * fraction).floor() as usize,
        }
    }
}

/// How many batches each loader gives under a limit; a fraction that leaves none is a mistake.
pub(crate) fn limit_batches(key: &str, limit: Limit, available: &[usize]) -> Result<Vec<usize>, ConfigError> {
    available
        .iter()
        .map(|&batches| match (limit, limit.of(batches)) {
            (Limit::Fraction(fraction), 0) if fraction > 0.0 && batches > 0 => Err(ConfigError::new(
                format!("trainer.{key}"),
                format!("{fraction} of {batches} batches is less than one"),
                format!("use at least {:.4}, or a whole number of batches", 1.0 / batches as f64),
            )),
            (_, batches) => Ok(batches),
        })
        .collect()
}

/// The plan of `fast_dev_run`: so many batches of everything.
pub(crate) fn fast_dev_run(plan: TrainPlan, batches: u64) -> TrainPlan {
    let limit = Limit::Batches(batches);
    TrainPlan {
        max_epochs: Some(1),
        max_steps: Some(batches),
        limit_train: limit,
        limit_val: limit,
        limit_test: limit,
        limit_predict: limit,
        val_check_interval: Limit::Fraction(1.0),
        val_check_time: None,
        check_val_every_n_epoch: Some(1),
        num_sanity_val_steps: Some(0),
        log_every_n_steps: 1,
        fast_dev_run: true,
        ..plan
    }
}

/// Minima above the maxima, at which training ends.
pub(crate) fn minima_above_maxima(config: &TrainerConfig, plan: &TrainPlan) -> Vec<ConfigProblem> {
    if plan.fast_dev_run {
        return Vec::new(); // it has limits of its own
    }
    let limits = [
        ("min_epochs", config.min_epochs, "max_epochs", plan.max_epochs),
        ("min_steps", config.min_steps, "max_steps", plan.max_steps),
    ];
    let mut problems = Vec::new();
    for (min_key, min, max_key, max) in limits {
        if let (Some(min), Some(max)) = (min, max)
            && min > max
        {
            let what = format!("{min} is above {max_key}={max}, at which training ends");
            let remedy = format!("use {max} or less, or a larger trainer.{max_key}");
            problems.push(ConfigProblem::new(format!("trainer.{min_key}"), what, remedy));
        }
    }
    problems
}
