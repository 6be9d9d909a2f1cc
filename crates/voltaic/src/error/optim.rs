//! Errors of optimizers and learning rate schedules while they work.

use std::borrow::Cow;

use super::problem::Problem;

/// An optimizer or a learning rate schedule cannot do its step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A gradient is of a kind that the optimizer cannot use.
    #[error("{optimizer}: the gradient of {fqn} {problem}")]
    Gradient {
        /// The optimizer, such as `AdamW`.
        optimizer: &'static str,
        /// The parameter's name.
        fqn: String,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// A parameter and the optimizer's state for it are not alike any more.
    #[error("{optimizer}: {fqn} is {parameter}, but its {state}; {remedy}")]
    Moved {
        /// The optimizer, such as `AdamW`.
        optimizer: &'static str,
        /// The parameter's name.
        fqn: String,
        /// dtype, shape and device of the parameter.
        parameter: String,
        /// Name, dtype, shape and device of the state.
        state: String,
        /// How to fix it.
        remedy: Cow<'static, str>,
    },
    /// A CUDA graph is being captured while the optimizer makes its state, so that each replay would make it again.
    #[error(
        "{optimizer}: its first step makes its state, which a CUDA graph would make again in each replay; {}",
        self.remedy()
    )]
    FirstStepCaptured {
        /// The optimizer, such as `AdamW`.
        optimizer: &'static str,
    },
    /// A schedule was stepped where it gives no learning rate.
    #[error("{scheduler}: {problem}")]
    Schedule {
        /// The schedule, such as `OneCycleLR`.
        scheduler: &'static str,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
}

impl OptimError {
    /// How to fix it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            Self::Gradient { problem, .. } | Self::Schedule { problem, .. } => (&*problem.remedy).into(),
            Self::Moved { remedy, .. } => (&**remedy).into(),
            Self::FirstStepCaptured { .. } => "run one step before the capture".into(),
        }
    }
}
