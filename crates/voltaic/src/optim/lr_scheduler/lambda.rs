//! A schedule given by the user's function.

use super::scheduler::{BuildLrScheduler, LrScheduler};
use super::stepper::{At, Formula, Stepper};
use crate::error::Result;
use crate::optim::param_group::ParamGroup;
use std::sync::Arc;

type Factor = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

/// The learning rate times a function of the number of steps done; as `torch.optim.lr_scheduler.LambdaLR`.
///
/// Only from code: a function cannot be written in a configuration file, and is not part of the saved state.
///
/// ```
/// use voltaic::optim::LambdaLr;
/// let schedule = LambdaLr::new(|step| 1.0 / (1.0 + step as f64).sqrt());
/// ```
#[derive(Clone)]
pub struct LambdaLr {
    factor: Factor,
}

impl LambdaLr {
    /// The factor at step `t` is `factor(t)`; `t` is 0 at first.
    pub fn new(factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        Self { factor: Arc::new(factor) }
    }
}

impl Formula for LambdaLr {
    fn next_lr(&self, at: At, _lr: f64) -> f64 {
        at.base_lr * (self.factor)(at.epoch)
    }
}

impl BuildLrScheduler for LambdaLr {
    fn name(&self) -> &'static str {
        "LambdaLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        Ok(Box::new(Stepper::build(self.name(), self.clone(), groups)?))
    }
}
