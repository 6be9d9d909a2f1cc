//! Schedules made of steps, lines and powers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::scheduler::{BuildLrScheduler, KEY, LrScheduler};
use super::stepper::{At, Chained, Formula, Stepper};
use crate::error::Result;
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;
use crate::optim::setters::setters;

/// Implements the building of a schedule that is its own formula.
macro_rules! formula_config {
    ($type:ty, $name:literal) => {
        impl $type {
            pub(in crate::optim) fn chained(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn Chained>> {
                self.check()?;
                Ok(Box::new(Stepper::build(self.clone(), groups)?))
            }
        }

        impl BuildLrScheduler for $type {
            fn name(&self) -> &'static str {
                $name
            }

            fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
                self.check()?;
                Ok(Box::new(Stepper::build(self.clone(), groups)?))
            }
        }
    };
}
pub(super) use formula_config;

/// Multiplies the learning rate by `gamma` every `step_size` steps; as `torch.optim.lr_scheduler.StepLR`.
///
/// ```
/// let schedule = voltaic::optim::StepLr::new(10, 0.5); // half as large every ten steps
/// # assert_eq!(schedule.gamma, 0.5);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StepLr {
    /// Steps between two changes, at least 1.
    pub step_size: u64,
    /// Factor of each change.
    #[serde(default = "tenth")]
    pub gamma: f64,
}

fn tenth() -> f64 {
    0.1
}

fn third() -> f64 {
    1.0 / 3.0
}

fn one() -> f64 {
    1.0
}

fn five() -> u64 {
    5
}

impl StepLr {
    /// Multiplies by `gamma` every `step_size` steps.
    pub fn new(step_size: u64, gamma: f64) -> Self {
        Self { step_size, gamma }
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        problems.require(self.step_size > 0, "step_size", self.step_size, "at least 1");
        problems.require(self.gamma.is_finite(), "gamma", self.gamma, "a finite number");
        problems.finish()
    }
}

impl Formula for StepLr {
    fn name(&self) -> &'static str {
        "StepLR"
    }

    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.epoch == 0 || !at.epoch.is_multiple_of(self.step_size) { lr } else { lr * self.gamma }
    }
}
formula_config!(StepLr, "StepLR");

/// Multiplies the learning rate by `gamma` at each milestone; as `torch.optim.lr_scheduler.MultiStepLR`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MultiStepLr {
    /// Steps at which the rate changes, in any order; one that is repeated counts as often.
    pub milestones: Vec<u64>,
    /// Factor of each change.
    #[serde(default = "tenth")]
    pub gamma: f64,
}

impl MultiStepLr {
    /// Multiplies by `gamma` at each of `milestones`.
    pub fn new(milestones: impl Into<Vec<u64>>, gamma: f64) -> Self {
        Self { milestones: milestones.into(), gamma }
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        problems.require(self.gamma.is_finite(), "gamma", self.gamma, "a finite number");
        problems.finish()
    }
}

impl Formula for MultiStepLr {
    fn name(&self) -> &'static str {
        "MultiStepLR"
    }

    fn next_lr(&self, at: At, lr: f64) -> f64 {
        match self.milestones.iter().filter(|milestone| **milestone == at.epoch).count() {
            0 => lr,
            times => lr * self.gamma.powf(times as f64),
        }
    }

    fn first_lr(&self, at: At) -> f64 {
        let times = self.milestones.iter().filter(|milestone| **milestone == 0).count();
        at.base_lr * self.gamma.powf(times as f64)
    }
}
formula_config!(MultiStepLr, "MultiStepLR");

/// `factor` times the learning rate for `total_iters` steps, then the full one; as
/// `torch.optim.lr_scheduler.ConstantLR`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ConstantLr {
    /// Factor at first, above 0 and at most 1.
    #[serde(default = "third")]
    pub factor: f64,
    /// Steps until the full rate, at least 1.
    #[serde(default = "five")]
    pub total_iters: u64,
}

impl Default for ConstantLr {
    fn default() -> Self {
        Self { factor: third(), total_iters: five() }
    }
}

impl ConstantLr {
    /// `factor` times the rate for `total_iters` steps.
    pub fn new(factor: f64, total_iters: u64) -> Self {
        Self { factor, total_iters }
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        let in_range = self.factor > 0.0 && self.factor <= 1.0;
        problems.require(in_range, "factor", self.factor, "above 0 and at most 1");
        problems.require(self.total_iters > 0, "total_iters", self.total_iters, "at least 1");
        problems.finish()
    }
}

impl Formula for ConstantLr {
    fn name(&self) -> &'static str {
        "ConstantLR"
    }

    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.epoch == 0 {
            lr * self.factor
        } else if at.epoch != self.total_iters {
            lr
        } else {
            lr * (1.0 / self.factor)
        }
    }
}
formula_config!(ConstantLr, "ConstantLR");

/// Goes in a line from `start_factor` to `end_factor` times the learning rate in `total_iters` steps, and stays
/// there; as `torch.optim.lr_scheduler.LinearLR`. With `end_factor` 1 this is linear warm-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LinearLr {
    /// Factor at first, above 0 and at most 1.
    #[serde(default = "third")]
    pub start_factor: f64,
    /// Factor in the end, from 0 to 1.
    #[serde(default = "one")]
    pub end_factor: f64,
    /// Steps until the end of the line, at least 1.
    #[serde(default = "five")]
    pub total_iters: u64,
}

impl Default for LinearLr {
    fn default() -> Self {
        Self { start_factor: third(), end_factor: one(), total_iters: five() }
    }
}

impl LinearLr {
    /// Linear warm-up: from `start_factor` times the rate to the full rate in `total_iters` steps.
    pub fn warmup(start_factor: f64, total_iters: u64) -> Self {
        Self { start_factor, total_iters, ..Self::default() }
    }

    setters! {
        /// Sets the factor at first.
        start_factor: f64,
        /// Sets the factor in the end.
        end_factor: f64,
        /// Sets the number of steps until the end of the line.
        total_iters: u64,
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        let start_ok = self.start_factor > 0.0 && self.start_factor <= 1.0;
        problems.require(start_ok, "start_factor", self.start_factor, "above 0 and at most 1");
        problems.require(
            (0.0..=1.0).contains(&self.end_factor),
            "end_factor",
            self.end_factor,
            "from 0 to 1",
        );
        problems.require(self.total_iters > 0, "total_iters", self.total_iters, "at least 1");
        problems.finish()
    }
}

impl Formula for LinearLr {
    fn name(&self) -> &'static str {
        "LinearLR"
    }

    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.epoch == 0 {
            return lr * self.start_factor;
        }
        if at.is_initial || at.epoch > self.total_iters {
            return lr;
        }
        let rise = self.end_factor - self.start_factor;
        lr * (1.0 + rise / (self.total_iters as f64 * self.start_factor + (at.t() - 1.0) * rise))
    }
}
formula_config!(LinearLr, "LinearLR");

/// Multiplies the learning rate by `gamma` at every step; as `torch.optim.lr_scheduler.ExponentialLR`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExponentialLr {
    /// Factor of each step.
    pub gamma: f64,
}

impl ExponentialLr {
    /// Multiplies by `gamma` at every step.
    pub fn new(gamma: f64) -> Self {
        Self { gamma }
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        problems.require(self.gamma.is_finite(), "gamma", self.gamma, "a finite number");
        problems.finish()
    }
}

impl Formula for ExponentialLr {
    fn name(&self) -> &'static str {
        "ExponentialLR"
    }

    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.is_initial { lr } else { lr * self.gamma }
    }

    fn first_lr(&self, at: At) -> f64 {
        at.base_lr
    }
}
formula_config!(ExponentialLr, "ExponentialLR");

/// Lets the learning rate fall to zero as `(1 - t / total_iters)^power`; as
/// `torch.optim.lr_scheduler.PolynomialLR`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolynomialLr {
    /// Steps until zero, at least 1.
    #[serde(default = "five")]
    pub total_iters: u64,
    /// Power of the fall; 1 is a line.
    #[serde(default = "one")]
    pub power: f64,
}

impl Default for PolynomialLr {
    fn default() -> Self {
        Self { total_iters: five(), power: one() }
    }
}

impl PolynomialLr {
    /// Falls to zero in `total_iters` steps with the given power.
    pub fn new(total_iters: u64, power: f64) -> Self {
        Self { total_iters, power }
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        problems.require(self.total_iters > 0, "total_iters", self.total_iters, "at least 1");
        problems.require_not_negative("power", self.power);
        problems.finish()
    }
}

impl Formula for PolynomialLr {
    fn name(&self) -> &'static str {
        "PolynomialLR"
    }

    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.is_initial || at.epoch > self.total_iters {
            return lr;
        }
        let total = self.total_iters as f64;
        lr * ((1.0 - at.t() / total) / (1.0 - (at.t() - 1.0) / total)).powf(self.power)
    }

    fn first_lr(&self, at: At) -> f64 {
        at.base_lr
    }
}
formula_config!(PolynomialLr, "PolynomialLR");
