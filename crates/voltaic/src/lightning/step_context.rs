//! The context of steps.

use std::any::Any;
use std::borrow::Cow;

use tch::Tensor;

use super::hook_context::HookContext;
use super::logged::{LogEntry, LogValue};
use super::manual::{ManualOptimization, ManualOptimizer};
use super::output::{OutputValue, StepOutput};
use crate::distributed::{DeviceMesh, ProcessGroup};
use crate::error::Result;
use crate::graph::{Callable, ModuleGraphs, TensorTuple, refuse_capture, replayed_steps};
use crate::nn::Module;
use crate::profiler::Action;

/// Context of one `training_step`, `validation_step`, `test_step` or `predict_step`.
pub struct StepContext<'a> {
    /// The context of hooks within the step.
    pub(crate) ctx: HookContext<'a>,
    pub(crate) outputs: &'a mut StepOutput,
    /// There in a training step with manual optimization.
    pub(crate) manual: Option<&'a mut dyn ManualOptimization>,
    /// There with `trainer.graph=modules`, and with `trainer.compile` outside of training.
    pub(crate) graphs: Option<StepModuleGraphs<'a>>,
}

/// The graphs of the modules that a step calls.
pub(crate) struct StepModuleGraphs<'a> {
    pub graphs: &'a mut ModuleGraphs,
    /// The user's module.
    pub root: &'a dyn Module,
    pub is_training: bool,
}

impl StepContext<'_> {
    /// Logs a scalar under `name`; options are set on what is returned.
    ///
    /// In `training_step` the value is for the step unless `on_epoch(true)` is said; elsewhere it is averaged over
    /// the epoch. Tensors stay on their device until something has to be printed or written.
    pub fn log<'b>(&'b mut self, name: &'b str, value: impl Into<LogValue>) -> LogEntry<'b> {
        self.ctx.log(name, value)
    }

    /// Gives a tensor to the hooks after the step, under a name: `ctx.outputs().tensor("logits")` in
    /// `on_{train,validation,test,predict}_batch_end` of the module and of callbacks has it, detached, on the device. A later one takes the
    /// place of an earlier one of that name. Predictions given so are written by `PredictionWriter`.
    ///
    /// ```
    /// # use voltaic::module::{HookContext, StepContext};
    /// # use voltaic::nn::{Forward, Linear};
    /// # use voltaic::Tensor;
    /// # struct Net { layer: Linear }
    /// # impl Net {
    /// fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
    ///     let logits = self.layer.forward(batch)?;
    ///     ctx.output("logits", &logits);
    ///     Ok(())
    /// }
    ///
    /// fn on_validation_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
    ///     let (batch, logits) = (ctx.batch::<Tensor>()?, ctx.outputs().tensor("logits")?);
    ///     assert_eq!(batch.size()[0], logits.size()[0]);
    ///     Ok(())
    /// }
    /// # }
    /// ```
    pub fn output(&mut self, name: impl Into<Cow<'static, str>>, tensor: &Tensor) {
        self.outputs.put(name.into(), OutputValue::Tensor(tensor.shallow_clone()));
    }

    /// The same of a value of any other type: `ctx.outputs().value::<String>("caption")` has it. Not in a step that a graph
    /// replays, since it would be the value of the step that was captured.
    pub fn output_value<T: Any + Send>(&mut self, name: impl Into<Cow<'static, str>>, value: T) {
        refuse_capture(
            "the step gives a value to ctx.output_value(), which graphs do not compute; give a tensor to ctx.output()",
        );
        let value = OutputValue::Value { value: Box::new(value), type_name: std::any::type_name::<T>() };
        self.outputs.put(name.into(), value);
    }

    /// What `predict_step` returns if all it has is given by name: `return Ok(ctx.no_prediction())`.
    pub fn no_prediction(&self) -> Tensor {
        Tensor::new()
    }

    /// Calls a module that lies within the user's own: with `trainer.graph=modules` by a graph, which is captured for each
    /// kind of inputs, and so it is with `trainer.compile` outside of training, else as usual. For static parts of a step whose other parts cannot be captured.
    ///
    /// ```
    /// # use voltaic::module::StepContext;
    /// # use voltaic::nn::Linear;
    /// # use voltaic::Tensor;
    /// # struct Net { encoder: Linear, decoder: Linear }
    /// # impl Net {
    /// fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
    ///     let hidden = ctx.graphed(&self.encoder, batch)?;
    ///     let kept = hidden.f_index(&[Some(hidden.f_gt(0.0)?)])?; // its size depends on data
    ///     Ok(ctx.graphed(&self.decoder, &kept.f_view([-1, 1])?)?.f_mean(voltaic::Kind::Float)?)
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// The module's own; what a kernel reports.
    pub fn graphed<A: TensorTuple, M: Callable<A>>(
        &mut self,
        module: &M,
        args: &A,
    ) -> anyhow::Result<M::Output> {
        match &mut self.graphs {
            Some(StepModuleGraphs { graphs, root, is_training }) => {
                graphs.call(*root, module, args, *is_training)
            }
            None => module.call(args),
        }
    }

    /// Begins an action of your own for the profiler; it ends when what is returned goes out of scope. Nothing is measured
    /// without a profiler, and in a step that a graph replays.
    ///
    /// # Errors
    /// If an action of this name runs already.
    pub fn profile(&self, action: &str) -> Result<Action> {
        self.ctx.profile(action)
    }

    /// The ranks, to exchange tensors with; `None` for a process alone.
    pub fn process_group(&self) -> Option<&ProcessGroup> {
        self.ctx.process_group()
    }

    /// As [`HookContext::device_mesh`].
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.ctx.device_mesh()
    }

    /// The epoch in progress, from 0.
    pub fn current_epoch(&self) -> u64 {
        self.ctx.current_epoch()
    }

    /// Optimizer steps done, those that graphs have replayed included.
    pub fn global_step(&self) -> u64 {
        let replayed = if self.manual.is_some() { replayed_steps() } else { 0 };
        self.ctx.global_step() + replayed
    }

    /// Position of this batch within its loader, from 0.
    pub fn batch_idx(&self) -> usize {
        self.ctx.batch_idx()
    }

    /// Which of several evaluation loaders this batch is from, from 0.
    pub fn dataloader_idx(&self) -> usize {
        self.ctx.dataloader_idx()
    }
}

const REMEDY: &str = "return false from automatic_optimization, or leave it to the trainer";

impl StepContext<'_> {
    /// Optimizer number `index` of `configure_optimizers`.
    ///
    /// # Errors
    /// If there is none, or optimization is automatic.
    pub fn optimizer(&mut self, index: usize) -> anyhow::Result<ManualOptimizer<'_>> {
        let Some(manual) = self.manual.as_deref_mut() else {
            anyhow::bail!("optimizer({index}) with automatic optimization; {REMEDY}");
        };
        let count = self.ctx.training.optimizers.len();
        anyhow::ensure!(
            index < count,
            "optimizer({index}), but configure_optimizers gave {count}; they count from 0"
        );
        Ok(ManualOptimizer { manual, ctx: self.ctx.again(), index })
    }

    /// Runs the backward pass of a loss with its hooks, scaled as the precision asks for. For manual optimization.
    ///
    /// # Errors
    /// Those of the hooks and of the backward pass; that optimization is automatic.
    pub fn manual_backward(&mut self, loss: &Tensor) -> anyhow::Result<()> {
        match self.manual.as_deref_mut() {
            Some(manual) => Ok(manual.backward(&mut self.ctx, loss)?),
            None => anyhow::bail!("manual_backward with automatic optimization; {REMEDY}"),
        }
    }

    /// The same from an output of any shape, with the gradient of a loss with respect to it: `output.backward(gradient)` of PyTorch. Both
    /// have the same shape.
    ///
    /// # Errors
    /// As [`StepContext::manual_backward`]; if the shapes differ.
    pub fn manual_backward_with_gradient(
        &mut self,
        output: &Tensor,
        gradient: &Tensor,
    ) -> anyhow::Result<()> {
        let (size, given) = (output.size(), gradient.size());
        anyhow::ensure!(
            size == given,
            "a gradient of shape {given:?} for an output of shape {size:?}; give one of the output's shape"
        );
        let gradient = gradient.f_detach()?.f_to_kind(output.kind())?;
        let loss = output.f_mul(&gradient)?.f_sum(output.kind())?;
        self.manual_backward(&loss)
    }

    /// Lets gradients flow only to the parameters of one optimizer until [`StepContext::untoggle_optimizer`], so that
    /// the others' need not be computed. Parameters that two optimizers share stay on.
    ///
    /// # Errors
    /// If there is no such optimizer, or optimization is automatic.
    pub fn toggle_optimizer(&mut self, index: usize) -> anyhow::Result<()> {
        let ManualOptimizer { manual, ctx, .. } = self.optimizer(index)?;
        manual.toggle(&ctx, index);
        Ok(())
    }

    /// Undoes [`StepContext::toggle_optimizer`].
    ///
    /// # Errors
    /// If optimization is automatic.
    pub fn untoggle_optimizer(&mut self) -> anyhow::Result<()> {
        match self.manual.as_deref_mut() {
            Some(manual) => manual.untoggle(),
            None => anyhow::bail!("untoggle_optimizer with automatic optimization; {REMEDY}"),
        }
        Ok(())
    }

    /// Steps schedule number `index`, counted over the optimizers that have one. For manual optimization, where nothing
    /// else steps it. `metric` is for a schedule that follows one.
    ///
    /// # Errors
    /// If there is none, it misses its metric or has ended, or optimization is automatic.
    pub fn lr_scheduler_step(&mut self, index: usize, metric: Option<f64>) -> anyhow::Result<()> {
        match &self.manual {
            Some(_) => Ok(self.ctx.training.step_lr_scheduler(index, metric)?),
            None => anyhow::bail!("lr_scheduler_step with automatic optimization; {REMEDY}"),
        }
    }

    /// What `training_step` returns if there is no loss to go backward from: `return Ok(ctx.no_loss())`.
    pub fn no_loss(&self) -> Tensor {
        Tensor::new()
    }
}
