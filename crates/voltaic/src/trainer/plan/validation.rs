//! When validation is due.

use std::time::Duration;

use crate::trainer::config::TrainerConfig;
use crate::trainer::config::values::{Limit, ValCheckInterval};
use crate::trainer::plan::problems::Problems;

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
