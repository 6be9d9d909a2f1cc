//! What a training batch changes before its optimizer step, so that a run that fails within the batch can be resumed
//! from the batch's beginning.

use tch::Tensor;

use crate::accelerator::rng;
use crate::device::Device;
use crate::error::Result;
use crate::module::{LightningModule, MetricsMark, Progress};
use crate::nn::{ModuleExt, Snapshot, SnapshotParts};
use crate::precision::LossScale;
use crate::trainer::session::run::Run;

/// What a training batch changes before its optimizer step, as it was before the batch, or with several ranks before the accumulation
/// window: a run that fails within the batch can be resumed from there. Weights and optimizers do not change until then.
pub(crate) struct Undo {
    /// Buffers.
    module: Snapshot,
    /// Gradients of the batches before in the window.
    grads: Vec<(String, Tensor)>,
    rng: Vec<(String, Tensor)>,
    metrics: MetricsMark,
    /// Where the run stood.
    progress: Progress,
    loss_scale: Option<LossScale>,
}

impl Undo {
    /// What the batch to come may change.
    pub(crate) fn before<M: LightningModule>(
        module: &M,
        run: &Run,
        device: Device,
        opens_window: bool,
    ) -> Result<Self> {
        let parts = SnapshotParts { buffers: true, ..SnapshotParts::default() };
        let grads = if opens_window { Vec::new() } else { run.engine.strategy.grads(module.as_dyn())? };
        let grads = grads.into_iter().map(|(name, grad)| Ok((name, copied(&grad)?)));
        Ok(Self {
            module: Snapshot::of(module, parts)?,
            grads: grads.collect::<Result<_>>()?,
            rng: rng::states(device)?,
            metrics: run.log.metrics.mark()?,
            progress: run.at.progress.clone(),
            loss_scale: run.engine.loss_scale.clone(),
        })
    }

    /// Goes back to it.
    pub(crate) fn restore<M: LightningModule>(self, module: &M, run: &mut Run, device: Device) -> Result<()> {
        self.module.restore(module)?;
        run.engine.strategy.set_grads(module.as_dyn(), &self.grads)?;
        run.log.metrics.go_back(self.metrics, device)?;
        run.at.progress = self.progress;
        run.engine.loss_scale = self.loss_scale;
        rng::set_states(&self.rng)
    }
}

fn copied(tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
