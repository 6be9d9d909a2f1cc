//! Schedules one after the other.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::stepper::{Chained, base_lrs, read};
use super::{BuildLrScheduler, CosineAnnealingLr, KEY, LinearLr, LrScheduler, mismatch};
use crate::error::Result;
use crate::optim::problems::Problems;
use crate::optim::{LrSchedulerConfig, ParamGroup, setters};

/// Several schedules, each from a milestone to the next; as `torch.optim.lr_scheduler.SequentialLR`.
///
/// Each starts from the learning rate that the optimizer was given, not from where the one before it ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SequentialLr {
    /// The schedules in order. OneCycleLR, ReduceLROnPlateau and other sequences cannot be among them.
    pub schedulers: Vec<LrSchedulerConfig>,
    /// Step at which each schedule but the first begins: increasing, one fewer than the schedules.
    pub milestones: Vec<u64>,
}

impl SequentialLr {
    /// `schedulers` one after the other, changing at `milestones`.
    pub fn new(schedulers: impl Into<Vec<LrSchedulerConfig>>, milestones: impl Into<Vec<u64>>) -> Self {
        Self { schedulers: schedulers.into(), milestones: milestones.into() }
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        let (schedulers, milestones) = (self.schedulers.len(), self.milestones.len());
        if schedulers == 0 {
            problems.add("schedulers", "is empty", "name at least one schedule");
        } else if milestones + 1 != schedulers {
            let what = format!("has {milestones} values for {schedulers} schedulers");
            problems.add("milestones", what, format!("give {}", schedulers - 1));
        }
        if self.milestones.first() == Some(&0) || self.milestones.windows(2).any(|pair| pair[0] >= pair[1]) {
            let what = format!("{:?} does not increase from 1 on", self.milestones);
            problems.add("milestones", what, "put the steps in order, each once");
        }
        for (index, scheduler) in self.schedulers.iter().enumerate() {
            if !scheduler.is_chainable() {
                let what = format!("{} cannot be part of a sequence", scheduler.name());
                problems.add(
                    format!("schedulers[{index}]"),
                    what,
                    "use it alone, or choose another schedule",
                );
            }
        }
        problems.finish()
    }
}

impl BuildLrScheduler for SequentialLr {
    fn name(&self) -> &'static str {
        "SequentialLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        self.check()?;
        let mut parts = Vec::with_capacity(self.schedulers.len());
        for scheduler in &self.schedulers {
            parts.extend(scheduler.chained(groups)?);
        }
        Ok(Box::new(Sequence::build(self.name(), parts, self.milestones.clone(), groups)?))
    }
}

/// Linear warm-up, then half a cosine down to `eta_min`: [`SequentialLr`] of [`LinearLr`] and
/// [`CosineAnnealingLr`], the usual schedule of transformers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinearWarmupCosine {
    /// Steps of warm-up, at least 1.
    pub warmup_iters: u64,
    /// Steps of warm-up and fall together, more than `warmup_iters`.
    pub total_iters: u64,
    /// The warm-up begins at this times the learning rate, above 0 and at most 1.
    #[serde(default = "LinearWarmupCosine::default_start_factor")]
    pub start_factor: f64,
    /// Lowest learning rate.
    #[serde(default)]
    pub eta_min: f64,
}

impl LinearWarmupCosine {
    fn default_start_factor() -> f64 {
        0.01
    }

    /// Warm-up of `warmup_iters` steps from a hundredth of the rate; at zero after `total_iters` steps.
    pub fn new(warmup_iters: u64, total_iters: u64) -> Self {
        Self { warmup_iters, total_iters, start_factor: Self::default_start_factor(), eta_min: 0.0 }
    }

    setters! {
        /// Sets the part of the rate at which the warm-up begins.
        start_factor: f64,
        /// Sets the lowest learning rate.
        eta_min: f64,
    }
}

impl BuildLrScheduler for LinearWarmupCosine {
    fn name(&self) -> &'static str {
        "LinearWarmupCosine"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        problems.require(self.warmup_iters > 0, "warmup_iters", self.warmup_iters, "at least 1");
        let rule = format!("more than warmup_iters({})", self.warmup_iters);
        problems.require(self.total_iters > self.warmup_iters, "total_iters", self.total_iters, &rule);
        problems.finish()?;
        let warmup = LinearLr::warmup(self.start_factor, self.warmup_iters);
        let fall = CosineAnnealingLr::new(self.total_iters - self.warmup_iters).eta_min(self.eta_min);
        let parts = vec![warmup.chained(groups)?, fall.chained(groups)?];
        Ok(Box::new(Sequence::build(self.name(), parts, vec![self.warmup_iters], groups)?))
    }
}

struct Sequence {
    name: &'static str,
    parts: Vec<Box<dyn Chained>>,
    milestones: Vec<u64>,
    position: Position,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Position {
    name: String,
    last_epoch: u64,
    last_lr: Vec<f64>,
    #[serde(default)]
    schedulers: Vec<Value>,
}

impl Sequence {
    fn build(
        name: &'static str,
        mut parts: Vec<Box<dyn Chained>>,
        milestones: Vec<u64>,
        groups: &mut [ParamGroup],
    ) -> Result<Self> {
        // building the later parts has changed the rates that the first one starts from
        let base_lrs = base_lrs(groups);
        for (group, lr) in groups.iter_mut().zip(&base_lrs) {
            group.lr = *lr;
        }
        if let Some(first) = parts.first_mut() {
            first.begin(groups)?;
        }
        let last_lr = groups.iter().map(|group| group.lr).collect();
        let position = Position { name: name.to_owned(), last_epoch: 0, last_lr, schedulers: Vec::new() };
        Ok(Self { name, parts, milestones, position })
    }
}

impl LrScheduler for Sequence {
    fn name(&self) -> &'static str {
        self.name
    }

    fn step(&mut self, groups: &mut [ParamGroup], metric: Option<f64>) -> Result<()> {
        let epoch = self.position.last_epoch + 1;
        let index = self.milestones.partition_point(|milestone| *milestone <= epoch);
        let part = &mut self.parts[index];
        if index > 0 && self.milestones[index - 1] == epoch {
            part.restart(groups)?;
        } else {
            part.step(groups, metric)?;
        }
        self.position.last_epoch = epoch;
        self.position.last_lr = part.last_lr().to_vec();
        Ok(())
    }

    fn last_lr(&self) -> &[f64] {
        &self.position.last_lr
    }

    fn state_dict(&self) -> Value {
        let schedulers = self.parts.iter().map(|part| part.state_dict()).collect();
        json!(Position { schedulers, ..self.position.clone() })
    }

    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        let mut position: Position = read(self.name, state, self.position.last_lr.len())?;
        if position.schedulers.len() != self.parts.len() {
            let what = format!("it is of {} schedulers, not {}", position.schedulers.len(), self.parts.len());
            return Err(mismatch(self.name, what).into());
        }
        for (part, state) in self.parts.iter_mut().zip(std::mem::take(&mut position.schedulers)) {
            part.load_state_dict(&state)?;
        }
        self.position = position;
        Ok(())
    }
}
