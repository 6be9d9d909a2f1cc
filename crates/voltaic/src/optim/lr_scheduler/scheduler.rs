//! What a schedule is, and how it is made.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::conversions;
use crate::error::{CheckpointError, Problem, Result};
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// Sets the learning rates of an optimizer's groups.
pub trait LrScheduler: Send {
    /// PyTorch's name of the schedule, such as `StepLR`.
    fn name(&self) -> &'static str;

    /// Moves on by one step and sets the learning rates. Call it after the optimizer's step.
    ///
    /// `metric` is what a schedule that follows a metric looks at; the others ignore it.
    ///
    /// # Errors
    /// [`OptimError::Schedule`](crate::error::OptimError::Schedule) if the schedule has ended, gives a learning rate
    /// that is not finite, or misses its metric.
    fn step(&mut self, groups: &mut [ParamGroup], metric: Option<f64>) -> Result<()>;

    /// The learning rates set last, one for each group.
    fn last_lr(&self) -> &[f64];

    /// The position in the schedule. Its settings are not in it: they come from the configuration.
    fn state_dict(&self) -> Value;

    /// Goes to a saved position. The learning rates in force are the optimizer's state: load that too.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] if the state is another schedule's, or for another number of groups.
    fn load_state_dict(&mut self, state: &Value) -> Result<()>;
}

/// Settings from which a schedule is made.
pub trait BuildLrScheduler: Send {
    /// PyTorch's name of the schedule, such as `StepLR`.
    fn name(&self) -> &'static str;

    /// Whether [`LrScheduler::step`] needs a metric.
    fn needs_metric(&self) -> bool {
        false
    }

    /// Makes the schedule and sets the learning rates of the first step. The rates that the groups have now become
    /// their `initial_lr`, unless they have one already.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with all settings that are out of range.
    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>>;
}

/// One number for all groups, or one for each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PerGroup {
    /// The same for all groups.
    All(f64),
    /// One for each group, in order.
    Each(Vec<f64>),
}

conversions! { PerGroup:
    f64 => |value| Self::All(value),
    Vec<f64> => |values| Self::Each(values),
}

impl PerGroup {
    /// The values of `len` groups, each of which `check` looks at.
    pub(super) fn values(
        &self,
        key: &str,
        len: usize,
        check: fn(&mut Problems, &str, &f64),
        problems: &mut Problems,
    ) -> Vec<f64> {
        let values = match self {
            Self::All(value) => vec![*value; len],
            Self::Each(values) => values.clone(),
        };
        if values.len() != len {
            let what = format!("has {} values for {len} param groups", values.len());
            problems.add(key, what, "give one number, or one for each group");
        }
        values.iter().for_each(|value| check(problems, key, value));
        values
    }
}

pub(in crate::optim) const KEY: &str = "lr_scheduler.init_args";

/// The error of a saved state that is not `scheduler`'s.
pub(super) fn mismatch(scheduler: &'static str, what: String) -> CheckpointError {
    CheckpointError::Mismatch {
        module: scheduler.to_owned(),
        problem: Problem::new(what, "configure the schedule as when the state was saved"),
    }
}
