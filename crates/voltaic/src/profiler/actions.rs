//! What the trainer's actions are called, apart from hooks, which are named by whose they are and by their method.

use crate::data::Stage;

/// An epoch of training, from its first batch to its last.
pub(crate) const TRAINING_EPOCH: &str = "run_training_epoch";
/// A training batch, from forward to the optimizer step.
pub(crate) const TRAINING_BATCH: &str = "run_training_batch";
/// The next training batch is fetched.
pub(crate) const NEXT_TRAINING_BATCH: &str = "[_TrainingEpochLoop].train_dataloader_next";
/// A checkpoint is collected and handed on.
pub(crate) const SAVE_CHECKPOINT: &str = "save_checkpoint";

/// The next batch of an evaluation is fetched.
pub(crate) const fn next_eval_batch(stage: Stage) -> &'static str {
    match stage {
        Stage::Fit | Stage::Validate => "[_EvaluationLoop].val_next",
        Stage::Test => "[_EvaluationLoop].test_next",
        Stage::Predict => "[_PredictionLoop].predict_next",
    }
}

/// A hook of a callback.
pub(crate) fn of_callback(state_key: &str, hook: &str) -> String {
    format!("[Callback]{state_key}.{hook}")
}

/// A hook, or another method, of the module.
pub(crate) fn of_module(type_name: &str, hook: &str) -> String {
    format!("[LightningModule]{type_name}.{hook}")
}

/// A hook of the data module.
pub(crate) fn of_data(type_name: &str, hook: &str) -> String {
    format!("[LightningDataModule]{type_name}.{hook}")
}

/// What a strategy does.
pub(crate) fn of_strategy(name: &str, method: &str) -> String {
    format!("[Strategy]{name}.{method}")
}
