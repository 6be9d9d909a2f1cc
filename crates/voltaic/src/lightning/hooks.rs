//! The hooks as values: what each is called, and what logging in it means.

use super::logged::{Level, Phase};

/// A hook that may change the module. In the order in which a run calls them first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the methods of the same names say what they are
pub enum Hook {
    OnFitStart,
    OnFitEnd,
    OnSanityCheckStart,
    OnSanityCheckEnd,
    OnTrainStart,
    OnTrainEnd,
    OnTrainEpochStart,
    OnTrainEpochEnd,
    OnTrainBatchStart,
    OnTrainBatchEnd,
    OnValidationStart,
    OnValidationEnd,
    OnValidationEpochStart,
    OnValidationEpochEnd,
    OnValidationBatchStart,
    OnValidationBatchEnd,
    OnTestStart,
    OnTestEnd,
    OnTestEpochStart,
    OnTestEpochEnd,
    OnTestBatchStart,
    OnTestBatchEnd,
    OnPredictStart,
    OnPredictEnd,
    OnPredictEpochStart,
    OnPredictEpochEnd,
    OnPredictBatchStart,
    OnPredictBatchEnd,
}

/// A hook around backward and the optimizer. It sees the module only to read: with manual optimization it runs within
/// `training_step`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the methods of the same names say what they are
pub enum StepHook {
    OnBeforeZeroGrad,
    OnBeforeBackward,
    OnAfterBackward,
    OnBeforeOptimizerStep,
}

/// What is to know of a hook, or of a method of the module that does a part of the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HookFacts {
    pub name: &'static str,
    pub phase: Phase,
    pub level: Level,
}

impl HookFacts {
    const fn new(name: &'static str, phase: Phase, level: Level) -> Self {
        Self { name, phase, level }
    }

    /// A part of a training step: a hook around backward, or a method such as `backward`.
    pub(crate) const fn of_training_step(name: &'static str) -> Self {
        Self::new(name, Phase::Train, Level::Step)
    }
}

impl Hook {
    /// All of them.
    pub const ALL: [Self; 28] = [
        Self::OnFitStart,
        Self::OnFitEnd,
        Self::OnSanityCheckStart,
        Self::OnSanityCheckEnd,
        Self::OnTrainStart,
        Self::OnTrainEnd,
        Self::OnTrainEpochStart,
        Self::OnTrainEpochEnd,
        Self::OnTrainBatchStart,
        Self::OnTrainBatchEnd,
        Self::OnValidationStart,
        Self::OnValidationEnd,
        Self::OnValidationEpochStart,
        Self::OnValidationEpochEnd,
        Self::OnValidationBatchStart,
        Self::OnValidationBatchEnd,
        Self::OnTestStart,
        Self::OnTestEnd,
        Self::OnTestEpochStart,
        Self::OnTestEpochEnd,
        Self::OnTestBatchStart,
        Self::OnTestBatchEnd,
        Self::OnPredictStart,
        Self::OnPredictEnd,
        Self::OnPredictEpochStart,
        Self::OnPredictEpochEnd,
        Self::OnPredictBatchStart,
        Self::OnPredictBatchEnd,
    ];

    /// The name of the method, such as `on_fit_start`.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// The table of hooks.
    pub(crate) const fn facts(self) -> HookFacts {
        use Level::{Denied, Epoch, EpochOnly, Step};
        use Phase::{Eval, Train};
        match self {
            Self::OnFitStart => HookFacts::new("on_fit_start", Train, Denied),
            Self::OnFitEnd => HookFacts::new("on_fit_end", Train, Denied),
            Self::OnSanityCheckStart => HookFacts::new("on_sanity_check_start", Eval, Denied),
            Self::OnSanityCheckEnd => HookFacts::new("on_sanity_check_end", Eval, Denied),
            Self::OnTrainStart => HookFacts::new("on_train_start", Train, EpochOnly),
            Self::OnTrainEnd => HookFacts::new("on_train_end", Train, Denied),
            Self::OnTrainEpochStart => HookFacts::new("on_train_epoch_start", Train, EpochOnly),
            Self::OnTrainEpochEnd => HookFacts::new("on_train_epoch_end", Train, EpochOnly),
            Self::OnTrainBatchStart => HookFacts::new("on_train_batch_start", Train, Step),
            Self::OnTrainBatchEnd => HookFacts::new("on_train_batch_end", Train, Step),
            Self::OnValidationStart => HookFacts::new("on_validation_start", Eval, EpochOnly),
            Self::OnValidationEnd => HookFacts::new("on_validation_end", Eval, Denied),
            Self::OnValidationEpochStart => HookFacts::new("on_validation_epoch_start", Eval, EpochOnly),
            Self::OnValidationEpochEnd => HookFacts::new("on_validation_epoch_end", Eval, EpochOnly),
            Self::OnValidationBatchStart => HookFacts::new("on_validation_batch_start", Eval, Epoch),
            Self::OnValidationBatchEnd => HookFacts::new("on_validation_batch_end", Eval, Epoch),
            Self::OnTestStart => HookFacts::new("on_test_start", Eval, EpochOnly),
            Self::OnTestEnd => HookFacts::new("on_test_end", Eval, Denied),
            Self::OnTestEpochStart => HookFacts::new("on_test_epoch_start", Eval, EpochOnly),
            Self::OnTestEpochEnd => HookFacts::new("on_test_epoch_end", Eval, EpochOnly),
            Self::OnTestBatchStart => HookFacts::new("on_test_batch_start", Eval, Epoch),
            Self::OnTestBatchEnd => HookFacts::new("on_test_batch_end", Eval, Epoch),
            Self::OnPredictStart => HookFacts::new("on_predict_start", Eval, Denied),
            Self::OnPredictEnd => HookFacts::new("on_predict_end", Eval, Denied),
            Self::OnPredictEpochStart => HookFacts::new("on_predict_epoch_start", Eval, Denied),
            Self::OnPredictEpochEnd => HookFacts::new("on_predict_epoch_end", Eval, Denied),
            Self::OnPredictBatchStart => HookFacts::new("on_predict_batch_start", Eval, Denied),
            Self::OnPredictBatchEnd => HookFacts::new("on_predict_batch_end", Eval, Denied),
        }
    }
}

impl StepHook {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::OnBeforeZeroGrad, Self::OnBeforeBackward, Self::OnAfterBackward, Self::OnBeforeOptimizerStep];

    /// The name of the method, such as `on_before_backward`.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// The table of hooks.
    pub(crate) const fn facts(self) -> HookFacts {
        match self {
            Self::OnBeforeZeroGrad => HookFacts::of_training_step("on_before_zero_grad"),
            Self::OnBeforeBackward => HookFacts::of_training_step("on_before_backward"),
            Self::OnAfterBackward => HookFacts::of_training_step("on_after_backward"),
            Self::OnBeforeOptimizerStep => HookFacts::of_training_step("on_before_optimizer_step"),
        }
    }
}
