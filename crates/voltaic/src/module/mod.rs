//! What a user writes: a module with its steps, its optimizers and its hooks.

mod context;
mod log_value;
mod metrics;
mod metrics_state;

use tch::Tensor;

use crate::data::{Batch, Stage};
use crate::nn::Module;
use crate::optim::Optimizers;

pub use context::{CheckpointRequest, HookContext, LogEntry, Requests, RunFacts, StepContext};
pub use log_value::{LogValue, ReduceFx};
pub(crate) use metrics::{Level, Logged, MetricStore, Phase, Scope};
pub(crate) use metrics_state::MetricsState;

/// Where a run stands; saved in every checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// The epoch in progress, from 0.
    pub current_epoch: u64,
    /// Optimizer steps done.
    pub global_step: u64,
    /// Batches of the current epoch done.
    pub batch_idx: u64,
    /// Batches done in all epochs.
    pub total_batches: u64,
    /// The current epoch is over: its end hooks have run.
    pub epoch_ended: bool,
}

/// A model with all that training it takes.
///
/// Steps get `&self`, so they cannot change the module by accident; layers with state (running means) update their
/// buffers in place. Hooks get `&mut self`. All hooks of Lightning's `LightningModule` keep their names.
///
/// Steps and hooks return `anyhow::Result`, so that any `?` works; the trainer adds hook, step and rank.
#[allow(unused_variables)]
pub trait LightningModule: Module + Sized {
    /// What the data loaders yield.
    type Batch: Batch;

    /// Loss of one training batch: a scalar that requires grad.
    ///
    /// # Errors
    /// Any error ends the run.
    fn training_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor>;

    /// Metrics of one validation batch, given to `ctx.log`. Runs without grad, in evaluation mode.
    ///
    /// # Errors
    /// Any error ends the run.
    fn validation_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        Err(not_implemented("validation_step", "limit_val_batches=0"))
    }

    /// Metrics of one test batch, given to `ctx.log`. Runs without grad, in evaluation mode.
    ///
    /// # Errors
    /// Any error ends the run.
    fn test_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        Err(not_implemented("test_step", "limit_test_batches=0"))
    }

    /// Predictions for one batch. Runs without grad, in evaluation mode.
    ///
    /// # Errors
    /// Any error ends the run.
    fn predict_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Err(not_implemented("predict_step", "limit_predict_batches=0"))
    }

    /// The optimizers, and their learning rate schedules.
    ///
    /// # Errors
    /// Any error ends the run.
    fn configure_optimizers(&self) -> anyhow::Result<Optimizers>;

    /// Called first in each of fit, validate, test and predict.
    ///
    /// # Errors
    /// Any error ends the run.
    fn setup(&mut self, stage: Stage) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called last in each of fit, validate, test and predict, not after a failure.
    ///
    /// # Errors
    /// Any error ends the run.
    fn teardown(&mut self, stage: Stage) -> anyhow::Result<()> {
        Ok(())
    }

    /// Values to be saved in every checkpoint beside the weights.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_save_checkpoint(&mut self) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::Value::Null)
    }

    /// Gets what [`LightningModule::on_save_checkpoint`] returned when the checkpoint was written.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_load_checkpoint(&mut self, saved: &serde_json::Value) -> anyhow::Result<()> {
        Ok(())
    }

    /// The values that made this module, for loggers and checkpoints; `null` if it has none.
    fn hyper_parameters(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// Called once before the sanity check, when module and optimizers are in place.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called once at the very end of fit.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before the validation batches that are run to find mistakes early.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_sanity_check_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after them.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_sanity_check_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before the first epoch.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_train_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after the last epoch.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_train_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before the first batch of an epoch.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after the last batch and validation of an epoch.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before each training step.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after each training step, its loss in `ctx.loss()`.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_train_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before the gradients are dropped.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_before_zero_grad(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before the backward pass.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_before_backward(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after each backward pass, before clipping.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_after_backward(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before each optimizer step, before clipping; gradients are complete.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before validation, in evaluation mode.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_validation_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after `on_validation_start`.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_validation_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before each validation step.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_validation_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after each validation step.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_validation_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after the last validation batch; what it logs is part of the result.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_validation_epoch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after `on_validation_epoch_end`, when the metrics are complete.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before testing, in evaluation mode.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_test_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after `on_test_start`.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_test_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before each test step.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_test_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after each test step.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_test_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after the last test batch; what it logs is part of the result.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_test_epoch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after `on_test_epoch_end`.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_test_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before prediction, in evaluation mode.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_predict_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after `on_predict_start`.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_predict_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before each prediction step.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_predict_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after each prediction step.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_predict_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after the last prediction batch.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_predict_epoch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called after `on_predict_epoch_end`.
    ///
    /// # Errors
    /// Any error ends the run.
    fn on_predict_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(())
    }
}

fn not_implemented(step: &str, way_out: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "the module has no {step}, but there are batches for it; implement {step}, or set {way_out}"
    )
}
