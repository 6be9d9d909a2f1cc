//! What an optimizer is, and how it is made.

use serde_json::Value;
use tch::Tensor;

use super::clip::{GradientClip, grad_norm};
use super::offload_states::{OffloadState, OffloadStates};
use super::param_group::{ParamGroup, ParamGroupSpec};
use super::values::{ParamValue, Unsharded, shape_problem};
use crate::error::{ConfigError, Result};
use crate::nn::Parameter;
use crate::precision::unscale_grads;

/// Changes parameters by their gradients.
pub trait Optimizer: Send {
    /// PyTorch's name of the optimizer, such as `AdamW`.
    fn name(&self) -> &'static str;

    /// Updates the parameters that have a gradient; the others, and their state, stay as they are.
    ///
    /// # Errors
    /// [`OptimError::Gradient`](crate::error::OptimError::Gradient) if a gradient is sparse, or not of its
    /// parameter's dtype, shape and device; `bfloat16` and `float16` are allowed for a parameter of `float32`. Parameters of units
    /// and groups before the failing one are updated then.
    fn step(&mut self) -> Result<()>;

    /// In how many units [`Optimizer::step_unit`] updates the parameters. The strategy that shards parameters numbers them
    /// ([`UnshardedParameters::unit`](super::UnshardedParameters::unit)). The default is for optimizers that update all parameters at once.
    fn num_units(&self) -> usize {
        1
    }

    /// Updates the parameters of one unit. [`Optimizer::step`] does the same as this for all units in order; a strategy works on one
    /// unit while the next is updated, such as gathers its weights. An optimizer around another one that has units may leave both methods
    /// out: its parameters are updated at once.
    ///
    /// # Collective
    /// If shards of parameters are updated, all ranks must call it for the same units in the same order.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    fn step_unit(&mut self, unit: usize) -> Result<()> {
        if unit == 0 { self.step() } else { Ok(()) }
    }

    /// To be called before a step is captured in a graph, and before each replay: writes the learning rates in force to
    /// where a captured step reads them, so that replays follow schedules.
    ///
    /// Gives a number that grows when a captured step is of no use any more, because a step would now work on other
    /// tensors or with other hyper-parameters; `None` (the default) if a replay is not all that [`Optimizer::step`] does.
    ///
    /// # Errors
    /// libtorch's.
    fn prepare_replay(&mut self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Drops the gradients of all parameters.
    ///
    /// # Errors
    /// If libtorch fails to free them.
    fn zero_grad(&mut self) -> Result<()>;

    /// The groups with their hyper-parameters in force.
    fn param_groups(&self) -> &[ParamGroup];

    /// The groups, so that hyper-parameters can be changed between steps.
    fn param_groups_mut(&mut self) -> &mut [ParamGroup];

    /// Whether steps, clipping and norms take gradients of bfloat16 and float16 for parameters of float32, computing in float32. A
    /// strategy that keeps weights of float32 beside those of 16 bits then leaves gradients as they are. False for an optimizer that
    /// does not say so.
    fn takes_narrow_grads(&self) -> bool {
        false
    }

    /// Moves states to memory of the host, where they stay until [`Optimizer::reload_states`], or until a step needs them. Who reads
    /// them meanwhile, such as a checkpoint, reads them there. DeepSpeed's `offload_states`; in hooks, see
    /// [`HookContext::offload_states`](crate::module::HookContext::offload_states).
    ///
    /// # Errors
    /// [`ConfigError`] if the optimizer cannot (the default), or if a step of it is captured in a graph; if host memory is short.
    fn offload_states(&mut self, _states: &OffloadStates) -> Result<()> {
        let what = format!("{} does not offload its states", self.name());
        let remedy = "implement Optimizer::offload_states and reload_states, or use an optimizer of voltaic";
        Err(ConfigError::new("optimizer", what, remedy).into())
    }

    /// Moves these states back to their device, if they are on the host. The trainer calls it before a batch that needs them.
    ///
    /// # Errors
    /// If the memory of the device is short.
    fn reload_states(&mut self, _states: &[OffloadState]) -> Result<()> {
        Ok(())
    }

    /// Multiplies the gradients by `inverse`, which takes the factor of a [`GradScaler`](crate::precision::GradScaler) out
    /// of them, and says whether all are finite, on all ranks.
    ///
    /// An optimizer whose gradients are shards of those of other ranks must ask them; the default looks at its own.
    ///
    /// # Errors
    /// libtorch's; [`DistributedError`](crate::error::DistributedError) if a rank is gone.
    fn unscale(&mut self, inverse: f64) -> Result<bool> {
        unscale_grads(parameters(self.param_groups()).map(Parameter::leaf), inverse)
    }

    /// The `norm_type`-norm of all gradients together, those of all ranks if they are sharded: shape `[]`. Changes nothing.
    ///
    /// # Errors
    /// [`ConfigError`](crate::error::ConfigError) if `norm_type` is NaN; as [`Optimizer::unscale`].
    fn grad_norm(&mut self, norm_type: f64) -> Result<Tensor> {
        grad_norm(parameters(self.param_groups()), norm_type)
    }

    /// With `true`, puts the updates of parameters of which clipping limits the updates in the place of their gradients, until the
    /// next step or until it is called with `false`; [`Optimizer::clip`] and [`Optimizer::grad_norm`] do so themselves. An optimizer
    /// around another one that has a norm or clips by itself must call it. The default is for optimizers without such parameters.
    ///
    /// # Collective
    /// If shards of parameters are updated, all ranks must call it.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    fn show_updates(&mut self, _are_shown: bool) -> Result<()> {
        Ok(())
    }

    /// Limits the gradients in place; what `configure_gradient_clipping` does unless it is overridden. Returns the norm before, of shape
    /// `[]`, with [`GradientClip::Norm`].
    ///
    /// # Errors
    /// [`ConfigError`](crate::error::ConfigError) if the limit is negative or NaN; as [`Optimizer::unscale`].
    fn clip(&mut self, clip: GradientClip) -> Result<Option<Tensor>> {
        clip.apply(self.param_groups())
    }

    /// The state as named tensors, which share storage with the optimizer until its next step: copy what must last.
    fn state_dict(&self) -> OptimizerState;

    /// The tensors of [`Optimizer::state_dict`] of the parameters that [`Optimizer::step_unit`] updates.
    fn unit_state(&self, unit: usize) -> Vec<(String, Tensor)> {
        if unit == 0 { self.state_dict().tensors } else { Vec::new() }
    }

    /// Replaces state and hyper-parameters by saved ones; training then continues bit for bit as it would have.
    ///
    /// The tensors are copied to the device and dtype of their parameters.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`](crate::error::CheckpointError::Mismatch) with all names and shapes that do not
    /// fit; nothing is changed then.
    fn load_state_dict(&mut self, state: OptimizerState) -> Result<()>;

    /// The same with tensors that the optimizer may keep: those of its device, dtype and shape need not be copied.
    ///
    /// # Errors
    /// As [`Optimizer::load_state_dict`].
    fn take_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.load_state_dict(state)
    }

    /// The unsharded value of a parameter in float32, whatever of it this rank has: a copy of the parameter's shape, or of shape `[]` for a
    /// state that is a number, such as `step`. `None` for a gradient that is not there.
    ///
    /// The gradient is the mean over the ranks, once the last backward pass of an accumulation window is done, and is scaled and clipped
    /// as far as it has been. DeepSpeed's `safe_get_full_fp32_param`, `safe_get_full_grad` and `safe_get_full_optimizer_state`.
    ///
    /// # Errors
    /// [`ConfigError`](crate::error::ConfigError) if there is no parameter or state of that name.
    ///
    /// # Collective
    /// If the strategy shards states: all ranks must call it with the same names. What is wrong is an error on all.
    fn full_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        Unsharded::of(self.name(), self.param_groups(), self.state_dict().tensors).get(fqn, value)
    }

    /// Writes an unsharded value, the same on all ranks, of the shape of [`Optimizer::full_value`]; its device and dtype may be any. A weight
    /// counts from the next time that it is used, a gradient and a state from the next step. DeepSpeed's `safe_set_full_fp32_param`,
    /// `safe_set_full_grad` and `safe_set_full_optimizer_state`.
    ///
    /// # Errors
    /// [`ConfigError`](crate::error::ConfigError) if there is no parameter or state of that name, or the shape is another one.
    ///
    /// # Collective
    /// As [`Optimizer::full_value`].
    fn set_full_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        Unsharded::of(self.name(), self.param_groups(), self.state_dict().tensors).set(fqn, value, values)
    }

    /// Copies of its master weights, unsharded, by fqn: the float32 tensors that it updates beside weights of 16 bits.
    ///
    /// # Errors
    /// libtorch's.
    ///
    /// # Collective
    /// If the strategy shards states.
    fn master_weights(&mut self) -> Result<Vec<(String, Tensor)>> {
        Ok(Vec::new())
    }

    /// Writes master weights, and their 16-bit weights rounded from them. Names without a master weight are left out.
    ///
    /// # Errors
    /// If a shape is another one; libtorch's.
    ///
    /// # Collective
    /// As [`Optimizer::master_weights`].
    fn set_master_weights(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        let _ = values;
        Ok(())
    }

    /// What this rank has of a value in float32: a copy with one dimension, perhaps without elements, in the order of the flattened
    /// parameter; all of it where nothing is sharded. DeepSpeed's `safe_get_local_fp32_param`, `safe_get_local_grad` and
    /// `safe_get_local_optimizer_state`.
    ///
    /// # Errors
    /// As [`Optimizer::full_value`].
    ///
    /// # Collective
    /// As [`Optimizer::full_value`].
    fn local_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        let unsharded =
            Unsharded::of(self.name(), self.param_groups(), self.state_dict().tensors).get(fqn, value)?;
        Ok(unsharded.map(|unsharded| unsharded.f_reshape([-1_i64])).transpose()?)
    }

    /// Writes what this rank has of a value, of the shape of [`Optimizer::local_value`]. DeepSpeed's `safe_set_local_fp32_param`,
    /// `safe_set_local_grad` and `safe_set_local_optimizer_state`.
    ///
    /// # Errors
    /// As [`Optimizer::set_full_value`].
    ///
    /// # Collective
    /// As [`Optimizer::full_value`].
    fn set_local_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        let unsharded = Unsharded::of(self.name(), self.param_groups(), self.state_dict().tensors);
        let Some(own) = unsharded.get(fqn, value)? else {
            let what = format!("{fqn} has no gradient");
            let remedy = "set it after the backward pass, or the unsharded one with set_full_value";
            return Err(ConfigError::new("optimizer", what, remedy).into());
        };
        if let Some(problem) = shape_problem(fqn, value, &[own.numel() as i64], &values.size()) {
            return Err(problem.into());
        }
        unsharded.set(fqn, value, &values.f_reshape(own.size())?)
    }
}

/// The parameters in `groups`.
pub(super) fn parameters(groups: &[ParamGroup]) -> impl Iterator<Item = &Parameter> {
    groups.iter().flat_map(ParamGroup::params).map(|(_, parameter)| parameter)
}

/// What an optimizer remembers.
#[derive(Debug)]
pub struct OptimizerState {
    /// Tensors by `<kind>.<fqn>`, such as `exp_avg.conv1.weight`. A parameter that never had a gradient has none.
    pub tensors: Vec<(String, Tensor)>,
    /// Hyper-parameters and parameter names of each group, as a JSON array.
    pub groups: Value,
}

/// Settings from which an optimizer is made.
pub trait BuildOptimizer: Send {
    /// PyTorch's name of the optimizer, such as `AdamW`.
    fn name(&self) -> &'static str;

    /// Whether each element of a parameter is updated by its own gradient and state alone, so that ranks may update shards of a
    /// parameter each.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// Whether an update needs all of a parameter, so that shards of it cannot be updated at all.
    fn needs_unsharded_parameters(&self) -> bool {
        false
    }

    /// Whether the optimizer, over shards of parameters, unshards them by [`ParamGroupSpec::unsharded`] where an update needs that.
    fn unshards_parameters(&self) -> bool {
        false
    }

    /// Makes the optimizer over groups of parameters.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with all settings that are out of range, of the optimizer and of the
    /// groups, and with parameters that are missing, repeated or not trainable.
    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>>;
}
