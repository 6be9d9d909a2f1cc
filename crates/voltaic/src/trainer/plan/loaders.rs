//! How many batches a fit takes of its loaders, and when it validates, which is known once the loaders are there.

use crate::error::ConfigError;
use crate::trainer::config::values::Limit;
use crate::trainer::plan::limits::limit_batches;
use crate::trainer::plan::train_plan::TrainPlan;

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
