//! Schedules made of steps, lines and powers.

use voltaic_macros::settings;

use super::stepper::{At, Formula, formula_schedule};
use crate::optim::checks::{above_0_to_1, at_least_one, finite, from_0_to_1, not_negative};

/// Multiplies the learning rate by `gamma` every `step_size` steps; as `torch.optim.lr_scheduler.StepLR`.
///
/// ```
/// let schedule = voltaic::optim::StepLr::new(10, 0.5); // half as large every ten steps
/// # assert_eq!(schedule.gamma, 0.5);
/// ```
#[settings]
pub struct StepLr {
    /// Steps between two changes, at least 1.
    #[setting(check = at_least_one)]
    pub step_size: u64,
    /// Factor of each change.
    #[setting(default = 0.1, check = finite)]
    pub gamma: f64,
}

impl StepLr {
    /// Multiplies by `gamma` every `step_size` steps.
    pub fn new(step_size: u64, gamma: f64) -> Self {
        Self::with_required(step_size).gamma(gamma)
    }
}

impl Formula for StepLr {
    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.epoch == 0 || !at.epoch.is_multiple_of(self.step_size) { lr } else { lr * self.gamma }
    }
}
formula_schedule!(StepLr = "StepLR");

/// Multiplies the learning rate by `gamma` at each milestone; as `torch.optim.lr_scheduler.MultiStepLR`.
#[settings]
pub struct MultiStepLr {
    /// Steps at which the rate changes, in any order; one that is repeated counts as often.
    pub milestones: Vec<u64>,
    /// Factor of each change.
    #[setting(default = 0.1, check = finite)]
    pub gamma: f64,
}

impl MultiStepLr {
    /// Multiplies by `gamma` at each of `milestones`.
    pub fn new(milestones: impl Into<Vec<u64>>, gamma: f64) -> Self {
        Self::with_required(milestones.into()).gamma(gamma)
    }
}

impl Formula for MultiStepLr {
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
formula_schedule!(MultiStepLr = "MultiStepLR");

/// `factor` times the learning rate for `total_iters` steps, then the full one; as
/// `torch.optim.lr_scheduler.ConstantLR`.
#[settings]
pub struct ConstantLr {
    /// Factor at first, above 0 and at most 1.
    #[setting(default = 1.0 / 3.0, check = above_0_to_1)]
    pub factor: f64,
    /// Steps until the full rate, at least 1.
    #[setting(default = 5, check = at_least_one)]
    pub total_iters: u64,
}

impl ConstantLr {
    /// `factor` times the rate for `total_iters` steps.
    pub fn new(factor: f64, total_iters: u64) -> Self {
        Self { factor, total_iters }
    }
}

impl Formula for ConstantLr {
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
formula_schedule!(ConstantLr = "ConstantLR");

/// Goes in a line from `start_factor` to `end_factor` times the learning rate in `total_iters` steps, and stays
/// there; as `torch.optim.lr_scheduler.LinearLR`. With `end_factor` 1 this is linear warm-up.
#[settings]
pub struct LinearLr {
    /// Factor at first, above 0 and at most 1.
    #[setting(default = 1.0 / 3.0, check = above_0_to_1)]
    pub start_factor: f64,
    /// Factor in the end, from 0 to 1.
    #[setting(default = 1.0, check = from_0_to_1)]
    pub end_factor: f64,
    /// Steps until the end of the line, at least 1.
    #[setting(default = 5, check = at_least_one)]
    pub total_iters: u64,
}

impl LinearLr {
    /// Linear warm-up: from `start_factor` times the rate to the full rate in `total_iters` steps.
    pub fn warmup(start_factor: f64, total_iters: u64) -> Self {
        Self { start_factor, total_iters, ..Self::default() }
    }
}

impl Formula for LinearLr {
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
formula_schedule!(LinearLr = "LinearLR");

/// Multiplies the learning rate by `gamma` at every step; as `torch.optim.lr_scheduler.ExponentialLR`.
#[settings]
pub struct ExponentialLr {
    /// Factor of each step.
    #[setting(check = finite)]
    pub gamma: f64,
}

impl ExponentialLr {
    /// Multiplies by `gamma` at every step.
    pub fn new(gamma: f64) -> Self {
        Self { gamma }
    }
}

impl Formula for ExponentialLr {
    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.is_initial { lr } else { lr * self.gamma }
    }

    fn first_lr(&self, at: At) -> f64 {
        at.base_lr
    }
}
formula_schedule!(ExponentialLr = "ExponentialLR");

/// Lets the learning rate fall to zero as `(1 - t / total_iters)^power`; as
/// `torch.optim.lr_scheduler.PolynomialLR`.
#[settings]
pub struct PolynomialLr {
    /// Steps until zero, at least 1.
    #[setting(default = 5, check = at_least_one)]
    pub total_iters: u64,
    /// Power of the fall; 1 is a line.
    #[setting(default = 1.0, check = not_negative)]
    pub power: f64,
}

impl PolynomialLr {
    /// Falls to zero in `total_iters` steps with the given power.
    pub fn new(total_iters: u64, power: f64) -> Self {
        Self { total_iters, power }
    }
}

impl Formula for PolynomialLr {
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
formula_schedule!(PolynomialLr = "PolynomialLR");
