//! Weights, gradients and states of optimizers by name, whole, for hooks.

use tch::Tensor;

use super::hook_context::HookContext;
use crate::error::{ConfigError, Result};
use crate::optim::{Optimizer, ParamGroup, ParamValue};

/// Values of one trained parameter by its fqn, also of parameters that ranks have shards of. The optimizers have the same functions
/// ([`Optimizer::full_value`]), for hooks that get one.
///
/// ```
/// # use voltaic::module::HookContext;
/// fn on_train_batch_end(ctx: &mut HookContext) -> anyhow::Result<()> {
///     let weight = ctx.full_fp32_param("head.weight")?;
///     ctx.set_full_fp32_param("head.weight", &weight.clamp(-1.0, 1.0))?;
///     let momentum = ctx.full_optimizer_state("head.weight", "exp_avg")?;
///     assert_eq!(momentum.size(), weight.size());
///     Ok(())
/// }
/// ```
///
/// # Collective
/// If the strategy shards states: all ranks must call these functions with the same names, in the same order. What is wrong is an
/// error on all.
impl HookContext<'_> {
    /// A copy of a weight in float32, from the copy that is updated if there is one beside a weight of 16 bits: shape of the
    /// parameter. DeepSpeed's `safe_get_full_fp32_param`.
    ///
    /// # Errors
    /// [`ConfigError`] if no optimizer has a parameter of that name.
    pub fn full_fp32_param(&self, fqn: &str) -> Result<Tensor> {
        Ok(self.optimizer_of(fqn)?.full_value(fqn, ParamValue::Fp32Weight)?.unwrap_or_default())
    }

    /// Writes a weight, of the parameter's shape and any dtype; it counts from the next time that it is used. DeepSpeed's
    /// `safe_set_full_fp32_param`.
    ///
    /// # Errors
    /// As [`HookContext::full_fp32_param`]; if the shape is another one.
    pub fn set_full_fp32_param(&mut self, fqn: &str, values: &Tensor) -> Result<()> {
        self.optimizer_of_mut(fqn)?.set_full_value(fqn, ParamValue::Fp32Weight, values)
    }

    /// A copy in float32 of the gradient that the next step takes, `None` if there is none: the mean over the ranks, once the last backward pass of
    /// an accumulation window is done, scaled and clipped as far as it has been. DeepSpeed's `safe_get_full_grad`.
    ///
    /// # Errors
    /// As [`HookContext::full_fp32_param`].
    pub fn full_grad(&self, fqn: &str) -> Result<Option<Tensor>> {
        self.optimizer_of(fqn)?.full_value(fqn, ParamValue::Gradient)
    }

    /// Writes the gradient that the next step takes. DeepSpeed's `safe_set_full_grad`.
    ///
    /// # Errors
    /// As [`HookContext::set_full_fp32_param`]; if states are sharded, and there is none yet.
    pub fn set_full_grad(&mut self, fqn: &str, values: &Tensor) -> Result<()> {
        self.optimizer_of_mut(fqn)?.set_full_value(fqn, ParamValue::Gradient, values)
    }

    /// A copy in float32 of a state such as `exp_avg`, of the parameter's shape; shape `[]` of one that is a number, such as `step`. DeepSpeed's
    /// `safe_get_full_optimizer_state`.
    ///
    /// # Errors
    /// As [`HookContext::full_fp32_param`]; if there is no such state, as before the first step.
    pub fn full_optimizer_state(&self, fqn: &str, kind: &str) -> Result<Tensor> {
        Ok(self.optimizer_of(fqn)?.full_value(fqn, ParamValue::State(kind))?.unwrap_or_default())
    }

    /// Writes a state. DeepSpeed's `safe_set_full_optimizer_state`.
    ///
    /// # Errors
    /// As [`HookContext::full_optimizer_state`]; if the shape is another one.
    pub fn set_full_optimizer_state(&mut self, fqn: &str, kind: &str, values: &Tensor) -> Result<()> {
        self.optimizer_of_mut(fqn)?.set_full_value(fqn, ParamValue::State(kind), values)
    }

    /// Copies of all master weights, whole, by fqn: the float32 tensors that optimizers update beside weights of 16 bits. Nothing
    /// where there are none.
    ///
    /// # Errors
    /// libtorch's; [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    pub fn master_weights(&mut self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for optimizer in &mut self.training.optimizers {
            all.extend(optimizer.master_weights()?);
        }
        Ok(all)
    }

    /// Writes master weights, and their 16-bit weights rounded from them. Names without a master weight are left out.
    ///
    /// # Errors
    /// As [`HookContext::master_weights`]; if a shape is another one.
    pub fn set_master_weights(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        self.training.optimizers.iter_mut().try_for_each(|optimizer| optimizer.set_master_weights(values))
    }

    fn position(&self, fqn: &str) -> Result<usize> {
        let optimizers = &self.training.optimizers;
        let has = |optimizer: &dyn Optimizer| {
            let mut params = optimizer.param_groups().iter().flat_map(ParamGroup::params);
            params.any(|(own, _)| own == fqn)
        };
        optimizers.iter().position(|optimizer| has(optimizer.as_ref())).ok_or_else(|| {
            let (what, remedy) = match optimizers.len() {
                0 => (
                    format!("no optimizer is here that could have `{fqn}`"),
                    "ask in a fit; a hook that gets an optimizer asks it by full_value and set_full_value",
                ),
                count => (
                    format!("none of the {count} optimizers has a parameter `{fqn}`"),
                    "use the name of a trained parameter, as module.named_parameters() has it",
                ),
            };
            ConfigError::new("optimizer", what, remedy).into()
        })
    }

    fn optimizer_of(&self, fqn: &str) -> Result<&dyn Optimizer> {
        Ok(self.training.optimizers[self.position(fqn)?].as_ref())
    }

    fn optimizer_of_mut(&mut self, fqn: &str) -> Result<&mut dyn Optimizer> {
        let position = self.position(fqn)?;
        Ok(self.training.optimizers[position].as_mut())
    }
}
