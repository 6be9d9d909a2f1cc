//! What backward passes and optimizer steps are run with.

use tch::Tensor;

use crate::distributed::Signals;
use crate::error::{Error, Result};
use crate::ffi::AnomalyWatch;
use crate::nn::Parameter;
use crate::precision::LossScale;
use crate::strategy::{Strategy, Votes};
use crate::trainer::session::captured_optimizers::CapturedOptimizers;

/// What backward passes and optimizer steps are run with, automatic and manual ones.
pub(crate) struct Engine {
    pub strategy: Box<dyn Strategy>,
    /// What any rank has been asked, as far as all know.
    pub agreed: Votes,
    /// There with `16-mixed`, and where the strategy scales or leaves out steps.
    pub loss_scale: Option<LossScale>,
    pub of_call: OfCall,
}

/// What of it is of one call of fit, validate, test or predict.
#[derive(Default)]
pub(crate) struct OfCall {
    /// The scale of the losses is in gradients: a loss was multiplied by it, or a checkpoint held such gradients.
    pub has_scaled: bool,
    /// There with `detect_anomaly`.
    pub anomaly: Option<AnomalyWatch>,
    /// Parameters that a manual step has switched, with what they required before.
    pub toggled: Vec<(Parameter, bool)>,
    /// The optimizer that a manual step has toggled: only its parameters get gradients.
    pub toggled_optimizer: Option<usize>,
    /// By optimizer, with manual optimization: there has been a backward pass for it since its last step.
    pub has_open_grads: Vec<bool>,
    /// Whose steps those with manual optimization have captured.
    pub captured_optimizers: CapturedOptimizers,
    /// There while a call runs.
    pub signals: Option<Signals>,
    /// Why this rank could not write what it keeps for all, until all ranks know.
    pub failure: Option<Error>,
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
        self.of_call.has_scaled |= scaled.is_some();
        let loss = scaled.as_ref().unwrap_or(loss);
        self.strategy.begin_backward(loss, syncs, votes)?;
        let done = body(loss);
        self.agreed = self.agreed.or(self.strategy.end_backward(done)?);
        Ok(())
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
