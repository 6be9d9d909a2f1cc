//! The memory of a rank: weights, gradients, master weights and optimizer states.

use std::fmt;

use super::config::{ZeroConfig, ZeroStage};
use super::unit::Unit;
use crate::config::format_size;
use crate::dtype::bytes_of;
use crate::nn::{Module, ModuleExt};
use crate::optim::OptimizerState;

/// Bytes of a rank between two steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MemoryReport {
    parameters: usize,
    /// At most: those of an open accumulation window.
    gradients: usize,
    masters: usize,
    buffers: usize,
    /// Of optimizer states, which exist after the first step.
    states: usize,
    /// Of unsharded weights, the most at a time.
    whole: usize,
}

/// The largest sizes in bytes so far, of memory that is freed and allocated during a step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Peaks {
    pub gradients: usize,
    pub states: usize,
}

impl MemoryReport {
    /// The highest use in a run: with these peaks, and at most so many elements unsharded at once.
    pub fn with(self, peaks: Peaks, max_live: usize, units: &[Unit]) -> Self {
        let divided = units.iter().filter(|unit| unit.is_sharded());
        let element = divided.map(|unit| unit.layout.kind.elt_size_in_bytes()).max().unwrap_or(0);
        Self { gradients: peaks.gradients, states: peaks.states, whole: max_live * element, ..self }
    }

    /// The report on a module whose trained parameters are in `units`.
    pub fn of(module: &dyn Module, units: &[Unit], config: &ZeroConfig) -> Self {
        let in_unit = |id: u64| {
            let mut places = units.iter().flat_map(|unit| &unit.layout.places);
            places.any(|place| place.parameter.id() == id)
        };
        let others = module.parameters().into_iter().filter(|parameter| !in_unit(parameter.id()));
        let mut held = Self {
            parameters: others.map(|it| it.numel() * it.kind().elt_size_in_bytes()).sum(),
            buffers: module.named_buffers().iter().map(|(_, buffer)| bytes_of(buffer.tensor())).sum(),
            ..Self::default()
        };
        for unit in units {
            let layout = &unit.layout;
            let element = layout.kind.elt_size_in_bytes();
            let is_trained = unit.trained().any(|trained| trained);
            held.parameters += element * if unit.is_sharded() { layout.part_len } else { layout.len() };
            let whole = config.stage == ZeroStage::One;
            let elements = if whole { layout.len() } else { layout.part_len };
            held.gradients += if is_trained { element * elements } else { 0 };
            held.masters += if unit.has_master { 4 * layout.part_len } else { 0 };
        }
        held
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameters, gradients, masters, buffers, states, whole } = *self;
        let size = |bytes: usize| format_size(bytes);
        write!(f, "parameters {}, gradients {}, ", size(parameters), size(gradients))?;
        if masters > 0 {
            write!(f, "master weights {}, ", size(masters))?;
        }
        if states > 0 {
            write!(f, "optimizer states {}, ", size(states))?;
        }
        if whole > 0 {
            write!(f, "weights in use {}, ", size(whole))?;
        }
        write!(f, "buffers {}", size(buffers))
    }
}

/// Bytes of the states that an optimizer has made.
pub(super) fn state_bytes(state: &OptimizerState) -> usize {
    state.tensors.iter().map(|(_, tensor)| bytes_of(tensor)).sum()
}
