//! DeepSpeed's schedules that warm up: WarmupLR, WarmupDecayLR, WarmupCosineLR (`deepspeed/runtime/lr_schedules.py`).
//!
//! DeepSpeed counts the batches that are done from -1 on: the schedule as built is at -1, the first step goes to 0, whose
//! rate is the lowest one again.

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::scheduler::{BuildLrScheduler, KEY, LrScheduler, PerGroup};
use super::stepper::{At, Formula, Stepper};
use crate::error::Result;
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;
use crate::optim::setters::setters;

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

pub(super) fn beginning() -> i64 {
    BEGINNING
}

pub(super) fn check_beginning(last_batch_iteration: i64, problems: &mut Problems) {
    let ok = last_batch_iteration >= BEGINNING;
    problems.require(ok, "last_batch_iteration", last_batch_iteration, "at least -1");
}

fn thousand() -> u64 {
    1000
}

fn default_max_lr() -> PerGroup {
    PerGroup::All(1e-3)
}

fn zero() -> PerGroup {
    PerGroup::All(0.0)
}

/// A rate that need not be given.
fn given(rate: impl Into<PerGroup>) -> Option<PerGroup> {
    Some(rate.into())
}

fn default_cos_min_ratio() -> f64 {
    1e-4
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarmupLr {
    /// First learning rate, one or one for each group.
    #[serde(default = "zero")]
    pub warmup_min_lr: PerGroup,
    /// Last learning rate, one or one for each group; that of the optimizer unless set.
    #[serde(default)]
    pub warmup_max_lr: Option<PerGroup>,
    /// Steps of the rise, at least 1; 1 is taken as 2.
    #[serde(default = "thousand")]
    pub warmup_num_steps: u64,
    /// How the rate rises: `log` or `linear`.
    #[serde(default)]
    pub warmup_type: WarmupType,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[serde(default = "beginning")]
    pub last_batch_iteration: i64,
}

impl WarmupLr {
    /// Rises from 0 to the optimizer's learning rate in `warmup_num_steps` steps.
    pub fn new(warmup_num_steps: u64) -> Self {
        Self {
            warmup_min_lr: zero(),
            warmup_max_lr: None,
            warmup_num_steps,
            warmup_type: WarmupType::default(),
            last_batch_iteration: BEGINNING,
        }
    }

    setters! {
        /// Sets how the rate rises.
        warmup_type: WarmupType,
        /// Sets the batch after which the schedule begins.
        last_batch_iteration: i64,
        /// Sets the first learning rate.
        warmup_min_lr: impl Into<PerGroup> => Into::into,
        /// Sets the last learning rate.
        warmup_max_lr: impl Into<PerGroup> => given,
    }
}

/// As [`WarmupLr`], and then down in a line to `warmup_min_lr` at `total_num_steps`; as DeepSpeed's `WarmupDecayLR`.
///
/// After the rise, `g = max(0, (total_num_steps - i) / max(1, total_num_steps - warmup_num_steps))`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarmupDecayLr {
    /// Batch at which the fall ends.
    pub total_num_steps: u64,
    /// First and last learning rate, one or one for each group.
    #[serde(default = "zero")]
    pub warmup_min_lr: PerGroup,
    /// Highest learning rate, one or one for each group.
    #[serde(default = "default_max_lr")]
    pub warmup_max_lr: PerGroup,
    /// Steps of the rise, at least 1; 1 is taken as 2.
    #[serde(default = "thousand")]
    pub warmup_num_steps: u64,
    /// How the rate rises: `log` or `linear`.
    #[serde(default)]
    pub warmup_type: WarmupType,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[serde(default = "beginning")]
    pub last_batch_iteration: i64,
}

impl WarmupDecayLr {
    /// Rises from 0 to 0.001 in `warmup_num_steps` steps, and falls until `total_num_steps`.
    pub fn new(warmup_num_steps: u64, total_num_steps: u64) -> Self {
        Self {
            total_num_steps,
            warmup_min_lr: zero(),
            warmup_max_lr: default_max_lr(),
            warmup_num_steps,
            warmup_type: WarmupType::default(),
            last_batch_iteration: BEGINNING,
        }
    }

    setters! {
        /// Sets how the rate rises.
        warmup_type: WarmupType,
        /// Sets the batch after which the schedule begins.
        last_batch_iteration: i64,
        /// Sets the first and last learning rate.
        warmup_min_lr: impl Into<PerGroup> => Into::into,
        /// Sets the highest learning rate.
        warmup_max_lr: impl Into<PerGroup> => Into::into,
    }
}

/// Multiplies the optimizer's learning rates: a rise from `warmup_min_ratio` to 1, and then half a cosine down to
/// `cos_min_ratio`; as DeepSpeed's `WarmupCosineLR`. The first rate is 0.
///
/// After the rise, with `p = min(1, (i - warmup_num_steps + 1) / max(1, total_num_steps - warmup_num_steps))`, the factor
/// is `cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * p)) / 2`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarmupCosineLr {
    /// Batch at which the cosine ends.
    pub total_num_steps: u64,
    /// First factor, from 0 to 1.
    #[serde(default)]
    pub warmup_min_ratio: f64,
    /// Steps of the rise, at least 1; 1 is taken as 2.
    #[serde(default = "thousand")]
    pub warmup_num_steps: u64,
    /// Last factor, from 0 to 1.
    #[serde(default = "default_cos_min_ratio")]
    pub cos_min_ratio: f64,
    /// How the rate rises: `log` or `linear`.
    #[serde(default)]
    pub warmup_type: WarmupType,
    /// Batch after which the schedule begins; -1 for the beginning. Above that, the first rate is the optimizer's.
    #[serde(default = "beginning")]
    pub last_batch_iteration: i64,
}

impl WarmupCosineLr {
    /// Rises in `warmup_num_steps` steps, and falls until `total_num_steps`.
    pub fn new(warmup_num_steps: u64, total_num_steps: u64) -> Self {
        Self {
            total_num_steps,
            warmup_min_ratio: 0.0,
            warmup_num_steps,
            cos_min_ratio: default_cos_min_ratio(),
            warmup_type: WarmupType::default(),
            last_batch_iteration: BEGINNING,
        }
    }

    setters! {
        /// Sets the first factor.
        warmup_min_ratio: f64,
        /// Sets the last factor.
        cos_min_ratio: f64,
        /// Sets how the rate rises.
        warmup_type: WarmupType,
        /// Sets the batch after which the schedule begins.
        last_batch_iteration: i64,
    }
}

/// What comes after the rise.
#[derive(Debug, Clone, Copy)]
enum Then {
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
    name: &'static str,
    range: Range,
    rise: u64,
    shape: WarmupType,
    then: Then,
    last_batch_iteration: i64,
}

impl Warmup {
    /// Checks what the three have in common.
    fn check(rise: u64, last_batch_iteration: i64, problems: &mut Problems) {
        problems.require(rise > 0, "warmup_num_steps", rise, "at least 1");
        check_beginning(last_batch_iteration, problems);
    }

    /// The two schedules between a lowest and a highest rate, which is the optimizer's unless given.
    fn build_between(
        mut self,
        (min, max): (&PerGroup, Option<&PerGroup>),
        groups: &mut [ParamGroup],
    ) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        Self::check(self.rise, self.last_batch_iteration, &mut problems);
        self.range = ranges(min, max, groups.len(), &mut problems);
        problems.finish()?;
        self.build(groups)
    }

    fn build(mut self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        self.rise = self.rise.max(2);
        if let Then::Line(total) | Then::Cosine(total, _) = self.then
            && total < self.rise
        {
            tracing::warn!(
                "{}: total_num_steps {total} is less than warmup_num_steps {}",
                self.name,
                self.rise
            );
        }
        // the rate in force is what DeepSpeed starts from
        groups.iter_mut().for_each(|group| group.initial_lr = Some(group.lr));
        Ok(Box::new(Stepper::build(self, groups)?))
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
        match self.then {
            Then::Constant => 1.0,
            Then::Line(total) => ((total as f64 - i) / (total as f64 - rise).max(1.0)).max(0.0),
            Then::Cosine(total, least) => {
                let progress = ((i - rise + 1.0) / (total as f64 - rise).max(1.0)).min(1.0);
                (least + (1.0 - least) * ((1.0 + (PI * progress).cos()) / 2.0)).max(0.0)
            }
        }
    }
}

impl Formula for Warmup {
    fn name(&self) -> &'static str {
        self.name
    }

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
    let mins = min.values("warmup_min_lr", len, problems);
    let maxs = max.map(|max| max.values("warmup_max_lr", len, problems));
    let given = [("warmup_min_lr", Some(&mins)), ("warmup_max_lr", maxs.as_ref())];
    for (key, rates) in given {
        for rate in rates.into_iter().flatten() {
            problems.require_not_negative(key, *rate);
        }
    }
    let max_of = |index: usize| maxs.as_ref().and_then(|maxs| maxs.get(index).copied());
    Range::Rates(mins.into_iter().enumerate().map(|(index, min)| (min, max_of(index))).collect())
}

impl BuildLrScheduler for WarmupLr {
    fn name(&self) -> &'static str {
        "WarmupLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let rates = (&self.warmup_min_lr, self.warmup_max_lr.as_ref());
        let Self { warmup_num_steps: rise, warmup_type: shape, last_batch_iteration, .. } = *self;
        let range = Range::Factors(0.0); // until the rates are known
        let (name, then) = (self.name(), Then::Constant);
        Warmup { name, range, rise, shape, then, last_batch_iteration }.build_between(rates, groups)
    }
}

impl BuildLrScheduler for WarmupDecayLr {
    fn name(&self) -> &'static str {
        "WarmupDecayLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let rates = (&self.warmup_min_lr, Some(&self.warmup_max_lr));
        let Self { warmup_num_steps: rise, warmup_type: shape, last_batch_iteration, .. } = *self;
        let range = Range::Factors(0.0); // until the rates are known
        let (name, then) = (self.name(), Then::Line(self.total_num_steps));
        Warmup { name, range, rise, shape, then, last_batch_iteration }.build_between(rates, groups)
    }
}

impl BuildLrScheduler for WarmupCosineLr {
    fn name(&self) -> &'static str {
        "WarmupCosineLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        Warmup::check(self.warmup_num_steps, self.last_batch_iteration, &mut problems);
        for (key, ratio) in
            [("warmup_min_ratio", self.warmup_min_ratio), ("cos_min_ratio", self.cos_min_ratio)]
        {
            problems.require((0.0..=1.0).contains(&ratio), key, ratio, "from 0 to 1");
        }
        problems.finish()?;
        Warmup {
            name: self.name(),
            range: Range::Factors(self.warmup_min_ratio),
            rise: self.warmup_num_steps,
            shape: self.warmup_type,
            then: Then::Cosine(self.total_num_steps, self.cos_min_ratio),
            last_batch_iteration: self.last_batch_iteration,
        }
        .build(groups)
    }
}
