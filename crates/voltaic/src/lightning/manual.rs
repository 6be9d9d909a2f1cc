//! Manual optimization: what a `training_step` can do that runs backward and optimizers itself.

use tch::Tensor;

use super::logged::MetricStore;
use super::step_context::StepContext;
use crate::checkpoint::Progress;
use crate::error::Result;
use crate::optim::{Optimizer, ParamGroup};

/// The parts of a run that a manual step changes beside its optimizers.
pub(crate) struct StepState<'a> {
    pub metrics: &'a mut MetricStore,
    pub progress: &'a mut Progress,
}

/// What the trainer does for a manual step: the operations with their hooks.
pub(crate) trait ManualOptimization {
    fn optimizers(&mut self) -> &mut [Box<dyn Optimizer>];
    fn backward(&mut self, state: StepState<'_>, loss: &Tensor) -> Result<()>;
    fn step(&mut self, state: StepState<'_>, optimizer_idx: usize) -> Result<()>;
    fn toggle(&mut self, optimizer_idx: usize);
    fn untoggle(&mut self);
    fn lr_scheduler_step(&mut self, scheduler_idx: usize, metric: Option<f64>) -> Result<()>;
}

/// One of the optimizers, in a `training_step` with manual optimization.
pub struct ManualOptimizer<'a> {
    manual: &'a mut dyn ManualOptimization,
    state: StepState<'a>,
    index: usize,
}

impl ManualOptimizer<'_> {
    /// Drops the gradients of the optimizer's parameters.
    ///
    /// # Errors
    /// If libtorch fails to free them.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.manual.optimizers()[self.index].zero_grad()
    }

    /// Calls `on_before_optimizer_step`, then steps the optimizer. Counts as one step of `global_step`.
    ///
    /// # Errors
    /// Those of the hooks and of [`Optimizer::step`].
    pub fn step(&mut self) -> Result<()> {
        let StepState { metrics, progress } = &mut self.state;
        self.manual.step(StepState { metrics, progress }, self.index)
    }

    /// The groups, so that hyper-parameters can be changed.
    pub fn param_groups_mut(&mut self) -> &mut [ParamGroup] {
        self.manual.optimizers()[self.index].param_groups_mut()
    }
}

const REMEDY: &str = "return false from automatic_optimization, or leave it to the trainer";

impl StepContext<'_> {
    /// Optimizer number `index` of `configure_optimizers`.
    ///
    /// # Errors
    /// If there is none, or optimization is automatic.
    pub fn optimizer(&mut self, index: usize) -> anyhow::Result<ManualOptimizer<'_>> {
        let Some(manual) = self.manual.as_deref_mut() else {
            anyhow::bail!("optimizer({index}) with automatic optimization; {REMEDY}");
        };
        let count = manual.optimizers().len();
        anyhow::ensure!(
            index < count,
            "optimizer({index}), but configure_optimizers gave {count}; they count from 0"
        );
        let state = StepState { metrics: self.metrics, progress: self.progress };
        Ok(ManualOptimizer { manual, state, index })
    }

    /// Runs the backward pass of a loss with its hooks, scaled as the precision asks for. For manual optimization.
    ///
    /// # Errors
    /// Those of the hooks and of the backward pass; that optimization is automatic.
    pub fn manual_backward(&mut self, loss: &Tensor) -> anyhow::Result<()> {
        let state = StepState { metrics: self.metrics, progress: self.progress };
        match self.manual.as_deref_mut() {
            Some(manual) => Ok(manual.backward(state, loss)?),
            None => anyhow::bail!("manual_backward with automatic optimization; {REMEDY}"),
        }
    }

    /// Lets gradients flow only to the parameters of one optimizer until [`StepContext::untoggle_optimizer`], so that
    /// the others' need not be computed. Parameters that two optimizers share stay on.
    ///
    /// # Errors
    /// If there is no such optimizer, or optimization is automatic.
    pub fn toggle_optimizer(&mut self, index: usize) -> anyhow::Result<()> {
        self.optimizer(index)?.manual.toggle(index);
        Ok(())
    }

    /// Undoes [`StepContext::toggle_optimizer`].
    ///
    /// # Errors
    /// If optimization is automatic.
    pub fn untoggle_optimizer(&mut self) -> anyhow::Result<()> {
        match self.manual.as_deref_mut() {
            Some(manual) => manual.untoggle(),
            None => anyhow::bail!("untoggle_optimizer with automatic optimization; {REMEDY}"),
        }
        Ok(())
    }

    /// Steps schedule number `index`, counted over the optimizers that have one. For manual optimization, where nothing
    /// else steps it. `metric` is for a schedule that follows one.
    ///
    /// # Errors
    /// If there is none, it misses its metric or has ended, or optimization is automatic.
    pub fn lr_scheduler_step(&mut self, index: usize, metric: Option<f64>) -> anyhow::Result<()> {
        match self.manual.as_deref_mut() {
            Some(manual) => Ok(manual.lr_scheduler_step(index, metric)?),
            None => anyhow::bail!("lr_scheduler_step with automatic optimization; {REMEDY}"),
        }
    }

    /// What `training_step` returns if there is no loss to go backward from: `return Ok(ctx.no_loss())`.
    pub fn no_loss(&self) -> Tensor {
        Tensor::new()
    }
}
