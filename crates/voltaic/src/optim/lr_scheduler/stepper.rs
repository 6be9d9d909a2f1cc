//! What schedules share that compute each learning rate from the position and the one before.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::scheduler::{LrScheduler, mismatch};
use crate::error::{OptimError, Problem, Result};
use crate::optim::param_group::ParamGroup;

/// Where a schedule is.
#[derive(Debug, Clone, Copy)]
pub(super) struct At {
    /// Steps done; 0 when the schedule is built.
    pub(super) epoch: u64,
    /// The schedule is being built.
    pub(super) is_initial: bool,
    /// Index of the group.
    pub(super) group: usize,
    /// Learning rate the group started from.
    pub(super) base_lr: f64,
}

impl At {
    /// The position as a number.
    pub(super) fn t(&self) -> f64 {
        self.epoch as f64
    }
}

/// The formula of one schedule.
pub(super) trait Formula: Send {
    /// The learning rate at a position, from the group's present one.
    fn next_lr(&self, at: At, lr: f64) -> f64;

    /// The learning rate at position 0 from the base learning rate alone; for starting in the middle of a sequence.
    fn first_lr(&self, at: At) -> f64 {
        self.next_lr(at, at.base_lr)
    }

    /// Refuses a position behind the end of the schedule.
    fn check(&self, _epoch: u64) -> Result<(), Problem> {
        Ok(())
    }

    /// Changes what else the schedule sets, such as momentum.
    fn set_others(&self, _at: At, _group: &mut ParamGroup) {}
}

/// A schedule that can be an element of a sequence.
pub(in crate::optim) trait Chained: LrScheduler {
    /// Goes to position 0 as when it was built.
    fn begin(&mut self, groups: &mut [ParamGroup]) -> Result<()>;

    /// Goes to position 0, at a milestone of a sequence.
    fn restart(&mut self, groups: &mut [ParamGroup]) -> Result<()>;
}

/// Settings of a schedule that can be an element of a sequence.
pub(in crate::optim) trait BuildChained {
    /// As [`BuildLrScheduler::build`](super::scheduler::BuildLrScheduler::build).
    fn chained(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn Chained>>;
}

/// `formula_schedule!(StepLr = "StepLR")`: builds a schedule whose settings are its formula.
macro_rules! formula_schedule {
    ($type:ident = $name:literal) => {
        impl $crate::optim::lr_scheduler::stepper::BuildChained for $type {
            fn chained(
                &self,
                groups: &mut [$crate::optim::param_group::ParamGroup],
            ) -> $crate::error::Result<Box<dyn $crate::optim::lr_scheduler::stepper::Chained>> {
                use $crate::optim::lr_scheduler::{scheduler, stepper};
                let mut problems = $crate::optim::problems::Problems::new(scheduler::KEY);
                self.check_each(&mut problems);
                problems.finish()?;
                Ok(Box::new(stepper::Stepper::build($name, self.clone(), groups)?))
            }
        }

        impl $crate::optim::lr_scheduler::scheduler::BuildLrScheduler for $type {
            fn name(&self) -> &'static str {
                $name
            }

            fn build(
                &self,
                groups: &mut [$crate::optim::param_group::ParamGroup],
            ) -> $crate::error::Result<Box<dyn $crate::optim::lr_scheduler::scheduler::LrScheduler>> {
                Ok($crate::optim::lr_scheduler::stepper::BuildChained::chained(self, groups)?)
            }
        }
    };
}
pub(super) use formula_schedule;

/// What a schedule keeps: its `position`, by name, with the learning rates of the last step.
macro_rules! keeps_position {
    () => {
        fn last_lr(&self) -> &[f64] {
            &self.position.last_lr
        }

        fn state_dict(&self) -> serde_json::Value {
            serde_json::json!(self.position)
        }

        fn load_state_dict(&mut self, state: &serde_json::Value) -> $crate::error::Result<()> {
            let num_groups = self.position.last_lr.len();
            self.position = $crate::optim::lr_scheduler::stepper::read(self.name(), state, num_groups)?;
            Ok(())
        }
    };
}
pub(super) use keeps_position;

/// A schedule given by its formula.
pub(super) struct Stepper<F> {
    name: &'static str,
    formula: F,
    position: Position,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Position {
    name: String,
    last_epoch: u64,
    base_lrs: Vec<f64>,
    last_lr: Vec<f64>,
}

/// Gives each group its `initial_lr`, and returns them.
pub(super) fn base_lrs(groups: &mut [ParamGroup]) -> Vec<f64> {
    groups.iter_mut().map(|group| *group.initial_lr.get_or_insert(group.lr)).collect()
}

impl<F: Formula> Stepper<F> {
    pub(super) fn build(name: &'static str, formula: F, groups: &mut [ParamGroup]) -> Result<Self> {
        let base_lrs = base_lrs(groups);
        let position = Position { name: name.to_owned(), last_epoch: 0, last_lr: base_lrs.clone(), base_lrs };
        let mut stepper = Self { name, formula, position };
        stepper.begin(groups)?;
        Ok(stepper)
    }

    fn set(
        &mut self,
        groups: &mut [ParamGroup],
        epoch: u64,
        is_initial: bool,
        lr: impl Fn(&F, At, f64) -> f64,
    ) -> Result<()> {
        self.formula
            .check(epoch)
            .map_err(|problem| OptimError::Schedule { scheduler: self.name, problem })?;
        let at = |group: usize, base_lr: f64| At { epoch, is_initial, group, base_lr };
        let bases = &self.position.base_lrs;
        let mut lrs = Vec::with_capacity(groups.len());
        for (index, (group, base_lr)) in groups.iter().zip(bases).enumerate() {
            lrs.push(finite(self.name, lr(&self.formula, at(index, *base_lr), group.lr), epoch)?);
        }
        for (index, (group, lr)) in groups.iter_mut().zip(&lrs).enumerate() {
            group.lr = *lr;
            self.formula.set_others(at(index, bases[index]), group);
        }
        self.position.last_epoch = epoch;
        self.position.last_lr = lrs;
        Ok(())
    }
}

/// The learning rate, if it is one.
pub(super) fn finite(scheduler: &'static str, lr: f64, epoch: u64) -> Result<f64> {
    if lr.is_finite() {
        return Ok(lr);
    }
    let what = format!("the learning rate at step {epoch} is {lr}");
    let remedy = "check the settings of the schedule, or the function it calls".to_owned();
    Err(OptimError::Schedule { scheduler, problem: Problem::new(what, remedy) }.into())
}

/// Reads a saved position and checks that it is of this schedule and for as many groups.
pub(super) fn read<T: serde::de::DeserializeOwned>(
    scheduler: &'static str,
    state: &Value,
    num_groups: usize,
) -> Result<T> {
    if let Some(name) = state.get("name").and_then(Value::as_str)
        && name != scheduler
    {
        return Err(mismatch(scheduler, format!("it is a state of {name}")).into());
    }
    if let Some(len) = state.get("last_lr").and_then(Value::as_array).map(Vec::len)
        && len != num_groups
    {
        return Err(mismatch(scheduler, format!("it is for {len} param groups, not {num_groups}")).into());
    }
    serde_json::from_value(state.clone()).map_err(|error| mismatch(scheduler, error.to_string()).into())
}

impl<F: Formula> LrScheduler for Stepper<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn step(&mut self, groups: &mut [ParamGroup], _metric: Option<f64>) -> Result<()> {
        self.set(groups, self.position.last_epoch + 1, false, F::next_lr)
    }

    keeps_position!();
}

impl<F: Formula> Chained for Stepper<F> {
    fn begin(&mut self, groups: &mut [ParamGroup]) -> Result<()> {
        self.set(groups, 0, true, F::next_lr)
    }

    fn restart(&mut self, groups: &mut [ParamGroup]) -> Result<()> {
        self.set(groups, 0, false, |formula, at, _| formula.first_lr(at))
    }
}
