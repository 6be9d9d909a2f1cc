//! The one-cycle policy (arXiv:1708.07120).

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::settings;

use super::scheduler::{BuildLrScheduler, KEY, LrScheduler, PerGroup};
use super::stepper::{At, Formula, Stepper};
use crate::error::{Problem, Result};
use crate::optim::checks::{from_0_to_1, not_negative, rate};
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// Raises the learning rate from `max_lr / div_factor` to `max_lr`, then lets it fall to
/// `max_lr / div_factor / final_div_factor`, while momentum goes the other way; as
/// `torch.optim.lr_scheduler.OneCycleLR`. Meant to be stepped after every optimizer step.
#[settings]
pub struct OneCycleLr {
    /// Highest learning rate.
    pub max_lr: PerGroup,
    /// Steps of the whole cycle; or set `epochs` and `steps_per_epoch`.
    #[setting(default = None)]
    pub total_steps: Option<u64>,
    /// Epochs of the whole cycle, if `total_steps` is not set.
    #[setting(default = None)]
    pub epochs: Option<u64>,
    /// Optimizer steps of an epoch, if `total_steps` is not set.
    #[setting(default = None)]
    pub steps_per_epoch: Option<u64>,
    /// Part of the cycle in which the rate rises, from 0 to 1.
    #[setting(default = 0.3, check = from_0_to_1)]
    pub pct_start: f64,
    /// Shape of rise and fall.
    #[setting(default = AnnealStrategy::default())]
    pub anneal_strategy: AnnealStrategy,
    /// Whether momentum (SGD) or the first decay rate (Adam) is cycled against the learning rate.
    #[setting(default = true)]
    pub cycle_momentum: bool,
    /// Lowest momentum, reached at the highest learning rate.
    #[setting(default = PerGroup::All(0.85))]
    pub base_momentum: PerGroup,
    /// Highest momentum, at first and in the end.
    #[setting(default = PerGroup::All(0.95))]
    pub max_momentum: PerGroup,
    /// The first learning rate is `max_lr` divided by this.
    #[setting(default = 25.0, check = above_0)]
    pub div_factor: f64,
    /// The last learning rate is the first one divided by this.
    #[setting(default = 1e4, check = above_0)]
    pub final_div_factor: f64,
    /// Falls back to the first learning rate as slowly as it rose before it falls to the last one.
    #[setting(default = false)]
    pub three_phase: bool,
}

fn above_0(problems: &mut Problems, key: &str, value: &f64) {
    problems.require(value.is_finite() && *value > 0.0, key, value, "a finite number above 0");
}

/// Shape of the curve between two learning rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AnnealStrategy {
    /// Half a cosine.
    #[default]
    Cos,
    /// A line.
    Linear,
}

impl AnnealStrategy {
    fn between(self, start: f64, end: f64, pct: f64) -> f64 {
        match self {
            Self::Cos => end + (start - end) / 2.0 * ((PI * pct).cos() + 1.0),
            Self::Linear => (end - start) * pct + start,
        }
    }
}

impl OneCycleLr {
    /// One cycle of `total_steps` steps up to `max_lr`, which is one number or one for each group.
    pub fn new(max_lr: impl Into<PerGroup>, total_steps: u64) -> Self {
        Self { total_steps: Some(total_steps), ..Self::with_required(max_lr.into()) }
    }

    fn resolve(&self, num_groups: usize) -> Result<OneCycle> {
        let mut problems = Problems::new(KEY);
        let total_steps = match (self.total_steps, self.epochs, self.steps_per_epoch) {
            (Some(total), _, _) => total,
            (None, Some(epochs), Some(steps)) => epochs.saturating_mul(steps),
            _ => {
                let remedy = "set total_steps, or both epochs and steps_per_epoch";
                problems.add("total_steps", "is not known", remedy);
                1
            }
        };
        problems.require(total_steps > 0, "total_steps", total_steps, "at least 1");
        self.check_each(&mut problems);
        let max_lrs = self.max_lr.values("max_lr", num_groups, not_negative, &mut problems);
        let base = self.base_momentum.values("base_momentum", num_groups, rate, &mut problems);
        let max = self.max_momentum.values("max_momentum", num_groups, rate, &mut problems);
        problems.finish()?;
        Ok(OneCycle {
            total_steps,
            phases: self.phases(total_steps as f64),
            anneal: self.anneal_strategy,
            cycle_momentum: self.cycle_momentum,
            div_factor: self.div_factor,
            final_div_factor: self.final_div_factor,
            max_lrs,
            momentums: base.into_iter().zip(max).collect(),
        })
    }

    fn phases(&self, total: f64) -> Vec<Phase> {
        use Level::{Initial, Max, Min};
        let rise = self.pct_start * total - 1.0;
        let phase = |end_step, from, to, momentum| Phase { end_step, from, to, momentum };
        let mut phases = vec![phase(rise, Initial, Max, (1.0, 0.0))];
        if self.three_phase {
            phases.push(phase(2.0 * self.pct_start * total - 2.0, Max, Initial, (0.0, 1.0)));
            phases.push(phase(total - 1.0, Initial, Min, (1.0, 1.0)));
        } else {
            phases.push(phase(total - 1.0, Max, Min, (0.0, 1.0)));
        }
        phases
    }
}

impl BuildLrScheduler for OneCycleLr {
    fn name(&self) -> &'static str {
        "OneCycleLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let cycle = self.resolve(groups.len())?;
        for (group, max_lr) in groups.iter_mut().zip(&cycle.max_lrs) {
            group.initial_lr = Some(max_lr / self.div_factor);
        }
        Ok(Box::new(Stepper::build(self.name(), cycle, groups)?))
    }
}

#[derive(Debug, Clone, Copy)]
enum Level {
    Initial,
    Max,
    Min,
}

#[derive(Debug, Clone, Copy)]
struct Phase {
    end_step: f64,
    from: Level,
    to: Level,
    /// Momentum at start and end: 0 for the lowest, 1 for the highest.
    momentum: (f64, f64),
}

/// The cycle with its settings resolved for the groups.
struct OneCycle {
    total_steps: u64,
    phases: Vec<Phase>,
    anneal: AnnealStrategy,
    cycle_momentum: bool,
    div_factor: f64,
    final_div_factor: f64,
    max_lrs: Vec<f64>,
    /// Lowest and highest momentum of each group.
    momentums: Vec<(f64, f64)>,
}

impl OneCycle {
    /// The phase at a position, and how much of it is done.
    fn phase(&self, step: f64) -> (Phase, f64) {
        let mut start_step = 0.0;
        let mut found = (self.phases[0], 0.0);
        for (index, phase) in self.phases.iter().enumerate() {
            found = (*phase, (step - start_step) / (phase.end_step - start_step));
            if step <= phase.end_step || index + 1 == self.phases.len() {
                break;
            }
            start_step = phase.end_step;
        }
        found
    }

    fn level(&self, level: Level, group: usize) -> f64 {
        let initial = self.max_lrs[group] / self.div_factor;
        match level {
            Level::Initial => initial,
            Level::Max => self.max_lrs[group],
            Level::Min => initial / self.final_div_factor,
        }
    }
}

impl Formula for OneCycle {
    fn next_lr(&self, at: At, _lr: f64) -> f64 {
        let (phase, pct) = self.phase(at.t());
        self.anneal.between(self.level(phase.from, at.group), self.level(phase.to, at.group), pct)
    }

    fn check(&self, epoch: u64) -> Result<(), Problem> {
        if epoch <= self.total_steps {
            return Ok(());
        }
        let what = format!("step {epoch} lies behind the end of the cycle of {} steps", self.total_steps);
        Err(Problem::new(what, "set total_steps to the number of optimizer steps of the whole run"))
    }

    fn set_others(&self, at: At, group: &mut ParamGroup) {
        if self.cycle_momentum {
            let (phase, pct) = self.phase(at.t());
            let (base, max) = self.momentums[at.group];
            let level = |which: f64| if which == 0.0 { base } else { max };
            group.set_momentum(self.anneal.between(level(phase.momentum.0), level(phase.momentum.1), pct));
        }
    }
}
