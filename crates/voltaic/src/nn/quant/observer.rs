//! What a layer that is measured has seen.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::measures::LayerMeasures;
use crate::checkpoint::pickle::Value;
use crate::checkpoint::write_torch;
use crate::distributed::global_rank;
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
    /// Calls whose tensors were saved.
    calls: u64,
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

fn on_host(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_to_device(tch::Device::Cpu)?.f_contiguous()?)
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

    /// Whether tensors go to files in place of being measured.
    pub(crate) fn saves_tensors(&self) -> bool {
        self.measuring.config.observer_in_force() == Observer::Save
    }

    /// `FOLDER/tensors/FQN_WHAT.pt` beside the measurements' files; `tensors_1` and so on of other ranks than the first.
    fn save(&self, what: &str, value: &Value) -> Result<()> {
        let prefix = self.measuring.config.dump_stats_path.clone().unwrap_or_default();
        let folder = match global_rank() {
            0 => "tensors".to_owned(),
            rank => format!("tensors_{rank}"),
        };
        write_torch(value, &prefix.with_file_name(folder).join(format!("{}_{what}.pt", self.fqn)))
    }

    fn save_tensor(&self, what: &str, tensor: &Tensor) -> Result<()> {
        ffi::refuse_recording("tensors of a layer are saved, which replays do not do; use no graph");
        let _no_grad = tch::no_grad_guard();
        self.save(what, &Value::Tensor(on_host(tensor)?))
    }

    /// Saves the parameters of the layer.
    pub(crate) fn save_module(&self, parameters: Vec<(&str, &Tensor)>) -> Result<()> {
        let on_host =
            parameters.into_iter().map(|(name, tensor)| Ok((name, Value::Tensor(on_host(tensor)?))));
        self.save("module", &Value::dict(on_host.collect::<Result<Vec<_>>>()?))
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
        if self.saves_tensors() {
            let call = seen.calls;
            seen.calls += 1;
            let mut all = inputs.iter().enumerate();
            return all
                .try_for_each(|(slot, input)| self.save_tensor(&format!("input{slot}_iter{call}"), input));
        }
        inputs.iter().enumerate().try_for_each(|(slot, input)| self.note(&mut seen.inputs, slot, input))
    }

    /// Measures what a layer computes on the way, after its inputs: attention weights.
    pub(crate) fn inner(&self, slot: usize, tensor: &Tensor) -> Result<()> {
        let mut seen = self.lock();
        match self.saves_tensors() {
            true => self.save_tensor(&format!("input{slot}_iter{}", seen.calls.saturating_sub(1)), tensor),
            false => self.note(&mut seen.inputs, slot, tensor),
        }
    }

    /// Measures what the layer gives, if that is asked for.
    pub(crate) fn output(&self, output: &Tensor) -> Result<()> {
        if !self.measures_output {
            return Ok(());
        }
        let mut seen = self.lock();
        match self.saves_tensors() {
            true => self.save_tensor(&format!("output0_iter{}", seen.calls.saturating_sub(1)), output),
            false => self.note(&mut seen.outputs, 0, output),
        }
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
