//! Manual optimization as the trainer does it: backward and optimizer steps that a `training_step` asks for.

use tch::Tensor;

use crate::error::{ConfigError, Result};
use crate::ffi::RecordingPause;
use crate::graph;
use crate::module::{
    BatchFacts, LightningModule, ManualOptimization, StepHook, StepState, step_lr_scheduler,
};
use crate::nn::ModuleExt;
use crate::optim::Optimizer;
use crate::precision::GradScaler;
use crate::trainer::session::anomaly::check_anomaly;
use crate::trainer::session::hooks::Parts;

/// Serves one `training_step` with manual optimization.
pub(crate) struct Manual<'a, M> {
    pub parts: Parts<'a>,
    pub module: &'a M,
    pub batch: BatchFacts<'a>,
}

/// Reborrows the state for one of several calls.
pub(crate) fn again<'s>(state: &'s mut StepState<'_>) -> StepState<'s> {
    StepState { metrics: state.metrics, progress: state.progress }
}

impl<M: LightningModule> ManualOptimization for Manual<'_, M> {
    fn optimizers(&mut self) -> &mut [Box<dyn Optimizer>] {
        self.parts.optimizers
    }

    fn backward(&mut self, mut state: StepState<'_>, loss: &Tensor) -> Result<()> {
        let Self { parts, module, batch, .. } = self;
        check_anomaly(parts.anomaly, "the loss", loss, state.progress)?;
        parts.call_in_step(again(&mut state), *module, StepHook::OnBeforeBackward, batch)?;
        parts.backward(again(&mut state), *module, batch, loss, true)?;
        parts.call_in_step(state, *module, StepHook::OnAfterBackward, batch)
    }

    fn step(&mut self, mut state: StepState<'_>, optimizer_idx: usize) -> Result<()> {
        let Self { parts, module, batch, .. } = self;
        parts.strategy.check_averaged()?;
        if let Some(scaler) = parts.grad_scaler.as_ref().filter(|_| !*parts.has_scaled) {
            let scale = scaler.get_scale();
            let what = format!("gradients are to be divided by {scale}, but no loss was multiplied by it");
            let remedy = "call ctx.manual_backward(&loss), not loss.backward()";
            return Err(ConfigError::new("optimizer.step", what, remedy).into());
        }
        let optimizer = &mut parts.optimizers[optimizer_idx];
        let is_finite =
            unscale(parts.grad_scaler, std::slice::from_mut(optimizer), state.progress.global_step)?;
        parts.call_in_step(again(&mut state), *module, StepHook::OnBeforeOptimizerStep, batch)?;
        if is_finite {
            let optimizer = &mut parts.optimizers[optimizer_idx];
            let is_captured = graph::is_capturing();
            if is_captured {
                let _unrecorded = RecordingPause::begin(); // replays read the learning rate where it is put now
                optimizer.prepare_replay()?;
            }
            optimizer.step()?;
            if is_captured {
                let _unrecorded = RecordingPause::begin();
                parts.captured_optimizers.note(optimizer_idx, optimizer.as_mut())?;
            }
            graph::note_optimizer_step();
        }
        parts.accelerator.step_boundary()?;
        state.progress.global_step += 1;
        Ok(())
    }

    fn toggle(&mut self, optimizer_idx: usize) {
        self.untoggle();
        let groups = self.parts.optimizers[optimizer_idx].param_groups();
        let own: Vec<u64> = groups.iter().flat_map(|group| group.params()).map(|(_, p)| p.id()).collect();
        for parameter in self.module.parameters().into_iter().filter(|p| !own.contains(&p.id())) {
            let required = parameter.requires_grad();
            let _ = parameter.set_requires_grad(false);
            self.parts.toggled.push((parameter, required));
        }
    }

    fn untoggle(&mut self) {
        for (parameter, required) in self.parts.toggled.drain(..) {
            let _ = parameter.set_requires_grad(required);
        }
    }

    fn lr_scheduler_step(&mut self, scheduler_idx: usize, metric: Option<f64>) -> Result<()> {
        step_lr_scheduler(self.parts.optimizers, self.parts.schedulers, scheduler_idx, metric)
    }
}

/// With a gradient scaler: takes its factor out of the gradients, and notes whether they are finite. Returns whether the
/// optimizers may step; without a scaler they always may.
pub(crate) fn unscale(
    scaler: &mut Option<GradScaler>,
    optimizers: &mut [Box<dyn Optimizer>],
    global_step: u64,
) -> Result<bool> {
    let Some(scaler) = scaler else { return Ok(true) };
    let (inverse, mut all_finite) = (1.0 / scaler.get_scale(), true);
    for optimizer in optimizers {
        all_finite &= optimizer.unscale(inverse)?; // sync point
    }
    scaler.record(all_finite);
    if !all_finite {
        let (scale, count) = (scaler.get_scale(), scaler.num_skipped_steps());
        tracing::info!(
            "step {global_step} is left out ({count} so far): its gradients are not finite; the loss was scaled by {scale}, and is by less from now on"
        );
    }
    Ok(all_finite)
}
