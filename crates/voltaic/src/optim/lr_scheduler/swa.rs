//! The schedule of stochastic weight averaging (arXiv:1803.05407).

use std::f64::consts::PI;

use voltaic_macros::settings;

use super::one_cycle::AnnealStrategy;
use super::scheduler::{BuildLrScheduler, KEY, LrScheduler, PerGroup};
use super::stepper::{At, Formula, Stepper};
use crate::error::Result;
use crate::optim::checks::not_negative;
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// Goes from the learning rate in force to `swa_lr` within `anneal_epochs` steps and stays there; as
/// `torch.optim.swa_utils.SWALR`.
///
/// ```
/// let schedule = voltaic::optim::SwaLr::new(0.05).anneal_epochs(5);
/// # assert_eq!(schedule.anneal_epochs, 5);
/// ```
#[settings]
pub struct SwaLr {
    /// Learning rate to go to.
    pub swa_lr: PerGroup,
    /// Steps until it is reached; 0 for at once.
    #[setting(default = 10)]
    pub anneal_epochs: u64,
    /// Shape of the way there.
    #[setting(default = AnnealStrategy::default())]
    pub anneal_strategy: AnnealStrategy,
}

impl SwaLr {
    /// Goes to `swa_lr`, one number or one for each group, in 10 steps.
    pub fn new(swa_lr: impl Into<PerGroup>) -> Self {
        Self::with_required(swa_lr.into())
    }
}

/// The schedule with a rate for each group.
struct Resolved {
    rates: Vec<f64>,
    span: u64,
    strategy: AnnealStrategy,
}

impl Resolved {
    /// How much of the way is done after so many steps, from 0 to 1.
    fn part(&self, steps: f64) -> f64 {
        let t = (steps / self.span.max(1) as f64).clamp(0.0, 1.0);
        match self.strategy {
            AnnealStrategy::Cos => (1.0 - (PI * t).cos()) / 2.0,
            AnnealStrategy::Linear => t,
        }
    }
}

impl Formula for Resolved {
    fn next_lr(&self, at: At, lr: f64) -> f64 {
        let steps = if self.span == 0 { at.t().max(1.0) } else { at.t() };
        let (end, before, now) = (self.rates[at.group], self.part(steps - 1.0), self.part(steps));
        let start = if before == 1.0 { end } else { (lr - before * end) / (1.0 - before) };
        end * now + start * (1.0 - now)
    }
}

impl BuildLrScheduler for SwaLr {
    fn name(&self) -> &'static str {
        "SWALR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        let rates = self.swa_lr.values("swa_lr", groups.len(), not_negative, &mut problems);
        problems.finish()?;
        let formula = Resolved { rates, span: self.anneal_epochs, strategy: self.anneal_strategy };
        // the rate in force is where it starts, whatever a schedule before it started from
        groups.iter_mut().for_each(|group| group.initial_lr = Some(group.lr));
        Ok(Box::new(Stepper::build(self.name(), formula, groups)?))
    }
}
