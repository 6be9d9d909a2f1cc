//! What a layer that is measured has seen.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::measures::LayerMeasures;
use crate::error::{ModuleError, Problem, Result};
use crate::ffi;
use crate::precision::fp8::{Observer, QuantConfig};

/// One conversion for measuring; its layers share it.
#[derive(Debug)]
pub(crate) struct Measuring {
    pub config: QuantConfig,
    /// The beginning of the files' names, once they were written.
    pub written: Mutex<Option<PathBuf>>,
}

/// Measures one layer.
#[derive(Debug)]
pub(crate) struct LayerObserver {
    pub fqn: String,
    pub measuring: Arc<Measuring>,
    /// The dimension of the channels.
    channel_dim: i64,
    measures_output: bool,
    seen: Mutex<Seen>,
}

/// Measured on the device of the tensors, `[1]` or `[channels]` float32 each.
#[derive(Debug, Default)]
struct Seen {
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Option<Tensor>>,
}

/// A tensor's shape, its largest magnitude, or those of its channels; `None` if it is empty.
pub(super) fn observed(tensor: &Tensor, observer: Observer, channel_dim: i64) -> Result<Option<Tensor>> {
    if observer == Observer::Shape {
        let shape: Vec<f32> = tensor.size().iter().map(|size| *size as f32).collect();
        return Ok(Some(Tensor::f_from_slice(&shape)?));
    }
    if tensor.numel() == 0 {
        return Ok(None);
    }
    let magnitudes = tensor.f_detach()?.f_abs()?;
    let most = match observer {
        Observer::MaxabsPerChannel if tensor.dim() > 0 => {
            let dims = tensor.dim() as i64;
            let channel = channel_dim.rem_euclid(dims);
            let others: Vec<i64> = (0..dims).filter(|dim| *dim != channel).collect();
            if others.is_empty() { magnitudes } else { magnitudes.f_amax(others.as_slice(), false)? }
        }
        _ => magnitudes.f_max()?.f_reshape([1])?,
    };
    Ok(Some(most.f_to_kind(Kind::Float)?))
}

impl LayerObserver {
    pub(crate) fn new(
        fqn: String,
        measuring: Arc<Measuring>,
        channel_dim: i64,
        measures_output: bool,
    ) -> Arc<Self> {
        Arc::new(Self { fqn, measuring, channel_dim, measures_output, seen: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, slots: &mut Vec<Option<Tensor>>, slot: usize, tensor: &Tensor) -> Result<()> {
        ffi::refuse_recording("a layer is measured for fp8 inference, which replays do not do; use no graph");
        let _no_grad = tch::no_grad_guard();
        let observer = self.measuring.config.observer_in_force();
        let Some(new) = observed(tensor, observer, self.channel_dim)? else { return Ok(()) };
        if slots.len() <= slot {
            slots.resize_with(slot + 1, || None);
        }
        slots[slot] = Some(match slots[slot].take() {
            None => new,
            Some(_) if observer == Observer::Shape => new,
            Some(known) if known.size() != new.size() => {
                let what = format!("{:?} channels after {:?}", new.size(), known.size());
                let problem = Problem::new(what, "measure with observer maxabs");
                return Err(ModuleError::Input { layer: self.fqn.clone(), problem }.into());
            }
            Some(known) => known.f_to_device(new.device())?.f_maximum(&new)?,
        });
        Ok(())
    }

    /// Measures what the layer is given.
    pub(crate) fn inputs(&self, inputs: &[&Tensor]) -> Result<()> {
        let mut seen = self.lock();
        inputs.iter().enumerate().try_for_each(|(slot, input)| self.note(&mut seen.inputs, slot, input))
    }

    /// Measures what a layer computes on the way, after its inputs: attention weights.
    pub(crate) fn inner(&self, slot: usize, tensor: &Tensor) -> Result<()> {
        self.note(&mut self.lock().inputs, slot, tensor)
    }

    /// Measures what the layer gives, if that is asked for.
    pub(crate) fn output(&self, output: &Tensor) -> Result<()> {
        if !self.measures_output {
            return Ok(());
        }
        self.note(&mut self.lock().outputs, 0, output)
    }

    /// What it has seen so far; `None` if it was never called.
    ///
    /// # Sync
    /// Reads from the device.
    pub(crate) fn measures(&self) -> Result<Option<LayerMeasures>> {
        let seen = self.lock();
        if seen.inputs.iter().all(Option::is_none) {
            return Ok(None);
        }
        let read = |slots: &[Option<Tensor>]| -> Result<Vec<Vec<f32>>> {
            let read = |slot: &Option<Tensor>| match slot {
                Some(tensor) => Ok(Vec::try_from(tensor.f_to_device(tch::Device::Cpu)?)?),
                None => Ok(Vec::new()),
            };
            slots.iter().map(read).collect()
        };
        Ok(Some(LayerMeasures { inputs: read(&seen.inputs)?, outputs: read(&seen.outputs)?, weight: None }))
    }
}
