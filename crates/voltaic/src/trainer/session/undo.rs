//! What a training batch changes before its optimizer step, so that a run that fails within the batch can be resumed
//! from the batch's beginning.

use tch::Tensor;

use crate::accelerator::rng;
use crate::device::Device;
use crate::error::Result;
use crate::module::{LightningModule, MetricsMark};
use crate::nn::{Snapshot, SnapshotParts};
use crate::precision::GradScaler;
use crate::trainer::session::batch::Window;
use crate::trainer::session::run::Run;

/// A run as it was before a training batch, but for weights and optimizers, which do not change until its end.
pub(crate) struct Undo {
    /// Buffers, and gradients of the batches before in the window.
    module: Snapshot,
    rng: Vec<(String, Tensor)>,
    metrics: MetricsMark,
    grad_scaler: Option<GradScaler>,
}

impl Undo {
    /// What the batch to come may change.
    pub(crate) fn before<M: LightningModule>(
        module: &M,
        run: &Run,
        device: Device,
        window: Window,
    ) -> Result<Self> {
        let parts = SnapshotParts { buffers: true, grads: !window.opens, ..SnapshotParts::default() };
        Ok(Self {
            module: Snapshot::of(module, parts)?,
            rng: rng::states(device)?,
            metrics: run.log.metrics.mark()?,
            grad_scaler: run.engine.grad_scaler.clone(),
        })
    }

    /// Goes back to it.
    pub(crate) fn restore<M: LightningModule>(self, module: &M, run: &mut Run, device: Device) -> Result<()> {
        self.module.restore(module)?;
        run.log.metrics.go_back(self.metrics, device)?;
        run.engine.grad_scaler = self.grad_scaler;
        rng::set_states(&self.rng)
    }
}
