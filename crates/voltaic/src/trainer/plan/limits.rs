//! Limits of a run: batches of its loaders, epochs and steps; and when validation is due.

use std::time::Duration;

use crate::error::{ConfigError, ConfigProblem};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::values::{Limit, ValCheckInterval};
use crate::trainer::plan::problems::Problems;
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

/// When validation is due: after so many batches or part of an epoch, or after so much time.
pub(crate) fn resolve_val_check(
    config: &TrainerConfig,
    problems: &mut Problems,
) -> (Option<Limit>, Option<Duration>) {
    let (val_check_interval, val_check_time) = match &config.val_check_interval {
        Some(ValCheckInterval::Batches(limit)) => (Some(*limit), None),
        Some(ValCheckInterval::Time(span)) => (None, problems.time("val_check_interval", span)),
        None => (None, None),
    };
    let is_limited_otherwise = !config.overfit_batches.is_none() || config.fast_dev_run.batches().is_some();
    if config.limit_val_batches.is_some_and(Limit::is_none) && !is_limited_otherwise {
        return (val_check_interval, val_check_time); // never due
    }
    if let (Some(Limit::Fraction(f)), None) = (val_check_interval, config.check_val_every_n_epoch) {
        let what = format!("the fraction {f} of an epoch cannot be counted across epochs");
        problems.add(
            "val_check_interval",
            what,
            "use a number of batches, or set trainer.check_val_every_n_epoch=1",
        );
    }
    if config.check_val_every_n_epoch == Some(0) {
        problems.add(
            "check_val_every_n_epoch",
            "0 epochs".to_owned(),
            "use 1 or more, or limit_val_batches=0",
        );
    }
    if val_check_interval == Some(Limit::Batches(0)) {
        problems.add("val_check_interval", "0 batches".to_owned(), "use 1 or more, or limit_val_batches=0");
    }
    (val_check_interval, val_check_time)
}

/// Batches of the loaders of a fit, known once they are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FitPlan {
    pub num_training_batches: usize,
    /// One entry per validation loader.
    pub num_val_batches: Vec<usize>,
    /// Any rank has some.
    pub has_val_batches: bool,
    /// Validate each time so many training batches are done; counted within the epoch, or across epochs if
    /// `check_val_every_n_epoch` is null.
    pub val_check_batch: usize,
}

impl FitPlan {
    /// Batches and validation times for loaders with so many batches.
    pub(crate) fn new(plan: &TrainPlan, train: usize, val: &[usize]) -> Result<Self, ConfigError> {
        let num_training_batches =
            limit_batches(plan.key_of_limit("limit_train_batches"), plan.limit_train, &[train])?
                .first()
                .copied()
                .unwrap_or(0);
        let num_val_batches = limit_batches(plan.key_of_limit("limit_val_batches"), plan.limit_val, val)?;
        let has_val_batches = num_val_batches.iter().any(|&batches| batches > 0);
        let val_check_batch = match plan.val_check_interval {
            _ if plan.val_check_time.is_some() => usize::MAX,
            Limit::Fraction(fraction) => ((num_training_batches as f64 * fraction) as usize).max(1),
            Limit::Batches(batches) => {
                let batches = usize::try_from(batches).unwrap_or(usize::MAX);
                if has_val_batches
                    && batches > num_training_batches
                    && plan.check_val_every_n_epoch.is_some()
                    && num_training_batches > 0
                {
                    return Err(ConfigError::new(
                        "trainer.val_check_interval",
                        format!("{batches} batches are more than the {num_training_batches} of an epoch"),
                        "use a smaller number, or check_val_every_n_epoch=null to count across epochs",
                    ));
                }
                batches
            }
        };
        Ok(Self { num_training_batches, num_val_batches, has_val_batches, val_check_batch })
    }
}
