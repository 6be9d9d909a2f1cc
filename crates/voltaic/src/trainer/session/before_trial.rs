//! What a short run before the real one changes, to be put back.

use tch::Tensor;

use crate::accelerator::rng;
use crate::error::Result;
use crate::ffi;
use crate::module::LightningModule;
use crate::nn::{ModuleExt, Snapshot, SnapshotParts};

type Tensors = Vec<(String, Tensor)>;

/// What a trial keeps, once its module is complete: the module may be made in `configure_model`.
#[derive(Default)]
pub(crate) enum BeforeTrial {
    /// No trial.
    #[default]
    Nothing,
    /// The first call to come; with the random states of now.
    First(Tensors),
    /// What it was.
    Done(Box<Before>),
}

impl BeforeTrial {
    /// Called when the module is complete and on its device.
    pub fn take_first<M: LightningModule>(&mut self, module: &M) -> Result<()> {
        if let Self::First(rng) = self {
            *self = Self::Done(Box::new(Before::of(module, std::mem::take(rng))?));
        }
        Ok(())
    }
}

/// What a trial changes: weights, buffers, metrics, random numbers.
pub(crate) struct Before {
    module: Snapshot,
    rng: Tensors,
}

impl Before {
    fn of<M: LightningModule>(module: &M, rng: Tensors) -> Result<Self> {
        // the trial has the device's memory for itself
        let parts =
            SnapshotParts { parameters: true, buffers: true, metrics: true, on_host: true, grads: false };
        Ok(Self { module: Snapshot::of(module, parts)?, rng })
    }

    /// Puts everything back; gradients of the trial are gone.
    pub fn restore<M: LightningModule>(&self, module: &M) -> Result<()> {
        self.module.restore(module)?;
        let parameters = module.parameters();
        ffi::clear_grads(parameters.iter().map(|parameter| parameter.tensor()))?;
        rng::set_states(&self.rng)
    }
}
