//! Cosine schedules (SGDR, arXiv:1608.03983).

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};
use voltaic_macros::settings;

use super::scheduler::{BuildLrScheduler, KEY, LrScheduler};
use super::stepper::{
    At, BuildChained, Chained, Formula, base_lrs, finite, formula_schedule, keeps_position,
};
use crate::error::Result;
use crate::optim::checks::{at_least_one, not_negative};
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// Follows half a cosine from the learning rate to `eta_min` in `T_max` steps, and back up after that; as
/// `torch.optim.lr_scheduler.CosineAnnealingLR`.
#[settings]
pub struct CosineAnnealingLr {
    /// Steps until the lowest rate, at least 1.
    #[serde(rename = "T_max")]
    #[setting(check = at_least_one)]
    pub t_max: u64,
    /// Lowest learning rate.
    #[setting(default = 0.0, check = not_negative)]
    pub eta_min: f64,
}

impl CosineAnnealingLr {
    /// Falls to zero in `t_max` steps.
    pub fn new(t_max: u64) -> Self {
        Self::with_required(t_max)
    }
}

impl Formula for CosineAnnealingLr {
    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if at.is_initial {
            return lr;
        }
        let (t, t_max) = (at.t(), self.t_max as f64);
        // at the bottom the ratio below is 0 / 0
        let past_the_top = i128::from(at.epoch) - 1 - i128::from(self.t_max);
        if past_the_top % (2 * i128::from(self.t_max)) == 0 {
            return lr + (at.base_lr - self.eta_min) * (1.0 - (PI / t_max).cos()) / 2.0;
        }
        (1.0 + (PI * t / t_max).cos()) / (1.0 + (PI * (t - 1.0) / t_max).cos()) * (lr - self.eta_min)
            + self.eta_min
    }

    fn first_lr(&self, at: At) -> f64 {
        self.eta_min + (at.base_lr - self.eta_min) * (1.0 + 0.0_f64.cos()) / 2.0
    }
}
formula_schedule!(CosineAnnealingLr = "CosineAnnealingLR");

/// Follows half a cosine from the learning rate to `eta_min`, jumps back and does so again, `T_mult` times as slowly
/// each time; as `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`.
#[settings]
pub struct CosineAnnealingWarmRestarts {
    /// Steps until the first restart, at least 1.
    #[serde(rename = "T_0")]
    #[setting(check = at_least_one)]
    pub t_0: u64,
    /// Factor by which each period is longer than the one before, at least 1.
    #[serde(rename = "T_mult")]
    #[setting(default = 1, check = at_least_one)]
    pub t_mult: u64,
    /// Lowest learning rate.
    #[setting(default = 0.0, check = not_negative)]
    pub eta_min: f64,
}

impl CosineAnnealingWarmRestarts {
    /// Restarts every `t_0` steps.
    pub fn new(t_0: u64) -> Self {
        Self::with_required(t_0)
    }
}

impl BuildChained for CosineAnnealingWarmRestarts {
    fn chained(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn Chained>> {
        let mut problems = Problems::new(KEY);
        self.check_each(&mut problems);
        problems.finish()?;
        let base_lrs = base_lrs(groups);
        let position = Position {
            name: self.name().to_owned(),
            last_epoch: 0,
            t_cur: 0,
            t_i: self.t_0,
            last_lr: base_lrs.clone(),
            base_lrs,
        };
        let mut schedule = WarmRestarts { config: self.clone(), position };
        schedule.begin(groups)?;
        Ok(Box::new(schedule))
    }
}

impl BuildLrScheduler for CosineAnnealingWarmRestarts {
    fn name(&self) -> &'static str {
        "CosineAnnealingWarmRestarts"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        Ok(self.chained(groups)?)
    }
}

struct WarmRestarts {
    config: CosineAnnealingWarmRestarts,
    position: Position,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Position {
    name: String,
    last_epoch: u64,
    /// Steps since the last restart.
    #[serde(rename = "T_cur")]
    t_cur: u64,
    /// Steps from the last restart to the next.
    #[serde(rename = "T_i")]
    t_i: u64,
    base_lrs: Vec<f64>,
    last_lr: Vec<f64>,
}

impl WarmRestarts {
    fn set(&mut self, groups: &mut [ParamGroup]) -> Result<()> {
        let (position, eta_min) = (&mut self.position, self.config.eta_min);
        let fall = (1.0 + (PI * position.t_cur as f64 / position.t_i as f64).cos(), 2.0);
        for (index, group) in groups.iter_mut().enumerate() {
            let lr = eta_min + (position.base_lrs[index] - eta_min) * fall.0 / fall.1;
            group.lr = finite(self.config.name(), lr, position.last_epoch)?;
            position.last_lr[index] = group.lr;
        }
        Ok(())
    }
}

impl LrScheduler for WarmRestarts {
    fn name(&self) -> &'static str {
        self.config.name()
    }

    fn step(&mut self, groups: &mut [ParamGroup], _metric: Option<f64>) -> Result<()> {
        let position = &mut self.position;
        position.last_epoch += 1;
        position.t_cur += 1;
        if position.t_cur >= position.t_i {
            position.t_cur %= position.t_i;
            position.t_i = position.t_i.saturating_mul(self.config.t_mult);
        }
        self.set(groups)
    }

    keeps_position!();
}

impl Chained for WarmRestarts {
    fn begin(&mut self, groups: &mut [ParamGroup]) -> Result<()> {
        let position = &mut self.position;
        (position.last_epoch, position.t_cur, position.t_i) = (0, 0, self.config.t_0);
        self.set(groups)
    }

    fn restart(&mut self, groups: &mut [ParamGroup]) -> Result<()> {
        self.begin(groups)
    }
}
