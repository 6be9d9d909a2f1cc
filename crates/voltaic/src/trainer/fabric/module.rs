//! What a [`Fabric`](super::Fabric) gives in place of a module and its optimizers.

use std::cell::Cell;
use std::ops::{Deref, DerefMut, Index};

use serde_json::Value;
use tch::Tensor;

use crate::error::{ConfigError, Result};
use crate::module::{LightningModule, ModuleTensors, StepContext, Training};
use crate::nn::{Member, Metric, Module};
use crate::optim::{OffloadState, OffloadStates, Optimizer, Optimizers, ParamGroup};

/// A module that a [`Fabric`](super::Fabric) trains. Its fields and methods are there to read; [`Fabric::forward`](super::Fabric::forward) calls it.
pub struct FabricModule<M> {
    pub(super) module: M,
    /// Until they are built.
    pub(super) optimizers: Cell<Option<Optimizers>>,
    /// What is saved beside the module.
    pub(super) state: Value,
}

impl<M> Deref for FabricModule<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M> DerefMut for FabricModule<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.module
    }
}

impl<M: Module> Module for FabricModule<M> {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.module.members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.module.children_mut(visit);
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        self.module.settings(visit);
    }

    fn set_training(&mut self, training: bool) {
        self.module.set_training(training);
    }

    fn is_training(&self) -> Option<bool> {
        self.module.is_training()
    }

    fn metric(&self) -> Option<std::sync::Arc<dyn Metric>> {
        self.module.metric()
    }

    fn wrapped(&self) -> Option<&dyn Module> {
        Some(self.module.as_module())
    }

    fn type_name(&self) -> &'static str {
        self.module.type_name()
    }
}

/// The trainer's parts see a module with manual optimization, whose loop is elsewhere.
impl<M: Module> LightningModule for FabricModule<M> {
    type Batch = Tensor;

    fn training_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        anyhow::bail!(
            "a module of Fabric is trained by a loop of its own; give the trainer the module itself"
        )
    }

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(self.optimizers.take().unwrap_or_default())
    }

    fn on_save_checkpoint(&mut self, _tensors: &mut ModuleTensors) -> anyhow::Result<Value> {
        Ok(self.state.clone())
    }

    fn on_load_checkpoint(&mut self, state: &Value, _tensors: &ModuleTensors) -> anyhow::Result<()> {
        self.state = state.clone();
        Ok(())
    }
}

/// The optimizers of a [`FabricModule`], usually one, with their schedules. `optimizers[0]` is the first, to read; it is stepped by
/// [`Fabric::step_optimizer`](super::Fabric::step_optimizer) and clipped by
/// [`Fabric::clip_gradients_of`](super::Fabric::clip_gradients_of), which know the scale of the loss.
#[derive(Default)]
pub struct FabricOptimizers {
    pub(super) training: Training,
}

impl FabricOptimizers {
    /// How many there are.
    #[allow(clippy::len_without_is_empty, reason = "there is one, as a rule")]
    pub fn len(&self) -> usize {
        self.training.optimizers.len()
    }

    pub(super) fn check(&self, index: usize) -> Result<()> {
        if index < self.len() {
            return Ok(());
        }
        let what = format!("there is no optimizer {index}, the module has {}", self.len());
        Err(ConfigError::new("optimizers", what, "give the index of one that Fabric::setup was given").into())
    }

    /// Drops the gradients of all parameters.
    ///
    /// # Errors
    /// As [`Optimizer::zero_grad`].
    pub fn zero_grad(&mut self) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.zero_grad())
    }

    /// Drops the gradients of the parameters of one optimizer.
    ///
    /// # Errors
    /// As [`Optimizer::zero_grad`]; [`ConfigError`] if there is no such optimizer.
    pub fn zero_grad_of(&mut self, index: usize) -> Result<()> {
        self.check(index)?;
        self.training.optimizers[index].zero_grad()
    }

    /// The parameter groups of one optimizer, whose settings may be changed.
    ///
    /// # Errors
    /// [`ConfigError`] if there is no such optimizer.
    pub fn param_groups_mut(&mut self, index: usize) -> Result<&mut [ParamGroup]> {
        self.check(index)?;
        Ok(self.training.optimizers[index].param_groups_mut())
    }

    /// Moves states of all optimizers to memory of the host, until a step needs them.
    ///
    /// # Errors
    /// As [`Optimizer::offload_states`].
    pub fn offload_states(&mut self, states: &OffloadStates) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.offload_states(states))
    }

    /// Moves these states of all optimizers back to their device.
    ///
    /// # Errors
    /// As [`Optimizer::reload_states`].
    pub fn reload_states(&mut self, states: &[OffloadState]) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.reload_states(states))
    }

    /// Gives all groups this learning rate.
    pub fn set_lr(&mut self, lr: f64) {
        let groups = self.training.optimizers.iter_mut().flat_map(|optimizer| optimizer.param_groups_mut());
        groups.for_each(|group| group.lr = lr);
    }

    /// Steps all schedules; `metric` is for those that follow one.
    ///
    /// # Errors
    /// If a schedule that follows a metric gets none.
    pub fn step_lr_schedulers(&mut self, metric: Option<f64>) -> Result<()> {
        (0..self.training.schedulers.len())
            .try_for_each(|index| self.training.step_lr_scheduler(index, metric))
    }
}

impl Index<usize> for FabricOptimizers {
    type Output = Box<dyn Optimizer>;

    fn index(&self, index: usize) -> &Self::Output {
        &self.training.optimizers[index]
    }
}
