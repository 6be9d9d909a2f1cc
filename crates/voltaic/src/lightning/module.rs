//! `LightningModule`: a model with its steps, its optimizers and its hooks.

use std::path::Path;

use serde::de::DeserializeOwned;
use tch::Tensor;

use super::callback::Callback;
use super::hook_context::HookContext;
use super::hooks::{Hook, StepHook, call_method, each_hook, each_step_hook, hook_methods};
use super::load;
use super::module_tensors::ModuleTensors;
use super::step_context::StepContext;
use crate::checkpoint::{Checkpoint, CheckpointMeta};
use crate::data::{Batch, DataLoader, Stage};
use crate::device::Device;
use crate::error::Error;
use crate::nn::{Module, ModuleExt, set_training};
use crate::optim::{GradientClip, LrScheduler, Optimizer, Optimizers, ParamGroup};

/// A model and how it is trained.
///
/// Steps get `&self`, so they cannot change the module by accident; layers with state (running means) update their
/// buffers in place. Hooks get `&mut self`, except those around backward and the optimizer: with manual optimization they
/// run within `training_step`. All hooks of Lightning's `LightningModule` keep their names and their order
/// (`docs/hooks.md`).
///
/// Steps and hooks return `anyhow::Result`, so that any `?` works; the trainer adds hook, step and rank.
#[allow(unused_variables)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say how it is trained",
    note = "implement `LightningModule` for it: `type Batch`, `training_step` and `configure_optimizers`",
    note = "a network that classifies is trained by `models::Classifier::new(net)`"
)]
pub trait LightningModule: Module + Sized {
    /// What the data loaders yield.
    type Batch: Batch;

    /// Loss of one training batch: a scalar that requires grad.
    ///
    /// `ctx.no_loss()` instead skips the backward pass of this batch. With manual optimization what is returned is only
    /// shown to `on_train_batch_end`.
    fn training_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor>;

    /// Metrics of one validation batch, given to `ctx.log`. Runs without grad, in evaluation mode. A fit of a module without it warns
    /// at the first validation batch, and validates nothing.
    fn validation_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        Err(NotImplemented { step: "validation_step", remedy: "limit_val_batches=0" }.into())
    }

    /// Metrics of one test batch, given to `ctx.log`. Runs without grad, in evaluation mode.
    fn test_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        Err(NotImplemented { step: "test_step", remedy: "limit_test_batches=0" }.into())
    }

    /// Predictions for one batch. Runs without grad, in evaluation mode. More than one tensor, and what is not a tensor, is given by
    /// name: `ctx.output("boxes", &boxes)`, `ctx.output_value("caption", text)`; without a main one return `ctx.no_prediction()`.
    fn predict_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Err(NotImplemented { step: "predict_step", remedy: "limit_predict_batches=0" }.into())
    }

    /// Inputs of the forward pass, on any device: with them [`ModelSummary`](crate::callback::ModelSummary) shows the sizes of each
    /// layer's inputs and outputs before the first batch. Then implement [`LightningModule::forward_example`], too.
    fn example_input_array(&self) -> Option<Vec<Tensor>> {
        None
    }

    /// Runs the forward pass on the example inputs, which are on the device. Without grad, in evaluation mode.
    fn forward_example(&self, inputs: &[Tensor]) -> anyhow::Result<()> {
        anyhow::bail!(
            "the module has example_input_array, but no forward_example; implement it: `self.net.call(&inputs[0])?; Ok(())`"
        )
    }

    /// Whether the trainer runs backward, optimizers and schedules. With `false` the `training_step` does, through its
    /// context: [`StepContext::manual_backward`], [`StepContext::optimizer`], [`StepContext::lr_scheduler_step`].
    fn automatic_optimization(&self) -> bool {
        true
    }

    /// The optimizers, and their learning rate schedules. Automatic optimization takes one, or none to train nothing.
    fn configure_optimizers(&self) -> anyhow::Result<Optimizers>;

    /// Callbacks that belong to the module. They run after the trainer's, and take the place of those of their type.
    fn configure_callbacks(&mut self) -> anyhow::Result<Vec<Box<dyn Callback>>> {
        Ok(Vec::new())
    }

    /// Fetches what the module needs, such as a vocabulary; called on one process of each node before `setup`.
    fn prepare_data(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called first in each of fit, validate, test and predict.
    fn setup(&mut self, stage: Stage) -> anyhow::Result<()> {
        Ok(())
    }

    /// Makes layers that depend on what `setup` found; called after it, before weights are loaded or moved.
    fn configure_model(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Loader for training, if the data given to the trainer has none: with loaders of its own a module is enough for
    /// [`Trainer::fit_module`](crate::trainer::Trainer::fit_module). Made for the whole dataset; dividing it among ranks is
    /// the trainer's part.
    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Self::Batch>>> {
        Ok(None)
    }

    /// Loaders for validation, if the data has none. A fit without any does not validate.
    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Self::Batch>>> {
        Ok(Vec::new())
    }

    /// Loaders for testing, if the data has none.
    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Self::Batch>>> {
        Ok(Vec::new())
    }

    /// Loaders for prediction, if the data has none.
    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Self::Batch>>> {
        Ok(Vec::new())
    }

    /// Changes a batch before it goes to the device, after the data module's hook of this name.
    fn on_before_batch_transfer(
        &mut self,
        batch: Self::Batch,
        dataloader_idx: usize,
    ) -> anyhow::Result<Self::Batch> {
        Ok(batch)
    }

    /// Moves a batch to the device, unless the data module has done so.
    fn transfer_batch_to_device(
        &mut self,
        batch: Self::Batch,
        device: Device,
        dataloader_idx: usize,
    ) -> anyhow::Result<Self::Batch> {
        Ok(batch.move_to(device)?)
    }

    /// Changes a batch that is on the device, after the data module's hook of this name: augmentation, normalization.
    fn on_after_batch_transfer(
        &mut self,
        batch: Self::Batch,
        dataloader_idx: usize,
    ) -> anyhow::Result<Self::Batch> {
        Ok(batch)
    }

    /// Runs the backward pass of a loss, which is divided by `accumulate_grad_batches` and scaled already.
    fn backward(&self, loss: &Tensor, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(loss.f_backward()?)
    }

    /// Drops the gradients at the start of an accumulation window. Not called with manual optimization.
    fn optimizer_zero_grad(
        &self,
        optimizer: &mut dyn Optimizer,
        ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        Ok(optimizer.zero_grad()?)
    }

    /// Limits the gradients before the optimizer steps; `clip` is what the trainer was given. Not called with manual
    /// optimization.
    fn configure_gradient_clipping(
        &self,
        optimizer: &mut dyn Optimizer,
        clip: Option<GradientClip>,
        ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        Ok(clip.map_or(Ok(()), |clip| optimizer.clip(clip).map(drop))?)
    }

    /// Steps the optimizer: override it for a warm-up of your own. Not called with manual optimization, nor for a step left out
    /// because gradients are not finite with `16-mixed`.
    fn optimizer_step(&self, optimizer: &mut dyn Optimizer, ctx: &mut HookContext) -> anyhow::Result<()> {
        Ok(optimizer.step()?)
    }

    /// Steps a learning rate schedule that is due; `metric` is set for one that follows a metric. Not called with manual
    /// optimization.
    fn lr_scheduler_step(
        &self,
        scheduler: &mut dyn LrScheduler,
        groups: &mut [ParamGroup],
        metric: Option<f64>,
    ) -> anyhow::Result<()> {
        Ok(scheduler.step(groups, metric)?)
    }

    /// Drops the gradients before validation within fit, so that their memory is free. Not called while an accumulation
    /// window is open; with manual optimization, while gradients wait for the step of an optimizer.
    fn on_validation_model_zero_grad(&mut self) -> anyhow::Result<()> {
        let parameters = self.parameters();
        Ok(crate::ffi::clear_grads(parameters.iter().map(|parameter| parameter.leaf()))?)
    }

    /// Puts the module into evaluation mode before validation.
    fn on_validation_model_eval(&mut self) -> anyhow::Result<()> {
        set_training(self, false);
        Ok(())
    }

    /// Called after validation within fit, when each layer has the mode again that it had before. After `validate`, `test`
    /// and `predict` the module stays in evaluation mode.
    fn on_validation_model_train(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Puts the module into evaluation mode before testing.
    fn on_test_model_eval(&mut self) -> anyhow::Result<()> {
        set_training(self, false);
        Ok(())
    }

    /// Puts the module into evaluation mode before prediction.
    fn on_predict_model_eval(&mut self) -> anyhow::Result<()> {
        set_training(self, false);
        Ok(())
    }

    /// Called last in each of fit, validate, test and predict, not after a failure.
    fn teardown(&mut self, stage: Stage) -> anyhow::Result<()> {
        Ok(())
    }

    /// Values to be saved in every full checkpoint beside the weights, and tensors, which are put into `tensors`: see
    /// [`ModuleTensors`].
    fn on_save_checkpoint(&mut self, tensors: &mut ModuleTensors) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::Value::Null)
    }

    /// Gets what [`LightningModule::on_save_checkpoint`] returned and put into `tensors` when the checkpoint was written.
    fn on_load_checkpoint(
        &mut self,
        saved: &serde_json::Value,
        tensors: &ModuleTensors,
    ) -> anyhow::Result<()> {
        Ok(())
    }

    /// The values that made this module, for loggers and checkpoints; `null` if it has none.
    fn hyper_parameters(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// A module with the weights of a checkpoint, on the CPU: `make` makes it of the hyper-parameters that were saved, then its weights
    /// are loaded, and it gets what its [`on_save_checkpoint`](LightningModule::on_save_checkpoint) saved. Frozen parameters that the
    /// checkpoint leaves out stay as `make` makes them. So do, unless `strict`, weights whose names are on one side only.
    ///
    /// ```
    /// # use voltaic::models::{Gpt, GptConfig};
    /// # use voltaic::prelude::*;
    /// # fn main() -> Result<()> {
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("last.ckpt");
    /// # let config = GptConfig { vocab_size: 5, block_size: 4, n_layer: 1, n_head: 1, n_embd: 8, ..GptConfig::default() };
    /// # let saved = Gpt::new(config)?;
    /// # Trainer::builder().accelerator("cpu").build()?.save_weights(&saved, &path, None)?;
    /// let gpt = Gpt::load_from_checkpoint(&path, true, Gpt::new)?;
    /// # assert_eq!(gpt.state_dict(), saved.state_dict());
    ///
    /// // with other values than those that were saved
    /// let gpt = Gpt::load_from_checkpoint(&path, true, |config| Gpt::new(GptConfig { dropout: 0.0, ..config }))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Source: Lightning's `LightningModule.load_from_checkpoint`.
    ///
    /// # Errors
    /// As [`Checkpoint::load`]; [`Mismatch`](crate::error::CheckpointError::Mismatch) if `make` takes
    /// other hyper-parameters, shapes differ, or when `strict` names are missing or left over; those of `make` and of `on_load_checkpoint`.
    fn load_from_checkpoint<H: DeserializeOwned, E: From<Error>>(
        path: impl AsRef<Path>,
        strict: bool,
        make: impl FnOnce(H) -> Result<Self, E>,
    ) -> Result<Self, E> {
        let path = path.as_ref();
        let mut checkpoint = Checkpoint::load(path)?;
        let mut module = make(load::hyper_parameters(&checkpoint, path)?)?;
        let saved = load::restore(module.as_dyn(), &mut checkpoint, strict);
        if let Some((saved, tensors)) = saved.map_err(|error| error.of_file(path))? {
            let CheckpointMeta { epoch, global_step, .. } = checkpoint.meta;
            let hook = "on_load_checkpoint";
            module.on_load_checkpoint(&saved, &tensors).map_err(|source| Error::Hook {
                hook,
                rank: 0,
                epoch,
                global_step,
                source,
            })?;
        }
        Ok(module)
    }

    // a method for each hook, with its doc: hooks.rs has the tables
    each_hook!(hook_methods (&mut self, ctx: &mut HookContext));
    each_step_hook!(hook_methods (&self, ctx: &mut HookContext));
}

impl Hook {
    /// Calls the hook of a module.
    pub(crate) fn call_module<M: LightningModule>(
        self,
        module: &mut M,
        ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        each_hook!(call_method(self, Hook, module, (ctx)))
    }
}

impl StepHook {
    /// Calls the hook of a module.
    pub(crate) fn call_module<M: LightningModule>(
        self,
        module: &M,
        ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        each_step_hook!(call_method(self, StepHook, module, (ctx)))
    }
}

/// A step that a module leaves to the trait was called.
#[derive(Debug, thiserror::Error)]
#[error("the module has no {step}, but there are batches for it; implement {step}, or set {remedy}")]
pub(crate) struct NotImplemented {
    step: &'static str,
    remedy: &'static str,
}
