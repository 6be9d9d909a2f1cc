//! Tells how the time of each action is spread over its calls, and over what happens within it.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use voltaic_macros::Defaults;

use super::durations::Durations;
use super::profiler::ProfiledRun;
use super::profiler::Profiler;
use super::report::{Output, significant};
use crate::error::{ConfigError, Error, ProfilerError, Result, shortened};

/// A number of rows, or a fraction of all of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum RowLimit {
    /// So many rows.
    Rows(u64),
    /// This part of them, from 0.0 to 1.0.
    Fraction(f64),
}

impl RowLimit {
    fn of(self, available: usize) -> usize {
        match self {
            Self::Rows(rows) => available.min(usize::try_from(rows).unwrap_or(usize::MAX)),
            Self::Fraction(fraction) => (available as f64 * fraction).round() as usize,
        }
    }
}

/// What [`AdvancedProfiler`] reports, and where.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdvancedProfilerConfig {
    /// Folder of the reports; that of the run unless set.
    pub dirpath: Option<PathBuf>,
    /// Write `<stage>-<filename>.txt`, with `-<rank>` if there are several ranks. Without this and `dirpath` rank 0 prints
    /// its report.
    pub filename: Option<String>,
    /// Rows of the report, those with the most time: a number, or a fraction of all.
    #[default(RowLimit::Fraction(1.0))]
    pub line_count_restriction: RowLimit,
    /// Also write `<stage>-<filename>.json` with all numbers.
    pub dump_stats: bool,
    /// Also measure each call of a module, as `[module]Linear: fc1`. Each call costs a little (docs/hooks.md).
    pub record_module_names: bool,
}

/// An action at its place within others.
#[derive(Debug)]
struct Node {
    action: String,
    parent: Option<usize>,
    depth: usize,
    durations: Durations,
    /// Time of the actions within it.
    within: Duration,
}

impl Node {
    fn own(&self) -> Duration {
        self.durations.total.saturating_sub(self.within)
    }
}

/// Tells of each action, at each place where it occurs within others: number of calls, all time, own time (without the
/// actions within it), mean, extremes and percentiles of its duration. Counts start again with each stage.
///
/// Lightning's `AdvancedProfiler` shows Python's functions within each action; here actions are the grain, and
/// [`ctx.profile`](crate::module::StepContext::profile) adds one's own.
#[derive(Debug)]
pub struct AdvancedProfiler {
    output: Output,
    rows: RowLimit,
    dumps: bool,
    records_modules: bool,
    nodes: Vec<Node>,
    /// Actions that run, the innermost last, and when they began.
    running: Vec<(usize, Instant)>,
}

impl Default for AdvancedProfiler {
    fn default() -> Self {
        Self::of(AdvancedProfilerConfig::default())
    }
}

/// Levels that rows are indented by: all are as wide as the widest.
const MAX_INDENT: usize = 50;
/// Characters that are shown of an action.
const MAX_NAME: usize = 200;
const PERCENTILES: [f64; 3] = [50.0, 90.0, 99.0];
const HEADER: [&str; 11] = [
    "Action",
    "Num calls",
    "Total time (s)",
    "Own time (s)",
    "Own %",
    "Mean (s)",
    "Min (s)",
    "50 % (s)",
    "90 % (s)",
    "99 % (s)",
    "Max (s)",
];

impl AdvancedProfiler {
    /// Reports as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] if the limit of rows is neither a number nor a fraction.
    pub fn new(config: AdvancedProfilerConfig) -> Result<Self, ConfigError> {
        if let RowLimit::Fraction(fraction) = config.line_count_restriction
            && !(0.0..=1.0).contains(&fraction)
        {
            let what = format!("{fraction} is neither a fraction nor a number of rows");
            let remedy = "use a fraction from 0.0 to 1.0, or a whole number of rows";
            return Err(ConfigError::new("AdvancedProfiler.line_count_restriction", what, remedy));
        }
        Ok(Self::of(config))
    }

    fn of(config: AdvancedProfilerConfig) -> Self {
        Self {
            output: Output::new(config.dirpath, config.filename),
            rows: config.line_count_restriction,
            records_modules: config.record_module_names,
            dumps: config.dump_stats,
            nodes: Vec::new(),
            running: Vec::new(),
        }
    }

    fn record(&mut self, index: usize, duration: Duration) {
        self.nodes[index].durations.add(duration);
        if let Some(parent) = self.nodes[index].parent {
            self.nodes[parent].within += duration;
        }
    }

    /// The node of an action within what runs.
    fn node(&mut self, action: &str) -> usize {
        let parent = self.running.last().map(|(index, _)| *index);
        let known = self.nodes.iter().position(|node| node.parent == parent && node.action == action);
        known.unwrap_or_else(|| {
            self.nodes.push(Node {
                action: action.to_owned(),
                parent,
                depth: self.running.len(),
                durations: Durations::default(),
                within: Duration::ZERO,
            });
            self.nodes.len() - 1
        })
    }

    /// All nodes that have ended at least once: each before those within it, the longest first.
    fn in_order(&self) -> Vec<usize> {
        let mut within: HashMap<Option<usize>, Vec<usize>> = HashMap::new();
        self.nodes
            .iter()
            .enumerate()
            .for_each(|(index, node)| within.entry(node.parent).or_default().push(index));
        let mut take = |parent| {
            let mut nodes = within.remove(&parent).unwrap_or_default();
            nodes.sort_by_key(|&index| (self.nodes[index].durations.total, Reverse(index)));
            nodes
        };
        let (mut order, mut waiting) = (Vec::new(), take(None));
        while let Some(index) = waiting.pop() {
            if self.nodes[index].durations.calls > 0 {
                order.push(index);
            }
            waiting.extend(take(Some(index)));
        }
        order
    }

    fn report(&self) -> String {
        let mut order = self.in_order();
        let (all, shown) = (order.len(), self.rows.of(order.len()));
        // of equal ones the outer comes first, so that each row has the one it is within above it
        let mut longest = order.clone();
        longest.sort_by_key(|&index| Reverse(self.nodes[index].durations.total));
        let longest: HashSet<usize> = longest.into_iter().take(shown).collect();
        order.retain(|index| longest.contains(index));
        let outermost = self.nodes.iter().filter(|node| node.parent.is_none());
        let total: f64 = outermost.map(|node| node.durations.total.as_secs_f64()).sum();
        let rows: Vec<[String; 11]> = order.iter().map(|&index| row(&self.nodes[index], total)).collect();
        let mut text = format!("{}\n\n{}", self.output.title(), table(&rows));
        if shown < all {
            text.push_str(&format!("{shown} of {all} rows (line_count_restriction)\n"));
        }
        text.push('\n');
        text
    }

    fn dump(&self) -> Value {
        let nodes = self.in_order().into_iter().map(|index| {
            let Node { action, depth, durations, .. } = &self.nodes[index];
            let [p50, p90, p99] = PERCENTILES.map(|percent| durations.percentile(percent).as_secs_f64());
            json!({
                "action": action, "depth": depth, "num_calls": durations.calls,
                "total_s": durations.total.as_secs_f64(), "own_s": self.nodes[index].own().as_secs_f64(),
                "mean_s": durations.mean().as_secs_f64(), "min_s": durations.min.as_secs_f64(),
                "p50_s": p50, "p90_s": p90, "p99_s": p99, "max_s": durations.max.as_secs_f64(),
            })
        });
        Value::Array(nodes.collect())
    }
}

/// Cells of a node; `total` seconds are 100 %.
fn row(node: &Node, total: f64) -> [String; 11] {
    let Node { durations, .. } = node;
    let seconds = |duration: Duration| significant(duration.as_secs_f64(), 5);
    let part = if total > 0.0 { 100.0 * node.own().as_secs_f64() / total } else { 0.0 };
    let [p50, p90, p99] = PERCENTILES.map(|percent| seconds(durations.percentile(percent)));
    [
        format!("{}{}", "  ".repeat(node.depth.min(MAX_INDENT)), shortened(&node.action, MAX_NAME)),
        durations.calls.to_string(),
        seconds(durations.total),
        seconds(node.own()),
        format!("{part:.2}"),
        seconds(durations.mean()),
        seconds(durations.min),
        p50,
        p90,
        p99,
        seconds(durations.max),
    ]
}

/// Columns as wide as they need to be; numbers end at the right.
fn table(rows: &[[String; 11]]) -> String {
    let widths: Vec<usize> = (0..HEADER.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.chain([HEADER[column].len()]).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: &[&str]| {
        let mut text = format!("|  {:<1$}  |", cells[0], widths[0]);
        for (cell, width) in cells.iter().zip(&widths).skip(1) {
            text.push_str(&format!("  {cell:>width$}  |"));
        }
        text
    };
    let header = line(&HEADER);
    let rule = "-".repeat(header.chars().count());
    let mut text = format!("{rule}\n{header}\n{rule}\n");
    for row in rows {
        let cells: Vec<&str> = row.iter().map(String::as_str).collect();
        text.push_str(&line(&cells));
        text.push('\n');
    }
    text + &rule + "\n"
}

impl Profiler for AdvancedProfiler {
    fn records_modules(&self) -> bool {
        self.records_modules
    }

    fn setup(&mut self, run: &ProfiledRun) -> Result<()> {
        self.nodes.clear();
        self.running.clear();
        self.output.setup(run);
        Ok(())
    }

    fn start(&mut self, action: &str) -> Result<()> {
        if self.running.iter().any(|(index, _)| self.nodes[*index].action == action) {
            return Err(ProfilerError::AlreadyStarted { action: action.to_owned() }.into());
        }
        let index = self.node(action);
        self.running.push((index, Instant::now()));
        Ok(())
    }

    fn stop(&mut self, action: &str) -> Result<()> {
        let now = Instant::now();
        let is_running = self.running.iter().any(|(index, _)| self.nodes[*index].action == action);
        match self.running.last() {
            Some(&(index, started)) if self.nodes[index].action == action => {
                self.running.pop();
                self.record(index, now - started);
                Ok(())
            }
            Some(&(index, _)) if is_running => {
                let inner = self.nodes[index].action.clone();
                Err(ProfilerError::NotInnermost { action: action.to_owned(), inner }.into())
            }
            _ => Err(ProfilerError::NeverStarted { action: action.to_owned() }.into()),
        }
    }

    fn summary(&self) -> String {
        self.report()
    }

    fn describe(&mut self) -> Result<()> {
        self.output.write(&self.summary())?;
        if self.dumps {
            let path = self.output.path("json");
            let text = serde_json::to_string_pretty(&self.dump())
                .map_err(|error| Error::io("serialize", &path, error.into()))?;
            self.output.replace(&path, &text)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls that are given: name, milliseconds, and what happens within.
    struct Call(&'static str, u64, &'static [Call]);

    fn play(profiler: &mut AdvancedProfiler, calls: &[Call]) {
        for Call(action, millis, within) in calls {
            profiler.start(action).expect("not running");
            play(profiler, within);
            let (index, _) = profiler.running.pop().expect("running");
            profiler.record(index, Duration::from_millis(*millis));
        }
    }

    fn played() -> AdvancedProfiler {
        let mut profiler = AdvancedProfiler::default();
        play(
            &mut profiler,
            &[
                Call("epoch", 100, &[Call("batch", 30, &[Call("step", 20, &[])]), Call("batch", 50, &[])]),
                Call("step", 300, &[]),
            ],
        );
        profiler
    }

    #[test]
    fn time_is_told_by_place_and_without_what_is_within() {
        let profiler = played();
        let dump = profiler.dump();
        let told = |key: &str| -> Vec<Value> {
            dump.as_array().expect("a list").iter().map(|node| node[key].clone()).collect()
        };
        assert_eq!(told("action"), ["step", "epoch", "batch", "step"]);
        assert_eq!(told("depth"), [0, 0, 1, 2]);
        assert_eq!(told("num_calls"), [1, 1, 2, 1]);
        assert_eq!(told("total_s"), [0.3, 0.1, 0.08, 0.02]);
        assert_eq!(told("own_s"), [0.3, 0.02, 0.06, 0.02]);
        assert_eq!((told("min_s")[2].as_f64(), told("max_s")[2].as_f64()), (Some(0.03), Some(0.05)));
        let report = profiler.report();
        let row = report.lines().find(|line| line.contains("    step")).expect("the inner one");
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells[1..6], ["step", "1", "0.02", "0.02", "5.00"], "{report}");
    }

    #[test]
    fn the_rows_with_the_most_time_are_kept() {
        for (limit, kept) in [
            (RowLimit::Rows(2), vec!["step", "epoch"]),
            (RowLimit::Fraction(0.75), vec!["step", "epoch", "batch"]),
        ] {
            let mut profiler = played();
            profiler.rows = limit;
            let report = profiler.report();
            let rows: Vec<&str> =
                report.lines().skip(5).filter_map(|line| Some(line.split('|').nth(1)?.trim())).collect();
            assert_eq!(rows, kept, "{report}");
            assert!(report.contains("of 4 rows (line_count_restriction)"), "{report}");
        }
        let config = AdvancedProfilerConfig {
            line_count_restriction: RowLimit::Fraction(2.5),
            ..AdvancedProfilerConfig::default()
        };
        let error = AdvancedProfiler::new(config).expect_err("no fraction").to_string();
        assert!(error.contains("AdvancedProfiler.line_count_restriction: 2.5 is neither"), "{error}");
    }

    #[test]
    fn a_report_of_deep_ranges_and_long_names_is_bounded() {
        let mut profiler = AdvancedProfiler::default();
        let names: Vec<String> = (0..2000).map(|depth| format!("{depth} {}", "n".repeat(1000))).collect();
        names.iter().for_each(|name| profiler.start(name).expect("another name"));
        names.iter().rev().for_each(|name| profiler.stop(name).expect("the innermost"));
        let report = profiler.report();
        assert!(report.lines().count() > 2000 && report.len() < 2000 * 600, "{} bytes", report.len());
    }

    #[test]
    fn actions_end_in_reverse_order() {
        let mut profiler = AdvancedProfiler::default();
        assert!(profiler.stop("a").is_err());
        profiler.start("a").expect("first");
        profiler.start("b").expect("within it");
        let error = profiler.start("a").expect_err("it runs").to_string();
        assert!(error.contains("cannot start `a`"), "{error}");
        let error = profiler.stop("a").expect_err("b runs").to_string();
        assert!(error.contains("cannot stop `a` while `b` runs"), "{error}");
        profiler.stop("b").expect("the innermost");
        profiler.stop("a").expect("then the other");
        assert_eq!(profiler.in_order().len(), 2);
    }
}
