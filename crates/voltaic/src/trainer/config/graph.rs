//! Which parts of a step are captured and replayed, and what became of them.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::graph::CacheStats;

/// What of a training step is captured and replayed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GraphMode {
    /// Nothing.
    #[default]
    Off,
    /// For each shape of batch, forward and backward of `training_step` as one graph, clipping and the optimizer step as
    /// another.
    Step,
    /// Modules that a step calls by `ctx.graphed`: forward and backward of each are two graphs for each shape of inputs.
    Modules,
}

impl fmt::Display for GraphMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Step => "step",
            Self::Modules => "modules",
        })
    }
}

/// What graphs did in a call of fit, validate, test or predict.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GraphReport {
    /// Steps that were captured.
    pub captured_steps: u64,
    /// Steps that were replayed.
    pub replayed_steps: u64,
    /// Steps that ran as usual.
    pub eager_steps: u64,
    /// Optimizer steps, with clipping, that were captured.
    pub captured_updates: u64,
    /// Optimizer steps, with clipping, that were replayed.
    pub replayed_updates: u64,
    /// Why optimizer steps have no graphs any more.
    pub update_refusal: Option<String>,
    /// Graphs that are ready: one for each kind of batch.
    pub graphs: usize,
    /// Why there are no graphs, or none any more, though the configuration asks for them.
    pub refusal: Option<String>,
    /// With `modules`, and with compile outside of training steps: the fqn and type of each module that was called, such as
    /// `encoder (Linear)`, and what its calls found, those of validation in a fit among them.
    pub modules: Vec<(String, CacheStats)>,
    /// Captures by [`HpuGraph`](crate::graph::HpuGraph) that the module made itself, or a
    /// [`Generator`](crate::generation::Generator) with `use_graph`, whatever the configuration says.
    pub captured_by_hand: u64,
    /// Replays of these.
    pub replayed_by_hand: u64,
}
