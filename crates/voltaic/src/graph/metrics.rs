//! Counts of what is compiled and replayed, in the format of Habana's metrics.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::{LazyLock, Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::ir::Graph;
use crate::accelerator::RuntimeFlags;
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
    /// With `PT_HPU_METRICS_GC_DETAILS=1`: the graphs that were made ready, and the microseconds that took.
    pub recipes: Vec<(String, f64)>,
}

/// Habana's metrics, in the order of a dump.
pub(super) const METRICS: [&str; 4] =
    ["graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache"];
/// Stands for no metric, but for a call of `mark_step`.
pub(super) const MARK_STEP: &str = "mark_step";

/// Counts of a thread since it began, and those at its last [`reset_metrics`].
#[derive(Default)]
struct OfThread {
    all: GraphMetrics,
    reset: GraphMetrics,
}

thread_local!(static OF_THREAD: RefCell<OfThread> = RefCell::new(OfThread::default()));

/// Counts of all threads.
static OF_PROCESS: LazyLock<Mutex<GraphMetrics>> = LazyLock::new(Mutex::default);

/// Who wants to know that a metric has changed.
pub(super) static LISTENER: OnceLock<fn(&'static str)> = OnceLock::new();

/// Counts what concerns a metric.
fn count(metric: &'static str, change: impl Fn(&mut GraphMetrics)) {
    OF_THREAD.with_borrow_mut(|own| change(&mut own.all));
    if let Ok(mut all) = OF_PROCESS.lock() {
        change(&mut all);
    }
    LISTENER.get().iter().for_each(|listener| listener(metric));
}

pub(super) fn count_mark_step() {
    count(MARK_STEP, |metrics| metrics.num_mark_steps += 1);
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
        let details = RuntimeFlags::is_on("PT_HPU_METRICS_GC_DETAILS").then(|| {
            let number = process_metrics().num_compilations + 1;
            (format!("graph {number} of {} operators", graph.num_nodes()), took.as_secs_f64() * 1e6)
        });
        count("graph_compilation", |metrics| {
            metrics.num_compilations += 1;
            metrics.compilation_secs += took.as_secs_f64();
            metrics.num_operators += graph.num_nodes() as u64;
            metrics.recipes.extend(details.clone());
        });
    }
}

/// The counts so far.
pub fn graph_metrics() -> GraphMetrics {
    OF_THREAD.with_borrow(|own| own.all.since(&own.reset))
}

/// Those of all threads, since the process began.
pub(super) fn process_metrics() -> GraphMetrics {
    OF_PROCESS.lock().map(|all| all.clone()).unwrap_or_default()
}

/// Counts from zero again on this thread. The list of `PT_HPU_METRICS_GC_DETAILS` stays, as Habana's does.
pub fn reset_metrics() {
    OF_THREAD.with_borrow_mut(|own| own.reset = GraphMetrics { recipes: Vec::new(), ..own.all.clone() });
}

pub(crate) fn count_hit() {
    count("recipe_cache", |metrics| metrics.num_hits += 1);
}

pub(crate) fn count_miss() {
    count("recipe_cache", |metrics| metrics.num_misses += 1);
}

/// Code that was to be captured runs without a graph.
pub(crate) fn count_fallback(error: &GraphError) {
    let op = match error {
        GraphError::NotCapturable { op, .. } => op.as_str(),
        _ => "other",
    };
    count("cpu_fallback", |metrics| match metrics.fallbacks.iter_mut().find(|(known, _)| known == op) {
        Some((_, count)) => *count += 1,
        None => metrics.fallbacks.push((op.to_owned(), 1)),
    });
}

impl GraphMetrics {
    /// What was counted after `start`.
    fn since(&self, start: &Self) -> Self {
        let before = |op: &str| start.fallbacks.iter().find(|(known, _)| known == op).map_or(0, |(_, n)| *n);
        let fallbacks = self.fallbacks.iter().map(|(op, number)| (op.clone(), number - before(op)));
        Self {
            num_compilations: self.num_compilations - start.num_compilations,
            compilation_secs: self.compilation_secs - start.compilation_secs,
            num_operators: self.num_operators - start.num_operators,
            num_hits: self.num_hits - start.num_hits,
            num_misses: self.num_misses - start.num_misses,
            fallbacks: fallbacks.filter(|(_, number)| *number > 0).collect(),
            num_mark_steps: self.num_mark_steps - start.num_mark_steps,
            recipes: self.recipes.iter().skip(start.recipes.len()).cloned().collect(),
        }
    }

    /// The statistics of one of Habana's metrics, by tag; none if there is no such metric.
    pub(super) fn statistics(&self, metric: &str) -> Option<Map<String, Value>> {
        let statistics = match metric {
            "graph_compilation" => {
                let (number, micros) = (self.num_compilations, self.compilation_secs * 1e6);
                let average = if number > 0 { micros / number as f64 } else { 0.0 };
                let mut tags = json!({"TotalNumber": number, "TotalTime": micros, "AvgTime": average});
                if RuntimeFlags::is_on("PT_HPU_METRICS_GC_DETAILS") {
                    tags["recipe"] = json!(self.recipes);
                }
                tags
            }
            "cpu_fallback" => {
                let total: u64 = self.fallbacks.iter().map(|(_, number)| number).sum();
                let ops = self.fallbacks.iter().map(|(op, number)| (op.clone(), Value::from(*number)));
                json!({"TotalNumber": total, "FallbackOps": ops.collect::<Map<_, _>>()})
            }
            // the pool of emulated HPUs moves no memory
            "memory_defragmentation" => {
                json!({"TotalNumber": 0, "TotalSuccessful": 0, "AvgTime": 0, "MaxTime": 0})
            }
            "recipe_cache" => json!({"TotalHit": self.num_hits, "TotalMiss": self.num_misses}),
            _ => return None,
        };
        statistics.as_object().cloned()
    }

    /// The same as tags and numbers.
    fn stats(&self, metric: &str) -> Vec<(String, f64)> {
        let mut stats = Vec::new();
        for (tag, value) in self.statistics(metric).unwrap_or_default() {
            match &value {
                Value::Object(parts) => {
                    let parts = parts.iter().filter_map(|(part, number)| Some((part, number.as_f64()?)));
                    stats.extend(parts.map(|(part, number)| (format!("{tag}.{part}"), number)));
                }
                Value::Array(_) => {
                    stats
                        .extend(self.recipes.iter().map(|(name, micros)| (format!("{tag}.{name}"), *micros)));
                }
                value => stats.extend(value.as_f64().map(|number| (tag, number))),
            }
        }
        stats
    }
}

/// The name of a metric.
fn known(name: &str) -> Result<&'static str> {
    METRICS.into_iter().find(|known| *known == name).ok_or_else(|| {
        let what = format!("Metric with given name ({name}) doesn't exist.");
        GraphError::Arguments { problem: Problem::new(what, format!("use one of {}", METRICS.join(", "))) }
            .into()
    })
}

/// One of Habana's metrics by name, as tags and values, counted on this thread:
///
/// - `graph_compilation`: `TotalNumber`, `TotalTime` and `AvgTime` in microseconds, and with `PT_HPU_METRICS_GC_DETAILS=1`
///   `recipe.<name>` for each graph;
/// - `cpu_fallback`: `TotalNumber`, and `FallbackOps.<operator>` for each operator that kept code out of a graph;
/// - `memory_defragmentation`: `TotalNumber`, `TotalSuccessful`, `AvgTime`, `MaxTime`, which are always zero: voltaic's pools do not move
///   memory that is in use;
/// - `recipe_cache`: `TotalHit`, `TotalMiss`.
///
/// # Errors
/// If there is no metric of that name.
pub fn metric_global(name: &str) -> Result<Vec<(String, f64)>> {
    Ok(graph_metrics().stats(known(name)?))
}

/// One of Habana's metrics, counted on this thread while this is there, or up to [`LocalMetric::stop`]. Several count independently of each
/// other and of [`reset_metrics`].
///
/// ```
/// use voltaic::graph::{mark_step, metric_localcontext};
///
/// # fn main() -> voltaic::Result<()> {
/// let compilations = metric_localcontext("graph_compilation")?;
/// mark_step()?;
/// assert_eq!(compilations.stats()[0], ("TotalNumber".to_owned(), 0.0));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`metric_global`].
pub fn metric_localcontext(name: &str) -> Result<LocalMetric> {
    let mut metric = LocalMetric {
        name: known(name)?,
        start: GraphMetrics::default(),
        end: None,
        _of_this_thread: PhantomData,
    };
    metric.start();
    Ok(metric)
}

/// See [`metric_localcontext`].
#[derive(Debug)]
#[must_use = "stats() says what was counted since it was made"]
pub struct LocalMetric {
    name: &'static str,
    start: GraphMetrics,
    end: Option<GraphMetrics>,
    _of_this_thread: PhantomData<*const ()>,
}

impl LocalMetric {
    fn now() -> GraphMetrics {
        OF_THREAD.with_borrow(|own| own.all.clone())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.name
    }

    /// Tags and values, as [`metric_global`] has them.
    pub fn stats(&self) -> Vec<(String, f64)> {
        let end = self.end.clone().unwrap_or_else(Self::now);
        end.since(&self.start).stats(self.name)
    }

    /// Counts from zero, also after it was stopped.
    pub fn start(&mut self) {
        (self.start, self.end) = (Self::now(), None);
    }

    /// Counts no more; what was counted stays.
    pub fn stop(&mut self) {
        self.end.get_or_insert_with(Self::now);
    }

    /// Counts from zero; one that was stopped stays so, at zero.
    pub fn reset(&mut self) {
        self.start = self.end.clone().unwrap_or_else(Self::now);
    }
}
