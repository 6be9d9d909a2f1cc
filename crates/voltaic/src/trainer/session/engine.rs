//! What runs backward passes and optimizer steps: strategy, loss scale, and checks of what they compute.

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;

use crate::checkpoint::OpenWindow;
use crate::distributed::Signals;
use crate::error::{Error, Result};
use crate::ffi::AnomalyWatch;
use crate::module::Progress;
use crate::nn::{CheckpointCalls, InterceptorHandle, Module, ModuleExt, Parameter};
use crate::optim::Optimizer;
use crate::precision::LossScale;
use crate::strategy::{Strategy, Votes};
use crate::trainer::session::gradients::Gradients;

/// What backward passes and optimizer steps are run with, automatic and manual ones.
pub(crate) struct Engine {
    pub strategy: Box<dyn Strategy>,
    /// Requests and signals of any rank that all ranks know.
    pub agreed: Votes,
    /// There with `16-mixed`, and where the strategy scales or leaves out steps.
    pub loss_scale: Option<LossScale>,
    pub of_call: OfCall,
}

/// What of it is of one call of fit, validate, test or predict.
#[derive(Default)]
pub(crate) struct OfCall {
    pub gradients: Gradients,
    /// There in a resumed call until its first batch.
    pub restored: Option<Restored>,
    /// There with `detect_anomaly`.
    pub anomaly: Option<AnomalyWatch>,
    /// Parameters that a manual step has switched, with what they required before.
    pub toggled: Vec<(Parameter, bool)>,
    /// The optimizer that a manual step has toggled: only its parameters get gradients.
    pub toggled_optimizer: Option<usize>,
    /// Whose steps those with manual optimization have captured.
    pub captured_optimizers: CapturedOptimizers,
    /// There in a fit whose modules are checkpointed.
    pub checkpoints: Option<Checkpoints>,
    /// There while a call runs.
    pub signals: Option<Signals>,
    /// Why this rank could not write what it keeps for all, until all ranks know.
    pub failure: Option<Error>,
}

/// What the accumulation window of the first batch depends on, of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Restored {
    /// It has gradients of an open window. All ranks have the same value.
    pub has_grads: bool,
    /// That window, if the checkpoint tells.
    pub window: Option<OpenWindow>,
    /// It is of batches of another size: the first batch begins a window.
    pub has_other_batches: bool,
}

/// The calls that are checkpointed, until this is dropped.
pub(crate) struct Checkpoints {
    pub calls: Rc<CheckpointCalls>,
    pub _handle: InterceptorHandle,
    /// Bytes that may be kept, until the modules for that are chosen.
    pub budget: Option<u64>,
}

impl Engine {
    pub(crate) fn new(strategy: Box<dyn Strategy>, loss_scale: Option<LossScale>) -> Self {
        Self { strategy, agreed: Votes::default(), loss_scale, of_call: OfCall::default() }
    }

    /// A backward pass, which `body` runs from the loss that it is given, scaled if a precision or a strategy scales losses. With `syncs` all
    /// ranks have the mean gradients and know each other's votes afterwards.
    ///
    /// # Collective
    /// With `syncs`, and in stages of ZeRO that shard gradients.
    pub(crate) fn backward(
        &mut self,
        loss: &Tensor,
        syncs: bool,
        votes: Votes,
        body: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let scaled = self.loss_scale.as_ref().map(|scale| scale.scale(loss)).transpose()?;
        let scale = self.loss_scale.as_ref().map(LossScale::get_scale);
        self.of_call.gradients.begin_backward(syncs, scale, self.of_call.toggled_optimizer);
        let loss = scaled.as_ref().unwrap_or(loss);
        self.strategy.begin_backward(loss, syncs, votes)?;
        let done = body(loss);
        self.agreed = self.agreed.or(self.strategy.end_backward(done)?);
        Ok(())
    }

    /// In place of a backward pass if the batch has no loss.
    ///
    /// # Collective
    /// As [`Engine::backward`].
    pub(crate) fn without_loss(&mut self, syncs: bool, votes: Votes) -> Result<()> {
        self.of_call.gradients.window_is_open = !syncs;
        self.agreed = self.agreed.or(self.strategy.without_loss(syncs, votes)?);
        Ok(())
    }

    /// Before gradients are clipped or used: an error if they are not those of all ranks. With a loss scale, takes it out of the gradients
    /// of these optimizers, once, and notes whether they are finite. Returns whether the optimizers may step; without a loss scale they
    /// always may.
    ///
    /// # Collective
    /// If the strategy shards gradients.
    pub(crate) fn unscale(
        &mut self,
        optimizers: &mut [Box<dyn Optimizer>],
        which: Range<usize>,
        global_step: u64,
    ) -> Result<bool> {
        let gradients = &mut self.of_call.gradients;
        gradients.check_closed()?;
        self.strategy.check_averaged()?;
        let Some(loss_scale) = &mut self.loss_scale else { return Ok(true) };
        let (scale, mut all_finite, mut is_new) = (loss_scale.get_scale(), true, false);
        for index in which {
            let Some(optimizer) = optimizers.get_mut(index) else { continue };
            let found = match gradients.found(index, optimizer.name())? {
                Some(found) => found,
                None => {
                    let found = optimizer.unscale(1.0 / scale)?; // sync point
                    gradients.note_unscaled(index, optimizer.as_ref(), found)?;
                    is_new = true;
                    found
                }
            };
            all_finite &= found;
        }
        if !is_new {
            return Ok(all_finite);
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

    /// After optimizer steps, done or left out: adapts the scale of losses. Gradients that wait for a later step get the new one.
    ///
    /// # Collective
    /// As [`Engine::unscale`].
    pub(crate) fn adapt_loss_scale(&mut self, optimizers: &mut [Box<dyn Optimizer>]) -> Result<()> {
        let Some(loss_scale) = &mut self.loss_scale else { return Ok(()) };
        let before = loss_scale.get_scale();
        loss_scale.adapt()?;
        let factor = loss_scale.get_scale() / before;
        if factor == 1.0 {
            return Ok(());
        }
        let gradients = &self.of_call.gradients;
        let waiting = optimizers.iter_mut().enumerate().filter(|(index, _)| gradients.wait_scaled(*index));
        waiting.map(|(_, optimizer)| optimizer).try_for_each(|optimizer| optimizer.unscale(factor).map(drop))
    }

    /// Lets the parameters of one optimizer alone get gradients.
    pub(crate) fn toggle(&mut self, module: &dyn Module, optimizers: &[Box<dyn Optimizer>], index: usize) {
        self.untoggle();
        let Some(optimizer) = optimizers.get(index) else { return };
        self.of_call.toggled_optimizer = Some(index);
        let groups = optimizer.param_groups();
        let params = || groups.iter().flat_map(|group| group.params());
        // an optimizer may have shards of parameters, under their names
        let (ids, names): (HashSet<u64>, HashSet<&str>) =
            params().map(|(fqn, p)| (p.id(), fqn.as_str())).unzip();
        let is_own = |(fqn, p): &(String, Parameter)| ids.contains(&p.id()) || names.contains(fqn.as_str());
        for (_, parameter) in module.named_parameters().into_iter().filter(|named| !is_own(named)) {
            let required = parameter.requires_grad();
            let _ = parameter.set_requires_grad(false);
            self.of_call.toggled.push((parameter, required));
        }
    }

    /// Ends [`Engine::toggle`].
    pub(crate) fn untoggle(&mut self) {
        self.of_call.toggled_optimizer = None;
        for (parameter, required) in self.of_call.toggled.drain(..) {
            let _ = parameter.set_requires_grad(required);
        }
    }

    /// The signal that this rank has received in this call.
    pub(crate) fn signal(&self) -> Option<&'static str> {
        self.of_call.signals.as_ref()?.received().map(|(_, name)| name)
    }

    /// Ends what is of one call.
    pub(crate) fn end_call(&mut self) {
        self.of_call = OfCall::default();
    }
}

/// The optimizers of one fit whose steps a training step has captured by hand: whether a replay still does what they would do.
#[derive(Debug, Default)]
pub(crate) struct CapturedOptimizers(Vec<Captured>);

#[derive(Debug)]
struct Captured {
    optimizer_idx: usize,
    /// What [`Optimizer::prepare_replay`] gave.
    prepared: Option<u64>,
    learning_rates: Vec<f64>,
}

impl CapturedOptimizers {
    /// A step of this optimizer was captured, the first perhaps, which makes its state.
    pub fn note(&mut self, optimizer_idx: usize, optimizer: &mut dyn Optimizer) -> Result<()> {
        let prepared = optimizer.prepare_replay()?;
        self.0.retain(|captured| captured.optimizer_idx != optimizer_idx);
        self.0.push(Captured { optimizer_idx, prepared, learning_rates: learning_rates(optimizer) });
        Ok(())
    }

    /// Puts the learning rates in force where replays read them. Gives what has changed since the capture that a replay
    /// would not follow.
    pub fn refresh(&self, optimizers: &mut [Box<dyn Optimizer>]) -> Result<Option<String>> {
        let mut changed = None;
        for captured in &self.0 {
            let Some(optimizer) = optimizers.get_mut(captured.optimizer_idx) else { continue };
            let prepared = optimizer.prepare_replay()?;
            let what = match (captured.prepared, prepared) {
                (Some(before), Some(now)) if before != now => {
                    "works on other tensors, or with other numbers than a learning rate,"
                }
                (None, _) if captured.learning_rates != learning_rates(optimizer.as_ref()) => {
                    "does not implement prepare_replay and has got another learning rate"
                }
                _ => continue,
            };
            changed = Some(format!("optimizer {} ({}) {what}", captured.optimizer_idx, optimizer.name()));
        }
        Ok(changed)
    }
}

fn learning_rates(optimizer: &dyn Optimizer) -> Vec<f64> {
    optimizer.param_groups().iter().map(|group| group.lr).collect()
}

/// With `detect_anomaly`, which sets a watch: an error if the tensor has NaN or infinity, with the operation that made it.
pub(crate) fn check_anomaly(
    watch: Option<&AnomalyWatch>,
    what: &str,
    tensor: &Tensor,
    progress: &Progress,
) -> Result<()> {
    let Some(watch) = watch else { return Ok(()) };
    let is_finite = !tensor.defined() || tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0; // sync point
    if is_finite {
        return Ok(());
    }
    let operation = watch.take()?;
    let (epoch, global_step) = (progress.current_epoch, progress.global_step);
    Err(Error::Anomaly { what: what.to_owned(), operation, epoch, global_step })
}

/// The same for all gradients.
pub(crate) fn check_gradients(
    watch: Option<&AnomalyWatch>,
    strategy: &dyn Strategy,
    module: &dyn Module,
    progress: &Progress,
) -> Result<()> {
    if watch.is_none() {
        return Ok(());
    }
    strategy
        .grads(module)?
        .into_iter()
        .try_for_each(|(fqn, grad)| check_anomaly(watch, &format!("the gradient of {fqn}"), &grad, progress))
}
