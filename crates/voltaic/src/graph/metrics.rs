//! Counts of what is compiled and replayed, in the format of Habana's metrics.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use super::ir::Graph;

/// Counts of this thread, since it began or since [`reset_metrics`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GraphMetrics {
    /// Graphs that were made ready.
    pub num_compilations: u64,
    /// Time that took, in seconds.
    pub compilation_secs: f64,
    /// Operators in them.
    pub num_operators: u64,
    /// Calls that found their graph in a cache.
    pub num_hits: u64,
    /// Calls that did not.
    pub num_misses: u64,
    /// Calls that ran without a graph, by reason.
    pub fallbacks: Vec<(String, u64)>,
    /// Calls of `mark_step`.
    pub num_mark_steps: u64,
}

thread_local!(static METRICS: RefCell<GraphMetrics> = RefCell::new(GraphMetrics::default()));

pub(super) fn count_mark_step() {
    METRICS.with_borrow_mut(|metrics| metrics.num_mark_steps += 1);
}

/// Times the making of one graph.
pub(super) struct Compilation {
    started: Instant,
}

impl Compilation {
    pub(super) fn start() -> Self {
        Self { started: Instant::now() }
    }

    pub(super) fn finish(self, graph: &Graph) {
        let took: Duration = self.started.elapsed();
        METRICS.with_borrow_mut(|metrics| {
            metrics.num_compilations += 1;
            metrics.compilation_secs += took.as_secs_f64();
            metrics.num_operators += graph.num_nodes() as u64;
        });
    }
}

/// The counts so far.
pub fn graph_metrics() -> GraphMetrics {
    METRICS.with_borrow(Clone::clone)
}

/// Begins to count anew.
pub fn reset_metrics() {
    METRICS.set(GraphMetrics::default());
}
