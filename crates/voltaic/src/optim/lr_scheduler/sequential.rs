//! Schedules one after the other.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use voltaic_macros::settings;

use super::basic::LinearLr;
use super::cosine::CosineAnnealingLr;
use super::scheduler::{BuildLrScheduler, KEY, LrScheduler, mismatch};
use super::stepper::{BuildChained, Chained, base_lrs, read};
use crate::error::Result;
use crate::optim::checks::at_least_one;
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// Linear warm-up, then half a cosine down to `eta_min`: [`SequentialLr`](crate::optim::SequentialLr) of [`LinearLr`] and
/// [`CosineAnnealingLr`], the usual schedule of transformers.
#[settings]
pub struct LinearWarmupCosine {
    /// Steps of warm-up, at least 1.
    #[setting(check = at_least_one)]
    pub warmup_iters: u64,
    /// Steps of warm-up and fall together, more than `warmup_iters`.
    pub total_iters: u64,
    /// The warm-up begins at this times the learning rate, above 0 and at most 1.
    #[setting(default = 0.01)]
    pub start_factor: f64,
    /// Lowest learning rate.
    #[setting(default = 0.0)]
    pub eta_min: f64,
}

impl LinearWarmupCosine {
    /// Warm-up of `warmup_iters` steps from a hundredth of the rate; at zero after `total_iters` steps.
    pub fn new(warmup_iters: u64, total_iters: u64) -> Self {
        Self::with_required(warmup_iters, total_iters)
    }
}

impl BuildLrScheduler for LinearWarmupCosine {
    fn name(&self) -> &'static str {
        "LinearWarmupCosine"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        self.check_each(&mut problems);
        let rule = format!("more than warmup_iters({})", self.warmup_iters);
        problems.require(self.total_iters > self.warmup_iters, "total_iters", self.total_iters, &rule);
        problems.finish()?;
        let warmup = LinearLr::warmup(self.start_factor, self.warmup_iters);
        let fall = CosineAnnealingLr::new(self.total_iters - self.warmup_iters).eta_min(self.eta_min);
        let parts = vec![warmup.chained(groups)?, fall.chained(groups)?];
        Ok(Box::new(Sequence::build(self.name(), parts, vec![self.warmup_iters], groups)?))
    }
}

/// Schedules of which each takes over from the one before it.
pub(in crate::optim) struct Sequence {
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
    pub fn build(
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
