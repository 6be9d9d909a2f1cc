//! DeepSpeed's LRRangeTest and OneCycle (`deepspeed/runtime/lr_schedules.py`; arXiv:1803.09820).

use voltaic_macros::settings;

use super::scheduler::{BuildLrScheduler, KEY, LrScheduler, PerGroup};
use super::stepper::{At, Formula, Stepper};
use super::warmup::{BEGINNING, batch, check_beginning, keeps_rate};
use crate::error::{Problem, Result};
use crate::optim::checks::{at_least_one, not_negative, rate};
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// Rises without end, to find the highest learning rate that trains; as DeepSpeed's `LRRangeTest`.
///
/// After batch `i`, counted from 0: `lr = min_lr * (1 + step_rate * (i + 1) / step_size)`, where `staircase` rounds the
/// quotient down. Step it after each optimizer step.
#[settings]
pub struct LrRangeTest {
    /// First learning rate, one or one for each group.
    #[setting(default = PerGroup::All(1e-3))]
    pub lr_range_test_min_lr: PerGroup,
    /// Steps in which the rate grows by `lr_range_test_step_rate` times the first one, at least 1.
    #[setting(default = 2000, check = at_least_one)]
    pub lr_range_test_step_size: u64,
    /// How fast the rate grows.
    #[setting(default = 1.0, check = not_negative)]
    pub lr_range_test_step_rate: f64,
    /// Grows in stairs of `lr_range_test_step_size` steps.
    #[setting(default = false)]
    pub lr_range_test_staircase: bool,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[setting(default = BEGINNING, check = check_beginning)]
    pub last_batch_iteration: i64,
}

impl LrRangeTest {
    /// Begins with `min_lr`, one number or one for each group.
    pub fn new(min_lr: impl Into<PerGroup>) -> Self {
        Self { lr_range_test_min_lr: min_lr.into(), ..Self::default() }
    }
}

struct RangeTest {
    rates: Vec<f64>,
    step_size: f64,
    step_rate: f64,
    staircase: bool,
    last_batch_iteration: i64,
}

impl Formula for RangeTest {
    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if keeps_rate(at, self.last_batch_iteration) {
            return lr;
        }
        let i = batch(at, self.last_batch_iteration);
        if i < 0 {
            return self.rates[at.group];
        }
        let interval = (i as f64 + 1.0) / self.step_size;
        let interval = if self.staircase { interval.floor() } else { interval };
        self.rates[at.group] * (1.0 + self.step_rate * interval)
    }
}

impl BuildLrScheduler for LrRangeTest {
    fn name(&self) -> &'static str {
        "LRRangeTest"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        self.check_each(&mut problems);
        let min_lr = &self.lr_range_test_min_lr;
        let rates = min_lr.values("lr_range_test_min_lr", groups.len(), not_negative, &mut problems);
        problems.finish()?;
        let formula = RangeTest {
            rates,
            step_size: self.lr_range_test_step_size as f64,
            step_rate: self.lr_range_test_step_rate,
            staircase: self.lr_range_test_staircase,
            last_batch_iteration: self.last_batch_iteration,
        };
        groups.iter_mut().for_each(|group| group.initial_lr = Some(group.lr));
        Ok(Box::new(Stepper::build(self.name(), formula, groups)?))
    }
}

/// One cycle from `cycle_min_lr` to `cycle_max_lr` and back, and then a decay; as DeepSpeed's `OneCycle`. PyTorch's is
/// [`OneCycleLr`](super::OneCycleLr).
///
/// The first decay rate of Adam and its like is cycled against the learning rate (the second one becomes 0.99); SGD's
/// momentum is not.
#[settings]
pub struct OneCycle {
    /// First and last learning rate of the cycle, one or one for each group.
    pub cycle_min_lr: PerGroup,
    /// Highest learning rate, one or one for each group.
    pub cycle_max_lr: PerGroup,
    /// After the cycle, the rate is `cycle_min_lr / (1 + decay_lr_rate * d / decay_step_size)` `d` steps later.
    #[setting(default = 0.0, check = not_negative)]
    pub decay_lr_rate: f64,
    /// Steps of the rise, at least 1.
    #[setting(default = 2000, check = at_least_one)]
    pub cycle_first_step_size: u64,
    /// Steps of the fall; as many as of the rise unless set.
    #[setting(default = None)]
    pub cycle_second_step_size: Option<u64>,
    /// Stairs of the rise; 0 for none.
    #[setting(default = 0)]
    pub cycle_first_stair_count: u64,
    /// Stairs of the fall; as many as of the rise unless set.
    #[setting(default = None)]
    pub cycle_second_stair_count: Option<u64>,
    /// Steps of a unit of the decay; 0 for no decay.
    #[setting(default = 0)]
    pub decay_step_size: u64,
    /// Whether the first decay rate of the optimizer is cycled against the learning rate.
    #[setting(default = true)]
    pub cycle_momentum: bool,
    /// Lowest momentum, reached at the highest learning rate.
    #[setting(default = PerGroup::All(0.8))]
    pub cycle_min_mom: PerGroup,
    /// Highest momentum, at first and after the cycle.
    #[setting(default = PerGroup::All(0.9))]
    pub cycle_max_mom: PerGroup,
    /// After the cycle, the momentum is `cycle_max_mom * (1 + decay_mom_rate * d / decay_step_size)` `d` steps later.
    #[setting(default = 0.0, check = not_negative)]
    pub decay_mom_rate: f64,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[setting(default = BEGINNING, check = check_beginning)]
    pub last_batch_iteration: i64,
}

impl OneCycle {
    /// A cycle between two learning rates, each one number or one for each group.
    pub fn new(cycle_min_lr: impl Into<PerGroup>, cycle_max_lr: impl Into<PerGroup>) -> Self {
        Self::with_required(cycle_min_lr.into(), cycle_max_lr.into())
    }

    fn resolve(&self, groups: &[ParamGroup]) -> Result<Cycle> {
        let mut problems = Problems::new(KEY);
        let len = groups.len();
        self.check_each(&mut problems);
        let min = self.cycle_min_lr.values("cycle_min_lr", len, not_negative, &mut problems);
        let max = self.cycle_max_lr.values("cycle_max_lr", len, not_negative, &mut problems);
        let cycles = self.cycle_momentum && groups.iter().all(|group| group.betas().is_some());
        let mut moms = Vec::new();
        if cycles {
            let low = self.cycle_min_mom.values("cycle_min_mom", len, rate, &mut problems);
            let high = self.cycle_max_mom.values("cycle_max_mom", len, rate, &mut problems);
            moms = low.into_iter().zip(high).collect();
        }
        problems.finish()?;
        if self.cycle_momentum && !cycles {
            tracing::warn!("OneCycle: cycle_momentum is disabled because the optimizer has no betas");
        }
        let first = self.cycle_first_step_size;
        let second = self.cycle_second_step_size.unwrap_or(first);
        let stairs = self.cycle_first_stair_count;
        Ok(Cycle {
            rates: min.into_iter().zip(max).collect(),
            moms,
            first: first as f64,
            second: second as f64,
            stairs: (stairs as f64, self.cycle_second_stair_count.unwrap_or(stairs) as f64),
            decay_step_size: self.decay_step_size as f64,
            decay_lr_rate: self.decay_lr_rate,
            decay_mom_rate: self.decay_mom_rate,
            last_batch_iteration: self.last_batch_iteration,
        })
    }
}

/// The cycle with its settings resolved for the groups.
struct Cycle {
    /// Lowest and highest rate of each group.
    rates: Vec<(f64, f64)>,
    /// Lowest and highest momentum of each group; none if it is not cycled.
    moms: Vec<(f64, f64)>,
    first: f64,
    second: f64,
    /// Stairs of the rise and of the fall.
    stairs: (f64, f64),
    decay_step_size: f64,
    decay_lr_rate: f64,
    decay_mom_rate: f64,
    last_batch_iteration: i64,
}

impl Cycle {
    /// Where batch `i` of the cycle is between the lowest (0) and the highest (1) rate.
    fn scale(&self, i: i64) -> f64 {
        let (total, b) = (self.first + self.second, i as f64 + 1.0);
        let ratio = self.first / total;
        let x = 1.0 + b / total - (1.0 + b / total).floor();
        let (scale, stairs) =
            if x <= ratio { (x / ratio, self.stairs.0) } else { ((x - 1.0) / (ratio - 1.0), self.stairs.1) };
        if stairs == 0.0 {
            return scale;
        }
        let offset = b % total; // the stair follows from whole numbers, as roundings would drop one
        let position = if offset <= self.first {
            offset * stairs / self.first
        } else {
            (total - offset) * stairs / self.second
        };
        position.floor() / stairs
    }

    /// Units of the decay that are done at batch `i`; none within the cycle.
    fn decayed(&self, i: i64) -> Option<f64> {
        let total = self.first + self.second;
        let units = (i as f64 - total + 1.0) / self.decay_step_size;
        ((i as f64) >= total).then_some(if self.decay_step_size == 0.0 { 0.0 } else { units })
    }

    fn momentum(&self, i: i64, group: usize) -> Option<f64> {
        let (low, high) = *self.moms.get(group)?;
        Some(match self.decayed(i) {
            None if i < 0 => low, // so DeepSpeed begins
            None => high - (high - low) * self.scale(i),
            Some(units) => high * (1.0 + self.decay_mom_rate * units),
        })
    }
}

/// The second decay rate while the first one is cycled.
const SECOND_BETA: f64 = 0.99;

impl Formula for Cycle {
    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if keeps_rate(at, self.last_batch_iteration) {
            return lr;
        }
        let (min, max) = self.rates[at.group];
        let i = batch(at, self.last_batch_iteration);
        match self.decayed(i) {
            None if i < 0 => min,
            None => min + (max - min) * self.scale(i),
            Some(units) => min / (1.0 + self.decay_lr_rate * units),
        }
    }

    fn check(&self, epoch: u64) -> Result<(), Problem> {
        let i = self.last_batch_iteration.saturating_add(i64::try_from(epoch).unwrap_or(i64::MAX));
        let moms = (0..self.moms.len()).filter_map(|group| self.momentum(i, group));
        let Some(mom) = moms.max_by(f64::total_cmp).filter(|mom| *mom >= 1.0) else { return Ok(()) };
        let what = format!("the momentum after step {epoch} is {mom}, which is not below 1");
        Err(Problem::new(what, "set a lower decay_mom_rate, or train fewer steps after the cycle"))
    }

    fn set_others(&self, at: At, group: &mut ParamGroup) {
        if keeps_rate(at, self.last_batch_iteration) {
            return;
        }
        if let Some(momentum) = self.momentum(batch(at, self.last_batch_iteration), at.group) {
            group.set_betas((momentum, SECOND_BETA));
        }
    }
}

impl BuildLrScheduler for OneCycle {
    fn name(&self) -> &'static str {
        "OneCycle"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let cycle = self.resolve(groups)?;
        groups.iter_mut().for_each(|group| group.initial_lr = Some(group.lr));
        Ok(Box::new(Stepper::build(self.name(), cycle, groups)?))
    }
}
