//! Which method of a module each hook is; `callback.rs` says the same of callbacks.

use super::hook_context::HookContext;
use super::hooks::{Hook, StepHook};
use super::module::LightningModule;

impl Hook {
    /// Calls the hook of a module.
    pub(crate) fn call_module<M: LightningModule>(
        self,
        module: &mut M,
        ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        match self {
            Self::OnFitStart => module.on_fit_start(ctx),
            Self::OnFitEnd => module.on_fit_end(ctx),
            Self::OnSanityCheckStart => module.on_sanity_check_start(ctx),
            Self::OnSanityCheckEnd => module.on_sanity_check_end(ctx),
            Self::OnTrainStart => module.on_train_start(ctx),
            Self::OnTrainEnd => module.on_train_end(ctx),
            Self::OnTrainEpochStart => module.on_train_epoch_start(ctx),
            Self::OnTrainEpochEnd => module.on_train_epoch_end(ctx),
            Self::OnTrainBatchStart => module.on_train_batch_start(ctx),
            Self::OnTrainBatchEnd => module.on_train_batch_end(ctx),
            Self::OnValidationStart => module.on_validation_start(ctx),
            Self::OnValidationEnd => module.on_validation_end(ctx),
            Self::OnValidationEpochStart => module.on_validation_epoch_start(ctx),
            Self::OnValidationEpochEnd => module.on_validation_epoch_end(ctx),
            Self::OnValidationBatchStart => module.on_validation_batch_start(ctx),
            Self::OnValidationBatchEnd => module.on_validation_batch_end(ctx),
            Self::OnTestStart => module.on_test_start(ctx),
            Self::OnTestEnd => module.on_test_end(ctx),
            Self::OnTestEpochStart => module.on_test_epoch_start(ctx),
            Self::OnTestEpochEnd => module.on_test_epoch_end(ctx),
            Self::OnTestBatchStart => module.on_test_batch_start(ctx),
            Self::OnTestBatchEnd => module.on_test_batch_end(ctx),
            Self::OnPredictStart => module.on_predict_start(ctx),
            Self::OnPredictEnd => module.on_predict_end(ctx),
            Self::OnPredictEpochStart => module.on_predict_epoch_start(ctx),
            Self::OnPredictEpochEnd => module.on_predict_epoch_end(ctx),
            Self::OnPredictBatchStart => module.on_predict_batch_start(ctx),
            Self::OnPredictBatchEnd => module.on_predict_batch_end(ctx),
        }
    }
}

impl StepHook {
    /// Calls the hook of a module.
    pub(crate) fn call_module<M: LightningModule>(
        self,
        module: &M,
        ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        match self {
            Self::OnBeforeZeroGrad => module.on_before_zero_grad(ctx),
            Self::OnBeforeBackward => module.on_before_backward(ctx),
            Self::OnAfterBackward => module.on_after_backward(ctx),
            Self::OnBeforeOptimizerStep => module.on_before_optimizer_step(ctx),
        }
    }
}
