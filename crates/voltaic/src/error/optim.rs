//! Errors of optimizers and learning rate schedules while they work.

/// An optimizer or a learning rate schedule cannot do its step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A gradient is of a sort that the optimizer cannot use.
    #[error("{optimizer}: the gradient of {fqn} {what}; {remedy}")]
    Gradient {
        /// The optimizer, such as `AdamW`.
        optimizer: &'static str,
        /// The parameter's name.
        fqn: String,
        /// What is wrong, with the values.
        what: String,
        /// How to mend it.
        remedy: String,
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
        /// How to mend it.
        remedy: String,
    },
    /// A CUDA graph is being captured while the optimizer makes its state, so that each replay would make it again.
    #[error(
        "{optimizer}: its first step makes its state, which a CUDA graph would make again in each replay; run one step before the capture"
    )]
    FirstStepCaptured {
        /// The optimizer, such as `AdamW`.
        optimizer: &'static str,
    },
    /// A schedule was stepped where it gives no learning rate.
    #[error("{scheduler}: {what}; {remedy}")]
    Schedule {
        /// The schedule, such as `OneCycleLR`.
        scheduler: &'static str,
        /// What is wrong, with the values.
        what: String,
        /// How to mend it.
        remedy: String,
    },
}
