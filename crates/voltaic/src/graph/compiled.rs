//! A graph that is ready to be replayed.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tch::Tensor;

use super::frozen::FrozenWeights;
use super::ir::Graph;
use super::metrics;
use super::metrics_dump::dump_metrics_if_asked;
use super::passes::{self, Passes};
use super::plan::{PlanStats, plan};
use super::show;
use crate::error::{GraphError, Result};
use crate::ffi::{self, Recording, ReplayGraph, ReplayStats, Replayed};

/// A captured function that can be replayed: one segment for each part between two `mark_step`s.
#[derive(Debug, Default)]
pub(crate) struct CompiledGraph {
    pub(super) segments: Vec<Segment>,
    /// The weights of results that are kept; without, replays compute all.
    frozen: Option<FrozenWeights>,
}

impl CompiledGraph {
    /// Runs the kernels once more, with `inputs` in place of the placeholders or on what those hold. Gives the outputs
    /// that it was compiled to give away.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], [`GraphError::ShapeChanged`].
    pub(crate) fn replay(&mut self, inputs: Option<&[Tensor]>) -> Result<Vec<Tensor>> {
        let holds = self.frozen.as_mut().is_some_and(FrozenWeights::hold);
        let mut given = Vec::new();
        for segment in &mut self.segments {
            match segment.replay(inputs, !holds) {
                Ok(outputs) => given.extend(outputs),
                Err(error) => {
                    self.frozen.iter_mut().for_each(FrozenWeights::forget);
                    return Err(error);
                }
            }
        }
        Ok(given)
    }

    /// Replays keep what is frozen for as long as nothing writes to its weights, which are among `weights`: a segment, the buffer there, the
    /// tensor.
    pub(super) fn new(segments: Vec<Segment>, weights: Vec<(usize, usize, Tensor)>) -> Self {
        let memory =
            segments.iter().flat_map(|of| of.frozen.iter().map(|&buffer| of.graph.addresses(buffer)));
        let is_frozen = |(at, buffer, _): &(usize, usize, Tensor)| segments[*at].frozen.contains(buffer);
        let weights = weights.into_iter().filter(is_frozen).map(|(.., weight)| weight);
        let has_frozen = segments.iter().any(|segment| segment.stats.num_frozen > 0);
        let frozen = has_frozen.then(|| FrozenWeights::new(weights.collect(), memory.collect()));
        Self { segments, frozen }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    pub(crate) fn plan_stats(&self) -> impl Iterator<Item = PlanStats> {
        self.segments.iter().map(|segment| segment.stats)
    }

    pub(super) fn graphs(&self) -> impl Iterator<Item = &Graph> {
        self.segments.iter().map(|segment| &*segment.graph)
    }

    pub(super) fn replay_stats(&self) -> impl Iterator<Item = ReplayStats> {
        self.segments.iter().map(Segment::replay_stats)
    }

    /// Whether a replay writes to a tensor of a name that begins so.
    pub(super) fn writes_to_named(&self, prefix: &str) -> bool {
        self.graphs().any(|graph| graph.writes_to_named(prefix))
    }
}

/// Whether the log says what a graph on a card is.
static HAS_TOLD: AtomicBool = AtomicBool::new(false);

/// A recording that is ready to be replayed.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) graph: Arc<Graph>,
    pub(super) stats: PlanStats,
    replay: ReplayGraph,
    /// Buffers that frozen results are computed from.
    frozen: BTreeSet<usize>,
    /// Memory that a replay writes and others may see.
    written: Vec<Range<usize>>,
}

impl Segment {
    /// Runs passes over the graph, plans what they leave of it and prepares its calls.
    pub(super) fn compile(
        recording: Recording,
        graph: Graph,
        inputs: &[Tensor],
        outputs: &[Tensor],
        passes: Passes,
    ) -> Result<Self> {
        if let Some(problem) = graph.problem() {
            return Err(problem.into());
        }
        dump_metrics_if_asked(None);
        let timer = metrics::Compilation::start();
        let passes = if graph.is_on_card { Passes::NONE } else { passes };
        if graph.is_on_card && !HAS_TOLD.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "graphs on a Gaudi card run the recorded operators one after the other, in eager mode: no compiled recipe stands behind them, and no pass of compile runs"
            );
        }
        let program = passes::run(&graph, passes, show::is_asked());
        let frozen = program.frozen_weights();
        let shown = program.notes.is_some().then(|| program.clone());
        let (plan, stats) = plan(program, uses_out_variants());
        if let Some(program) = shown {
            show::add(&graph, program, &plan, stats);
        }
        let replay = recording.build(&plan, inputs, outputs)?;
        timer.finish(&graph);
        let written = graph.written_outside();
        Ok(Self { graph: Arc::new(graph), stats, replay, frozen, written })
    }

    /// Runs the kernels once more; those of frozen results only with `computes_frozen`. Gives what the replay gives away.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], and then nothing has run; [`GraphError::ShapeChanged`].
    pub(super) fn replay(&mut self, inputs: Option<&[Tensor]>, computes_frozen: bool) -> Result<Vec<Tensor>> {
        let replayed = self.replay.replay(inputs, computes_frozen);
        self.written.iter().for_each(ffi::note_write);
        match replayed? {
            Replayed::Done(outputs) => Ok(outputs),
            Replayed::Gone(buffer) => Err(GraphError::TensorGone { tensor: self.name_of(buffer) }.into()),
            Replayed::Misfit(node) => Err(GraphError::ShapeChanged {
                op: self.graph.nodes[node].op.clone(),
                place: self.graph.place(node),
                is_undone: self.graph.is_pure_before(node),
            }
            .into()),
        }
    }

    pub(super) fn replay_stats(&self) -> ReplayStats {
        self.replay.stats()
    }

    fn name_of(&self, buffer: usize) -> String {
        if let Some(name) = self.graph.buffer_name(buffer) {
            return format!("`{name}`");
        }
        let reader = self
            .graph
            .nodes
            .iter()
            .position(|node| node.values().any(|value| self.graph.values[value].buffer == buffer));
        match reader {
            Some(node) => {
                format!("a tensor that {} {} uses", self.graph.nodes[node].op, self.graph.place(node))
            }
            None => "a tensor of the graph".to_owned(),
        }
    }
}

/// Out variants save the making of tensors; `VOLTAIC_GRAPH_OUT=0` does without them, to compare.
fn uses_out_variants() -> bool {
    std::env::var_os("VOLTAIC_GRAPH_OUT").is_none_or(|value| value != "0")
}
