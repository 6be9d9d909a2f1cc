//! The memory of a rank: weights, gradients, master weights and optimizer states, on the device and in host memory.

use std::fmt;
use std::sync::atomic::Ordering;

use super::config::{ZeroConfig, ZeroStage};
use super::swapper::Files;
use super::unit::Unit;
use super::weight_shard::Moved;
use crate::config::format_size;
use crate::dtype::bytes_of;
use crate::nn::{Module, ModuleExt};
use crate::optim::OptimizerState;
use crate::swap::StoreStats;

/// Bytes of a rank between two steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MemoryReport {
    /// Beside the weights.
    device: Held,
    /// Offloaded.
    host: Held,
}

/// Bytes in one kind of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Held {
    parameters: usize,
    /// At most: those of an open accumulation window.
    gradients: usize,
    masters: usize,
    /// Of optimizer states, which exist after the first step.
    states: usize,
    /// Of unsharded weights, the most at a time.
    unsharded: usize,
    buffers: usize,
}

/// The largest sizes in bytes so far, of memory that is freed and allocated during a step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Peaks {
    pub gradients: usize,
    pub offloaded_gradients: usize,
    /// Of states on the device.
    pub states: usize,
    pub offloaded_states: usize,
}

impl MemoryReport {
    /// The highest use in a run: with these peaks, and at most so many elements unsharded at once.
    pub fn with(self, peaks: Peaks, max_live: usize, units: &[Unit]) -> Self {
        let sharded = units.iter().filter(|unit| unit.shards_weights());
        let element = sharded.map(|unit| unit.layout.kind.elt_size_in_bytes()).max().unwrap_or(0);
        let Self { device, host } = self;
        Self {
            device: Held {
                gradients: peaks.gradients,
                states: peaks.states,
                unsharded: max_live * element,
                ..device
            },
            host: Held { gradients: peaks.offloaded_gradients, states: peaks.offloaded_states, ..host },
        }
    }

    /// The report on a module whose trained parameters are in `units`.
    pub fn of(module: &dyn Module, units: &[Unit], config: &ZeroConfig) -> Self {
        let in_unit = |id: u64| {
            let mut places = units.iter().flat_map(|unit| &unit.layout.places);
            places.any(|place| place.parameter.id() == id)
        };
        let others = module.parameters().into_iter().filter(|parameter| !in_unit(parameter.id()));
        let mut device = Held {
            parameters: others.map(|it| it.numel() * it.kind().elt_size_in_bytes()).sum(),
            buffers: module.named_buffers().iter().map(|(_, buffer)| bytes_of(buffer.tensor())).sum(),
            ..Held::default()
        };
        let mut host = Held::default();
        for unit in units {
            let layout = &unit.layout;
            let element = layout.kind.elt_size_in_bytes();
            let is_trained = unit.trained().any(|trained| trained);
            let shard = element * layout.shard_len;
            let stored = if layout.is_stored_apart() { &mut host } else { &mut device };
            match unit.has_master {
                // on the host, the shard beside it is all that there is in memory without master weights
                _ if unit.is_shard_in_file && (unit.has_master || layout.is_stored_apart()) => {}
                true => stored.masters += 4 * layout.shard_len,
                // in float32 the shard is all that there is of sharded weights, and a copy of others
                false if unit.shards_weights() || layout.is_stored_apart() => stored.parameters += shard,
                false => {}
            }
            let stays_unsharded = config.stage == ZeroStage::One;
            if is_trained && !unit.is_shard_in_file && (layout.is_stored_apart() || !stays_unsharded) {
                stored.gradients += shard;
            }
            if is_trained && stays_unsharded {
                device.gradients += element * layout.len();
            }
            if !unit.shards_weights() {
                device.parameters += element * layout.len();
            } else if unit.has_master && layout.has_shard_beside_weights() {
                device.parameters += shard;
            }
            if layout.device != tch::Device::Cpu {
                device.parameters += unit.weight_shard_bytes_on(layout.device);
                host.parameters += unit.weight_shard_bytes_on(tch::Device::Cpu);
            }
        }
        Self { device, host }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.device)?;
        if self.host != Held::default() {
            write!(f, "; in host memory {}", self.host)?;
        }
        Ok(())
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameters, gradients, masters, buffers, states, unsharded } = *self;
        let size = |bytes: usize| format_size(bytes);
        write!(f, "parameters {}, gradients {}, ", size(parameters), size(gradients))?;
        if masters > 0 {
            write!(f, "master weights {}, ", size(masters))?;
        }
        if states > 0 {
            write!(f, "optimizer states {}, ", size(states))?;
        }
        if unsharded > 0 {
            write!(f, "weights in use {}, ", size(unsharded))?;
        }
        write!(f, "buffers {}", size(buffers))
    }
}

/// What moved per optimizer step, as a sentence; nothing if nothing did.
pub(super) fn moved_per_step(moved: &Moved) -> Option<String> {
    let [steps, to_host, to_device] =
        [&moved.steps, &moved.to_host, &moved.to_device].map(|count| count.load(Ordering::Relaxed));
    let per_step = |bytes: usize| format_size(bytes / steps.max(1));
    (steps > 0 && to_host + to_device > 0).then(|| {
        format!("{} to host memory and {} to the device per step", per_step(to_host), per_step(to_device))
    })
}

/// What was in files and moved there per optimizer step, as a sentence.
pub(super) fn swapped_per_step(stats: StoreStats, files: &Files, moved: &Moved) -> String {
    let StoreStats { file_bytes, kept_bytes, buffer_bytes, read_bytes, written_bytes, waited } = stats;
    let steps = moved.steps.load(Ordering::Relaxed).max(1);
    let size = |bytes: u64| format_size(usize::try_from(bytes).unwrap_or(usize::MAX));
    let per_step = |bytes: u64| size(bytes / steps as u64);
    let [busy, waited, updating] =
        [files.busy(), waited, files.updating].map(|time| time.as_secs_f64() / steps as f64);
    if file_bytes == 0 {
        return format!(
            "nothing in files: {} are in tensors below aio.min_bytes, which stay in memory",
            format_size(kept_bytes)
        );
    }
    let hidden = 100.0 * (1.0 - waited / busy.max(waited).max(f64::MIN_POSITIVE));
    format!(
        "{} in files with buffers of {}, read {} and wrote {} per step: {busy:.3} s, of which training waited for {waited:.3} s \
         ({hidden:.0}% hidden); a step of the optimizer took {updating:.3} s",
        size(file_bytes),
        format_size(buffer_bytes),
        per_step(read_bytes),
        per_step(written_bytes),
    )
}

/// Bytes of the states that an optimizer has made: on this device, and in other memory.
pub(super) fn state_bytes(state: &OptimizerState, device: tch::Device) -> (usize, usize) {
    let bytes = |is_there: bool| {
        let tensors = state.tensors.iter().map(|(_, tensor)| tensor);
        tensors.filter(|tensor| (tensor.device() == device) == is_there).map(bytes_of).sum()
    };
    (bytes(true), bytes(false))
}
