//! Manual optimization as the trainer does it: backward and optimizer steps that a `training_step` asks for.

use std::collections::HashSet;

use tch::Tensor;

use crate::error::{ConfigError, Result};
use crate::ffi::{self, RecordingPause};
use crate::graph;
use crate::module::{HookContext, LightningModule, ManualOptimization, StepHook};
use crate::nn::{ModuleExt, Parameter};
use crate::optim::Optimizer;
use crate::precision::{LossScale, disable_casts};
use crate::trainer::session::anomaly::check_anomaly;
use crate::trainer::session::engine::Engine;
use crate::trainer::session::hooks::InStep;

impl<M: LightningModule> ManualOptimization for InStep<'_, M> {
    fn backward(&mut self, ctx: &mut HookContext<'_>, loss: &Tensor) -> Result<()> {
        let _no_casts = disable_casts(ctx.device())?; // those of the step are for its forward
        check_anomaly(self.engine.of_call.anomaly.as_ref(), "the loss", loss, &ctx.at.progress)?;
        self.call(ctx, StepHook::OnBeforeBackward)?;
        let toggled = self.engine.of_call.toggled_optimizer;
        let open = &mut self.engine.of_call.has_open_grads;
        open.resize(ctx.training.optimizers.len(), false);
        open.iter_mut()
            .enumerate()
            .for_each(|(index, open)| *open |= toggled.is_none_or(|toggled| toggled == index));
        self.run_backward(ctx, loss, true)?;
        self.call(ctx, StepHook::OnAfterBackward)
    }

    fn step(&mut self, ctx: &mut HookContext<'_>, optimizer_idx: usize) -> Result<()> {
        let _no_casts = disable_casts(ctx.device())?;
        let Engine { strategy, loss_scale, of_call, .. } = &mut *self.engine;
        strategy.check_averaged()?;
        if let Some(scale) = loss_scale.as_ref().filter(|_| !of_call.has_scaled) {
            let scale = scale.get_scale();
            let what = format!("gradients are to be divided by {scale}, but no loss was multiplied by it");
            let remedy = "call ctx.manual_backward(&loss), not loss.backward()";
            return Err(ConfigError::new("optimizer.step", what, remedy).into());
        }
        let optimizer = &mut ctx.training.optimizers[optimizer_idx];
        let is_finite = unscale(loss_scale, std::slice::from_mut(optimizer), ctx.at.progress.global_step)?;
        self.call(ctx, StepHook::OnBeforeOptimizerStep)?;
        if is_finite {
            let optimizer = &mut ctx.training.optimizers[optimizer_idx];
            let is_captured = graph::is_capturing();
            if is_captured {
                let _unrecorded = RecordingPause::begin(); // replays read the learning rate where it is put now
                optimizer.prepare_replay()?;
            }
            optimizer.step()?;
            ffi::clear_autocast_cache()?; // it holds the weights from before, in another dtype
            if is_captured {
                let _unrecorded = RecordingPause::begin();
                self.engine.of_call.captured_optimizers.note(optimizer_idx, optimizer.as_mut())?;
            }
            graph::note_optimizer_step();
        }
        ctx.run.hardware.accelerator.step_boundary()?;
        ctx.at.progress.global_step += 1;
        self.engine
            .of_call
            .has_open_grads
            .iter_mut()
            .skip(optimizer_idx)
            .take(1)
            .for_each(|open| *open = false);
        Ok(())
    }

    fn toggle(&mut self, ctx: &HookContext<'_>, optimizer_idx: usize) {
        self.untoggle();
        self.engine.of_call.toggled_optimizer = Some(optimizer_idx);
        let groups = ctx.training.optimizers[optimizer_idx].param_groups();
        let params = || groups.iter().flat_map(|group| group.params());
        // an optimizer may have parts of parameters, under their names
        let (ids, names): (HashSet<u64>, HashSet<&str>) =
            params().map(|(fqn, p)| (p.id(), fqn.as_str())).unzip();
        let is_own = |(fqn, p): &(String, Parameter)| ids.contains(&p.id()) || names.contains(fqn.as_str());
        let all = self.module.as_dyn().named_parameters();
        for (_, parameter) in all.into_iter().filter(|named| !is_own(named)) {
            let required = parameter.requires_grad();
            let _ = parameter.set_requires_grad(false);
            self.engine.of_call.toggled.push((parameter, required));
        }
    }

    fn untoggle(&mut self) {
        self.engine.of_call.toggled_optimizer = None;
        for (parameter, required) in self.engine.of_call.toggled.drain(..) {
            let _ = parameter.set_requires_grad(required);
        }
    }
}

/// With a loss scale: takes it out of the gradients, and notes whether they are finite. Returns whether the optimizers may
/// step; without one they always may.
pub(crate) fn unscale(
    loss_scale: &mut Option<LossScale>,
    optimizers: &mut [Box<dyn Optimizer>],
    global_step: u64,
) -> Result<bool> {
    let Some(loss_scale) = loss_scale else { return Ok(true) };
    let (scale, mut all_finite) = (loss_scale.get_scale(), true);
    for optimizer in optimizers {
        all_finite &= optimizer.unscale(1.0 / scale)?; // sync point
    }
    loss_scale.record(all_finite);
    if !all_finite {
        let count = loss_scale.skipped_steps() + u64::from(loss_scale.grad_scaler().is_none());
        tracing::info!(
            "step {global_step} is left out ({count} so far): its gradients are not finite; the loss was scaled by {scale}"
        );
    }
    Ok(all_finite)
}
