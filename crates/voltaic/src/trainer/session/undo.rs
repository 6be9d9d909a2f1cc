//! What a training batch changes before its optimizer step, so that a run that fails within the batch can be resumed
//! from the batch's beginning.

use tch::Tensor;

use crate::accelerator::rng;
use crate::error::Result;
use crate::ffi;
use crate::module::{LightningModule, MetricsMark};
use crate::nn::{Buffer, ModuleExt};
use crate::precision::GradScaler;
use crate::trainer::run::fit::Window;
use crate::trainer::session::session::Session;

/// A run as it was before a training batch, but for weights and optimizers, which do not change until its end.
pub(crate) struct Undo {
    rng: Vec<(String, Tensor)>,
    buffers: Vec<(String, Tensor)>,
    /// Gradients of the batches before in the window; none at its first batch.
    grads: Vec<(String, Tensor)>,
    metrics: MetricsMark,
    grad_scaler: Option<GradScaler>,
}

impl<M: LightningModule> Session<'_, M> {
    /// Whether a batch has to be undone if it fails: somebody saves then. Steps of manual optimization cannot be.
    pub(crate) fn can_undo(&self) -> bool {
        let saves = self.run.callbacks.iter().any(|callback| callback.saves_on_exception());
        saves && self.module.automatic_optimization()
    }

    /// Keeps what the batch to come may change.
    pub(crate) fn keep_for_undo(&mut self, window: Window) -> Result<()> {
        let copies = |tensors: Vec<(String, Tensor)>| -> Result<Vec<(String, Tensor)>> {
            tensors.into_iter().map(|(fqn, tensor)| Ok((fqn, tensor.f_detach()?.copy()))).collect()
        };
        let buffer = |(fqn, buffer): (String, &Buffer)| (fqn, buffer.shallow_clone());
        let buffers = self.module.named_buffers().into_iter().map(buffer).collect();
        let parameters = if window.opens { Vec::new() } else { self.module.named_parameters() };
        let grads = parameters.into_iter().map(|(fqn, parameter)| (fqn, parameter.grad()));
        self.undo = Some(Undo {
            rng: rng::states(self.plan.device)?,
            buffers: copies(buffers)?,
            grads: copies(grads.filter(|(_, grad)| grad.defined()).collect())?,
            metrics: self.run.metrics.mark()?,
            grad_scaler: self.run.grad_scaler.clone(),
        });
        Ok(())
    }

    /// Goes back to the beginning of the batch that has failed, if one has before its optimizer step.
    pub(crate) fn undo(&mut self) -> Result<()> {
        let Some(undo) = self.undo.take() else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        for (fqn, buffer) in self.module.named_buffers() {
            if let Some((_, before)) = undo.buffers.iter().find(|(name, _)| *name == fqn) {
                buffer.shallow_clone().f_copy_(before)?;
            }
        }
        let parameters = self.module.named_parameters();
        for (fqn, grad) in &undo.grads {
            if let Some((_, parameter)) = parameters.iter().find(|(name, _)| name == fqn) {
                ffi::set_grad(parameter, grad)?;
            }
        }
        self.run.metrics.go_back(undo.metrics, self.plan.device)?;
        self.run.grad_scaler = undo.grad_scaler;
        rng::set_states(&undo.rng)
    }
}
