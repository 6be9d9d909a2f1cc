//! A graph that is ready to be replayed.

use std::sync::Arc;

use tch::Tensor;

use super::ir::Graph;
use super::metrics;
use super::metrics_dump::dump_metrics_if_asked;
use super::passes::{self, Passes};
use super::plan::{PlanStats, plan};
use super::show;
use crate::error::{GraphError, Result};
use crate::ffi::{Recording, ReplayGraph, ReplayStats, Replayed};

/// A captured function that can be replayed: one segment for each part between two `mark_step`s.
#[derive(Debug, Default)]
pub(crate) struct CompiledGraph {
    pub(super) segments: Vec<Segment>,
}

impl CompiledGraph {
    /// Runs the kernels once more, with `inputs` in place of the placeholders or on what those hold. Gives the outputs
    /// that it was compiled to give away.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], [`GraphError::ShapeChanged`].
    pub(crate) fn replay(&mut self, inputs: Option<&[Tensor]>) -> Result<Vec<Tensor>> {
        let mut given = Vec::new();
        for segment in &mut self.segments {
            given.extend(segment.replay(inputs)?);
        }
        Ok(given)
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

/// A recording that is ready to be replayed.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) graph: Arc<Graph>,
    pub(super) stats: PlanStats,
    replay: ReplayGraph,
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
        let program = passes::run(&graph, passes, show::is_asked());
        let shown = program.notes.is_some().then(|| program.clone());
        let (plan, stats) = plan(program, uses_out_variants());
        if let Some(program) = shown {
            show::add(&graph, program, &plan, stats);
        }
        let replay = recording.build(&plan, inputs, outputs)?;
        timer.finish(&graph);
        Ok(Self { graph: Arc::new(graph), stats, replay })
    }

    /// Runs the kernels once more. Gives what the replay gives away.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], and then nothing has run; [`GraphError::ShapeChanged`].
    pub(super) fn replay(&mut self, inputs: Option<&[Tensor]>) -> Result<Vec<Tensor>> {
        match self.replay.replay(inputs)? {
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
