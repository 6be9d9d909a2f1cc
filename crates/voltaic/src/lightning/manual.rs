//! Manual optimization: what a `training_step` can do that runs backward and optimizers itself.

use tch::Tensor;

use super::hook_context::HookContext;
use crate::error::Result;
use crate::optim::ParamGroup;

/// What the trainer does for a manual step: the operations with their hooks.
pub(crate) trait ManualOptimization {
    fn backward(&mut self, ctx: &mut HookContext<'_>, loss: &Tensor) -> Result<()>;
    fn step(&mut self, ctx: &mut HookContext<'_>, optimizer_idx: usize) -> Result<()>;
    fn toggle(&mut self, ctx: &HookContext<'_>, optimizer_idx: usize);
    fn untoggle(&mut self);
}

/// One of the optimizers, in a `training_step` with manual optimization.
pub struct ManualOptimizer<'a> {
    pub(super) manual: &'a mut dyn ManualOptimization,
    pub(super) ctx: HookContext<'a>,
    pub(super) index: usize,
}

impl ManualOptimizer<'_> {
    /// Drops the gradients of the optimizer's parameters.
    ///
    /// # Errors
    /// If libtorch fails to free them.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.ctx.training.optimizers[self.index].zero_grad()
    }

    /// Calls `on_before_optimizer_step`, then steps the optimizer. Counts as one step of `global_step`.
    ///
    /// # Errors
    /// Those of the hooks and of [`Optimizer::step`](crate::optim::Optimizer::step).
    pub fn step(&mut self) -> Result<()> {
        self.manual.step(&mut self.ctx, self.index)
    }

    /// The groups, so that hyper-parameters can be changed.
    pub fn param_groups_mut(&mut self) -> &mut [ParamGroup] {
        self.ctx.training.optimizers[self.index].param_groups_mut()
    }
}
