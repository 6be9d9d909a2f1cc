//! Optimizers, gradient clipping and learning rate schedules, with PyTorch's numbers, names and defaults.
//!
//! An optimizer is configured by a plain struct ([`Sgd`], [`Adam`], [`AdamW`]) and built over groups of parameters;
//! its state is a list of named tensors, which is what checkpoints and sharding need. Updates run in libtorch's
//! fused kernels, one call per group, dtype and device. Absent on purpose: closures that evaluate the loss again
//! (L-BFGS), sparse and complex gradients.

mod adam;
mod clip;
mod config;
mod engine;
mod lr_scheduler;
mod optimizers;
mod param_group;
mod problems;
mod replay;
mod sgd;

use serde_json::Value;
use tch::Tensor;

pub use adam::{Adam, AdamW};
pub use clip::{GradientClip, clip_grad_norm, clip_grad_norm_of_type, clip_grad_value};
pub use config::{LrSchedulerConfig, OptimizerConfig};
pub use lr_scheduler::{
    AnnealStrategy, BuildLrScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts,
    ExponentialLr, LambdaLr, LinearLr, LinearWarmupCosine, LrScheduler, MultiStepLr, OneCycleLr, PerGroup,
    PlateauMode, PolynomialLr, ReduceLrOnPlateau, SequentialLr, StepLr, SwaLr, ThresholdMode,
};
pub use optimizers::{
    ActiveLrScheduler, ConfiguredLrScheduler, ConfiguredOptimizer, Interval, LrSchedulerSpec, Optimizers,
};
pub use param_group::{GroupOptions, ParamGroup, ParamGroupSpec};
pub use sgd::Sgd;

use crate::error::Result;
use param_group::{Merged, Overrides, check_params};
use problems::Problems;

/// Setter methods that take and give back the struct.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name;
            self
        }
    )*};
}
use setters;

/// Changes parameters by their gradients.
pub trait Optimizer: Send {
    /// PyTorch's name of the optimizer, such as `AdamW`.
    fn name(&self) -> &'static str;

    /// Updates the parameters that have a gradient; the others, and their state, stay as they are.
    ///
    /// # Errors
    /// [`OptimError::Gradient`](crate::error::OptimError::Gradient) if a gradient is sparse, or not of its
    /// parameter's dtype, shape and device. Parameters of groups before the failing one are updated then.
    fn step(&mut self) -> Result<()>;

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

    /// The state as named tensors, which share storage with the optimizer until its next step: copy what must last.
    fn state_dict(&self) -> OptimizerState;

    /// Replaces state and hyper-parameters by saved ones; training then goes on bit for bit as it would have.
    ///
    /// The tensors are copied to the device and dtype of their parameters.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`](crate::error::CheckpointError::Mismatch) with all names and shapes that do not
    /// fit; nothing is changed then.
    fn load_state_dict(&mut self, state: OptimizerState) -> Result<()>;
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

    /// Makes the optimizer over groups of parameters.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with all settings that are out of range, of the optimizer and of the
    /// groups, and with parameters that are missing, repeated or not trainable.
    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>>;
}

/// Checks the settings and makes the groups of an optimizer from them; `merge` gives the numbers of one group.
fn build_groups(
    specs: Vec<ParamGroupSpec>,
    check: impl FnOnce(&mut Problems),
    merge: impl Fn(&Overrides, &str, &mut Problems) -> Merged,
) -> Result<Vec<ParamGroup>> {
    let mut problems = Problems::new("optimizer");
    check(&mut problems);
    let own_problems = problems.len();
    check_params(&specs, &mut problems)?;
    let mut groups = Vec::with_capacity(specs.len());
    for (index, spec) in specs.into_iter().enumerate() {
        // what is wrong with the optimizer's settings is wrong in every group: say it once
        let mut group_problems = Problems::new("optimizer");
        let merged = merge(&spec.overrides, &format!("param_groups[{index}]"), &mut group_problems);
        if own_problems == 0 {
            problems.append(group_problems);
        }
        groups.push(ParamGroup::new(spec.params, merged));
    }
    problems.finish()?;
    Ok(groups)
}
