//! DeepSpeed's schedules that warm up: WarmupLR, WarmupDecayLR, WarmupCosineLR (`deepspeed/runtime/lr_schedules.py`).
//!
//! DeepSpeed counts the batches that are done from -1 on: the schedule as built is at -1, the first step goes to 0, whose
//! rate is the lowest one again.

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::settings;

use super::scheduler::{BuildLrScheduler, KEY, LrScheduler, PerGroup};
use super::stepper::{At, Formula, Stepper};
use crate::error::Result;
use crate::optim::checks::{at_least_one, from_0_to_1, not_negative};
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// How DeepSpeed's warm-up rises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WarmupType {
    /// With the logarithm of the step: fast at first.
    #[default]
    Log,
    /// A line.
    Linear,
}

/// DeepSpeed's position of a schedule, from its own count and the batch at which it began.
pub(super) fn batch(at: At, last_batch_iteration: i64) -> i64 {
    last_batch_iteration.saturating_add(i64::try_from(at.epoch).unwrap_or(i64::MAX))
}

/// Whether the schedule, as just built, leaves the learning rate as it is: DeepSpeed does when it begins in the middle.
pub(super) fn keeps_rate(at: At, last_batch_iteration: i64) -> bool {
    at.is_initial && last_batch_iteration != BEGINNING
}

/// `last_batch_iteration` of a schedule that begins.
pub(super) const BEGINNING: i64 = -1;

pub(super) fn check_beginning(problems: &mut Problems, key: &str, last_batch_iteration: &i64) {
    problems.require(*last_batch_iteration >= BEGINNING, key, last_batch_iteration, "at least -1");
}

/// From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, and then constant; as DeepSpeed's `WarmupLR`.
///
/// At batch `i`, counted from 0: `lr = min + (max - min) * g`, with `g = ln(i + 1) / ln(warmup_num_steps)` (`log`) or
/// `g = i / warmup_num_steps` (`linear`) while `i < warmup_num_steps`, and then 1. Step it after each optimizer step.
///
/// ```
/// use voltaic::optim::{WarmupLr, WarmupType};
/// let schedule = WarmupLr::new(100).warmup_max_lr(1e-3).warmup_type(WarmupType::Linear);
/// # assert_eq!(schedule.warmup_num_steps, 100);
/// ```
#[settings]
pub struct WarmupLr {
    /// First learning rate, one or one for each group.
    #[setting(default = PerGroup::All(0.0), into)]
    pub warmup_min_lr: PerGroup,
    /// Last learning rate, one or one for each group; that of the optimizer unless set.
    #[setting(default = None, into)]
    pub warmup_max_lr: Option<PerGroup>,
    /// Steps of the rise, at least 1; 1 is taken as 2.
    #[setting(default = 1000, check = at_least_one)]
    pub warmup_num_steps: u64,
    /// How the rate rises: `log` or `linear`.
    #[setting(default = WarmupType::default())]
    pub warmup_type: WarmupType,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[setting(default = BEGINNING, check = check_beginning)]
    pub last_batch_iteration: i64,
}

impl WarmupLr {
    /// Rises from 0 to the optimizer's learning rate in `warmup_num_steps` steps.
    pub fn new(warmup_num_steps: u64) -> Self {
        Self { warmup_num_steps, ..Self::default() }
    }
}

/// As [`WarmupLr`], and then down in a line to `warmup_min_lr` at `total_num_steps`; as DeepSpeed's `WarmupDecayLR`.
///
/// After the rise, `g = max(0, (total_num_steps - i) / max(1, total_num_steps - warmup_num_steps))`.
#[settings]
pub struct WarmupDecayLr {
    /// Batch at which the fall ends.
    pub total_num_steps: u64,
    /// First and last learning rate, one or one for each group.
    #[setting(default = PerGroup::All(0.0), into)]
    pub warmup_min_lr: PerGroup,
    /// Highest learning rate, one or one for each group.
    #[setting(default = PerGroup::All(1e-3), into)]
    pub warmup_max_lr: PerGroup,
    /// Steps of the rise, at least 1; 1 is taken as 2.
    #[setting(default = 1000, check = at_least_one)]
    pub warmup_num_steps: u64,
    /// How the rate rises: `log` or `linear`.
    #[setting(default = WarmupType::default())]
    pub warmup_type: WarmupType,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[setting(default = BEGINNING, check = check_beginning)]
    pub last_batch_iteration: i64,
}

impl WarmupDecayLr {
    /// Rises from 0 to 0.001 in `warmup_num_steps` steps, and falls until `total_num_steps`.
    pub fn new(warmup_num_steps: u64, total_num_steps: u64) -> Self {
        Self::with_required(total_num_steps).warmup_num_steps(warmup_num_steps)
    }
}

/// Multiplies the optimizer's learning rates: a rise from `warmup_min_ratio` to 1, and then half a cosine down to
/// `cos_min_ratio`; as DeepSpeed's `WarmupCosineLR`. The first rate is 0.
///
/// After the rise, with `p = min(1, (i - warmup_num_steps + 1) / max(1, total_num_steps - warmup_num_steps))`, the factor
/// is `cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * p)) / 2`.
#[settings]
pub struct WarmupCosineLr {
    /// Batch at which the cosine ends.
    pub total_num_steps: u64,
    /// First factor, from 0 to 1.
    #[setting(default = 0.0, check = from_0_to_1)]
    pub warmup_min_ratio: f64,
    /// Steps of the rise, at least 1; 1 is taken as 2.
    #[setting(default = 1000, check = at_least_one)]
    pub warmup_num_steps: u64,
    /// Last factor, from 0 to 1.
    #[setting(default = 1e-4, check = from_0_to_1)]
    pub cos_min_ratio: f64,
    /// How the rate rises: `log` or `linear`.
    #[setting(default = WarmupType::default())]
    pub warmup_type: WarmupType,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[setting(default = BEGINNING, check = check_beginning)]
    pub last_batch_iteration: i64,
}

impl WarmupCosineLr {
    /// Rises in `warmup_num_steps` steps, and falls until `total_num_steps`.
    pub fn new(warmup_num_steps: u64, total_num_steps: u64) -> Self {
        Self::with_required(total_num_steps).warmup_num_steps(warmup_num_steps)
    }
}

/// How the rate changes after the warm-up.
#[derive(Debug, Clone, Copy)]
enum Decay {
    Constant,
    /// Down in a line until this batch.
    Line(u64),
    /// Down with a cosine until this batch, to this factor.
    Cosine(u64, f64),
}

/// From what the rate of a group follows.
#[derive(Debug)]
enum Range {
    /// Lowest and highest rate of each group; the highest is the optimizer's unless given.
    Rates(Vec<(f64, Option<f64>)>),
    /// The optimizer's rates times factors that begin with this one.
    Factors(f64),
}

/// One of the three schedules, with its settings resolved for the groups.
struct Warmup {
    range: Range,
    rise: u64,
    shape: WarmupType,
    decay: Decay,
    last_batch_iteration: i64,
}

impl Warmup {
    fn build(mut self, name: &'static str, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        self.rise = self.rise.max(2);
        if let Decay::Line(total) | Decay::Cosine(total, _) = self.decay
            && total < self.rise
        {
            tracing::warn!("{name}: total_num_steps {total} is less than warmup_num_steps {}", self.rise);
        }
        // the rate in force is what DeepSpeed starts from
        groups.iter_mut().for_each(|group| group.initial_lr = Some(group.lr));
        Ok(Box::new(Stepper::build(name, self, groups)?))
    }

    /// How much of the rise is done at batch `i`, which is part of it.
    fn risen(&self, i: i64) -> f64 {
        let steps = self.rise as f64;
        match self.shape {
            WarmupType::Log => 1.0 / steps.ln() * (i as f64 + 1.0).ln(),
            WarmupType::Linear => i as f64 / steps,
        }
    }

    /// What the rise of 1 has become at batch `i` behind it.
    fn fallen(&self, i: i64) -> f64 {
        let (i, rise) = (i as f64, self.rise as f64);
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Line(total) => ((total as f64 - i) / (total as f64 - rise).max(1.0)).max(0.0),
            Decay::Cosine(total, least) => {
                let progress = ((i - rise + 1.0) / (total as f64 - rise).max(1.0)).min(1.0);
                (least + (1.0 - least) * ((1.0 + (PI * progress).cos()) / 2.0)).max(0.0)
            }
        }
    }
}

impl Formula for Warmup {
    fn next_lr(&self, at: At, lr: f64) -> f64 {
        if keeps_rate(at, self.last_batch_iteration) {
            return lr;
        }
        let i = batch(at, self.last_batch_iteration);
        let is_rising = u64::try_from(i).is_ok_and(|i| i < self.rise);
        match &self.range {
            Range::Rates(ranges) => {
                let (min, max) = ranges[at.group];
                if i < 0 {
                    return min;
                }
                let part = if is_rising { self.risen(i) } else { self.fallen(i) };
                min + (max.unwrap_or(at.base_lr) - min) * part
            }
            Range::Factors(_) if i < 0 => 0.0,
            Range::Factors(least) if is_rising => at.base_lr * (least + self.risen(i) * (1.0 - least)),
            Range::Factors(_) => at.base_lr * self.fallen(i),
        }
    }
}

/// The rates of each group.
fn ranges(min: &PerGroup, max: Option<&PerGroup>, len: usize, problems: &mut Problems) -> Range {
    let mins = min.values("warmup_min_lr", len, not_negative, problems);
    let maxs = max.map(|max| max.values("warmup_max_lr", len, not_negative, problems));
    let max_of = |index: usize| maxs.as_ref().and_then(|maxs| maxs.get(index).copied());
    Range::Rates(mins.into_iter().enumerate().map(|(index, min)| (min, max_of(index))).collect())
}

impl BuildLrScheduler for WarmupLr {
    fn name(&self) -> &'static str {
        "WarmupLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        self.check_each(&mut problems);
        let range = ranges(&self.warmup_min_lr, self.warmup_max_lr.as_ref(), groups.len(), &mut problems);
        problems.finish()?;
        let Self { warmup_num_steps: rise, warmup_type: shape, last_batch_iteration, .. } = *self;
        Warmup { range, rise, shape, decay: Decay::Constant, last_batch_iteration }.build(self.name(), groups)
    }
}

impl BuildLrScheduler for WarmupDecayLr {
    fn name(&self) -> &'static str {
        "WarmupDecayLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        self.check_each(&mut problems);
        let range = ranges(&self.warmup_min_lr, Some(&self.warmup_max_lr), groups.len(), &mut problems);
        problems.finish()?;
        let Self { warmup_num_steps: rise, warmup_type: shape, last_batch_iteration, .. } = *self;
        let decay = Decay::Line(self.total_num_steps);
        Warmup { range, rise, shape, decay, last_batch_iteration }.build(self.name(), groups)
    }
}

impl BuildLrScheduler for WarmupCosineLr {
    fn name(&self) -> &'static str {
        "WarmupCosineLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        self.check_each(&mut problems);
        problems.finish()?;
        let Self { warmup_num_steps: rise, warmup_type: shape, last_batch_iteration, .. } = *self;
        let range = Range::Factors(self.warmup_min_ratio);
        let decay = Decay::Cosine(self.total_num_steps, self.cos_min_ratio);
        Warmup { range, rise, shape, decay, last_batch_iteration }.build(self.name(), groups)
    }
}
