//! Counts of what is compiled and replayed, in the format of Habana's metrics.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use super::ir::Graph;
use crate::error::{GraphError, Problem, Result};

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

/// Counts from zero again.
pub fn reset_metrics() {
    METRICS.set(GraphMetrics::default());
}

pub(crate) fn count_hit() {
    METRICS.with_borrow_mut(|metrics| metrics.num_hits += 1);
}

pub(crate) fn count_miss() {
    METRICS.with_borrow_mut(|metrics| metrics.num_misses += 1);
}

/// Code that was to be captured runs without a graph.
pub(crate) fn count_fallback(error: &GraphError) {
    let op = match error {
        GraphError::NotCapturable { op, .. } | GraphError::OnCard { op, .. } => op.as_str(),
        _ => "other",
    };
    METRICS.with_borrow_mut(|metrics| match metrics.fallbacks.iter_mut().find(|(known, _)| known == op) {
        Some((_, count)) => *count += 1,
        None => metrics.fallbacks.push((op.to_owned(), 1)),
    });
}

/// One of Habana's metrics by name, as tags and values, counted on this thread:
///
/// - `graph_compilation`: `TotalNumber`, `TotalTime` and `AvgTime` in microseconds;
/// - `recipe_cache`: `TotalHit`, `TotalMiss`;
/// - `cpu_fallback`: `TotalNumber`, and `FallbackOps.<operator>` for each operator that kept code out of a graph.
///
/// # Errors
/// If there is no metric of that name.
pub fn metric_global(name: &str) -> Result<Vec<(String, f64)>> {
    let metrics = graph_metrics();
    let tag = |tag: &str, value: f64| (tag.to_owned(), value);
    Ok(match name {
        "graph_compilation" => {
            let (number, micros) = (metrics.num_compilations as f64, metrics.compilation_secs * 1e6);
            vec![
                tag("TotalNumber", number),
                tag("TotalTime", micros),
                tag("AvgTime", if number > 0.0 { micros / number } else { 0.0 }),
            ]
        }
        "recipe_cache" => {
            vec![tag("TotalHit", metrics.num_hits as f64), tag("TotalMiss", metrics.num_misses as f64)]
        }
        "cpu_fallback" => {
            let total: u64 = metrics.fallbacks.iter().map(|(_, count)| count).sum();
            let ops =
                metrics.fallbacks.iter().map(|(op, count)| (format!("FallbackOps.{op}"), *count as f64));
            std::iter::once(tag("TotalNumber", total as f64)).chain(ops).collect()
        }
        _ => {
            return Err(GraphError::Arguments {
                problem: Problem::new(
                    format!("Metric with given name ({name}) doesn't exist."),
                    "use graph_compilation, recipe_cache or cpu_fallback",
                ),
            }
            .into());
        }
    })
}
