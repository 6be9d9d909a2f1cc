//! A schedule that follows a metric.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::settings;

use super::scheduler::{BuildLrScheduler, KEY, LrScheduler, PerGroup};
use super::stepper::keeps_position;
use crate::error::{OptimError, Problem, Result};
use crate::optim::checks::{not_negative, rate};
use crate::optim::param_group::ParamGroup;
use crate::optim::problems::Problems;

/// Lowers the learning rate when a metric has stopped improving; as `torch.optim.lr_scheduler.ReduceLROnPlateau`.
///
/// Needs the name of the metric: [`LrSchedulerSpec::monitor`](crate::optim::LrSchedulerSpec::monitor).
#[settings]
pub struct ReduceLrOnPlateau {
    /// Whether a smaller or a larger metric is better.
    #[setting(default = PlateauMode::Min)]
    pub mode: PlateauMode,
    /// Factor by which the learning rate is multiplied, at least 0 and below 1.
    #[setting(default = 0.1, check = rate)]
    pub factor: f64,
    /// Steps without improvement that are let pass.
    #[setting(default = 10)]
    pub patience: u64,
    /// How much better counts as better, at least 0.
    #[setting(default = 1e-4, check = not_negative)]
    pub threshold: f64,
    /// Whether the threshold is relative to the best metric.
    #[setting(default = ThresholdMode::Rel)]
    pub threshold_mode: ThresholdMode,
    /// Steps after a reduction in which nothing is counted.
    #[setting(default = 0)]
    pub cooldown: u64,
    /// Lowest learning rate.
    #[setting(default = PerGroup::All(0.0))]
    pub min_lr: PerGroup,
    /// A reduction of no more than this is not done.
    #[setting(default = 1e-8, check = not_negative)]
    pub eps: f64,
}

/// Which way a metric improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PlateauMode {
    /// Smaller is better.
    #[default]
    Min,
    /// Larger is better.
    Max,
}

/// What a threshold is measured against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ThresholdMode {
    /// A part of the best metric.
    #[default]
    Rel,
    /// An amount.
    Abs,
}

impl ReduceLrOnPlateau {
    /// PyTorch's settings for a metric that improves in direction `mode`.
    pub fn new(mode: PlateauMode) -> Self {
        Self { mode, ..Self::default() }
    }

    fn is_better(&self, metric: f64, best: f64) -> bool {
        match (self.mode, self.threshold_mode) {
            (PlateauMode::Min, ThresholdMode::Rel) => metric < best * (1.0 - self.threshold),
            (PlateauMode::Min, ThresholdMode::Abs) => metric < best - self.threshold,
            (PlateauMode::Max, ThresholdMode::Rel) => metric > best * (self.threshold + 1.0),
            (PlateauMode::Max, ThresholdMode::Abs) => metric > best + self.threshold,
        }
    }

    fn worst(&self) -> f64 {
        match self.mode {
            PlateauMode::Min => f64::INFINITY,
            PlateauMode::Max => f64::NEG_INFINITY,
        }
    }
}

impl BuildLrScheduler for ReduceLrOnPlateau {
    fn name(&self) -> &'static str {
        "ReduceLROnPlateau"
    }

    fn needs_metric(&self) -> bool {
        true
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        let mut problems = Problems::new(KEY);
        self.check_each(&mut problems);
        let min_lrs = self.min_lr.values("min_lr", groups.len(), not_negative, &mut problems);
        problems.finish()?;
        let position = Position {
            name: self.name().to_owned(),
            last_epoch: 0,
            best: Some(self.worst()),
            num_bad_epochs: 0,
            cooldown_counter: 0,
            last_lr: groups.iter().map(|group| group.lr).collect(),
        };
        Ok(Box::new(Plateau { config: self.clone(), min_lrs, position }))
    }
}

struct Plateau {
    config: ReduceLrOnPlateau,
    min_lrs: Vec<f64>,
    position: Position,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Position {
    name: String,
    last_epoch: u64,
    /// The best metric so far. JSON has no infinity, so that an infinite one is written as null.
    best: Option<f64>,
    num_bad_epochs: u64,
    cooldown_counter: u64,
    last_lr: Vec<f64>,
}

impl LrScheduler for Plateau {
    fn name(&self) -> &'static str {
        self.config.name()
    }

    fn step(&mut self, groups: &mut [ParamGroup], metric: Option<f64>) -> Result<()> {
        let Some(metric) = metric else {
            return Err(OptimError::Schedule {
                scheduler: self.config.name(),
                problem: Problem::new(
                    "there is no value of the monitored metric",
                    "log the metric named by `monitor` before the schedule is stepped",
                ),
            }
            .into());
        };
        let position = &mut self.position;
        position.last_epoch += 1;
        if self.config.is_better(metric, position.best.unwrap_or(self.config.worst())) {
            position.best = Some(metric);
            position.num_bad_epochs = 0;
        } else {
            position.num_bad_epochs += 1;
        }
        if position.cooldown_counter > 0 {
            position.cooldown_counter -= 1;
            position.num_bad_epochs = 0;
        }
        if position.num_bad_epochs > self.config.patience {
            for (group, min_lr) in groups.iter_mut().zip(&self.min_lrs) {
                let lr = (group.lr * self.config.factor).max(*min_lr);
                if group.lr - lr > self.config.eps {
                    group.lr = lr;
                }
            }
            position.cooldown_counter = self.config.cooldown;
            position.num_bad_epochs = 0;
        }
        position.last_lr = groups.iter().map(|group| group.lr).collect();
        Ok(())
    }

    keeps_position!();
}
