//! What a run holds, in the groups that contexts borrow.

use voltaic_macros::Defaults;

use super::logged::MetricStore;
use super::requests::LoggerRow;
use crate::checkpoint::Progress;
use crate::data::Stage;
use crate::error::{ConfigError, Result};
use crate::optim::{ActiveLrScheduler, Optimizer};

/// Where a run stands.
#[derive(Defaults, Debug)]
pub(crate) struct Position {
    pub progress: Progress,
    /// The stage of the call in progress, or of the last one.
    #[default(Stage::Fit)]
    pub stage: Stage,
    pub is_sanity_check: bool,
    /// Training has begun in this call, so that there is something that a failure could lose.
    pub has_begun: bool,
}

/// What is logged.
#[derive(Default)]
pub(crate) struct Logging {
    pub metrics: MetricStore,
    /// For the loggers, after the hook that gave them.
    pub rows: Vec<LoggerRow>,
}

/// What a fit trains with; empty outside fit.
#[derive(Default)]
pub(crate) struct Training {
    pub optimizers: Vec<Box<dyn Optimizer>>,
    /// In the order of their optimizers.
    pub schedulers: Vec<ActiveLrScheduler>,
    /// A step runs, or a hook within one.
    pub is_in_step: bool,
}

impl Training {
    /// Steps one of the schedules on the groups of its optimizer.
    pub(crate) fn step_lr_scheduler(&mut self, index: usize, metric: Option<f64>) -> Result<()> {
        let count = self.schedulers.len();
        let Some(ActiveLrScheduler { optimizer, configured }) = self.schedulers.get_mut(index) else {
            let what = format!("schedule {index} of {count}");
            let remedy = "configure one for each optimizer that needs it; they count from 0";
            return Err(ConfigError::new("lr_scheduler_step", what, remedy).into());
        };
        configured.scheduler.step(self.optimizers[*optimizer].param_groups_mut(), metric)
    }
}
