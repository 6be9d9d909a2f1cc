//! Adds up the time of each action.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use super::profiler::ProfiledRun;
use super::profiler::Profiler;
use super::report::{Output, significant};
use crate::error::{ProfilerError, Result};

/// What [`SimpleProfiler`] reports, and where.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SimpleProfilerConfig {
    /// Folder of the reports; that of the run unless set.
    pub dirpath: Option<PathBuf>,
    /// Write `<stage>-<filename>.txt`, with `-<rank>` if there are several ranks. Without this and `dirpath` rank 0 prints
    /// its report.
    pub filename: Option<String>,
    /// Also report the number of calls and the share of the total time.
    #[default(true)]
    pub extended: bool,
    /// Also measure each call of a module, as `[module]Linear: fc1`. Each call costs a little (docs/hooks.md).
    pub record_module_names: bool,
}

/// Calls of one action.
#[derive(Debug)]
struct Recorded {
    action: String,
    calls: u64,
    total: Duration,
}

impl Recorded {
    fn mean(&self) -> f64 {
        self.total.as_secs_f64() / self.calls as f64
    }
}

/// Adds up the time of each action, over all stages; reports a table sorted by it. Source: Lightning's `SimpleProfiler`.
#[derive(Debug)]
pub struct SimpleProfiler {
    output: Output,
    extended: bool,
    records_modules: bool,
    begun: Instant,
    running: HashMap<String, Instant>,
    recorded: Vec<Recorded>,
    index: HashMap<String, usize>,
}

impl Default for SimpleProfiler {
    fn default() -> Self {
        Self::new(SimpleProfilerConfig::default())
    }
}

impl SimpleProfiler {
    /// Reports as `config` says.
    pub fn new(config: SimpleProfilerConfig) -> Self {
        Self {
            output: Output::new(config.dirpath, config.filename),
            extended: config.extended,
            records_modules: config.record_module_names,
            begun: Instant::now(),
            running: HashMap::new(),
            recorded: Vec::new(),
            index: HashMap::new(),
        }
    }

    fn record(&mut self, action: &str, duration: Duration) {
        let index = match self.index.get(action) {
            Some(&index) => index,
            None => {
                self.index.insert(action.to_owned(), self.recorded.len());
                self.recorded.push(Recorded { action: action.to_owned(), calls: 0, total: Duration::ZERO });
                self.recorded.len() - 1
            }
        };
        self.recorded[index].calls += 1;
        self.recorded[index].total += duration;
    }

    /// The report, when so much time has passed since the profiler was made.
    fn report(&self, elapsed: Duration) -> String {
        self.table(self.recorded.iter().collect(), None, elapsed)
    }

    /// A report for a terminal: names are cut, and actions of little time are one row if there are many.
    fn short_report(&self, elapsed: Duration) -> String {
        let recorded: Vec<Recorded> = self
            .recorded
            .iter()
            .map(|row| Recorded { action: cut(&row.action), calls: row.calls, total: row.total })
            .collect();
        let rows: Vec<&Recorded> = recorded.iter().collect();
        let is_small = |row: &&Recorded| row.total.as_secs_f64() < SMALL * elapsed.as_secs_f64();
        let (small, large): (Vec<_>, Vec<_>) = rows.iter().copied().partition(is_small);
        if rows.len() <= MANY_ROWS || small.len() < 2 {
            return self.table(rows, None, elapsed);
        }
        let others = Recorded {
            action: format!("{} others, each below {} %", small.len(), 100.0 * SMALL),
            calls: small.iter().map(|row| row.calls).sum(),
            total: small.iter().map(|row| row.total).sum(),
        };
        self.table(large, Some(&others), elapsed)
    }

    /// A table of rows, with one of all others at the end.
    fn table(&self, mut rows: Vec<&Recorded>, others: Option<&Recorded>, elapsed: Duration) -> String {
        let all: Vec<&Recorded> = rows.iter().copied().chain(others).collect();
        let mut table = Table::new(&all, self.extended);
        if self.extended {
            rows.sort_by_key(|row| std::cmp::Reverse(row.total));
            let calls: u64 = all.iter().map(|row| row.calls).sum();
            let elapsed = elapsed.as_secs_f64();
            table.row("Total", ["-", &calls.to_string(), &significant(elapsed, 5), "100 %"]);
            table.line();
            for row in rows.into_iter().chain(others) {
                let total = row.total.as_secs_f64();
                let cells = [row.mean(), total, 100.0 * total / elapsed].map(|value| significant(value, 5));
                table.row(&row.action, [&cells[0], &row.calls.to_string(), &cells[1], &cells[2]]);
            }
        } else {
            rows.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
            for row in rows.into_iter().chain(others) {
                let cells = [row.mean(), row.total.as_secs_f64()].map(|value| significant(value, 5));
                table.row(&row.action, [&cells[0], &cells[1]]);
            }
        }
        table.line();
        format!("{}\n{}\n", self.output.title(), table.text)
    }
}

/// An action below this part of all time is small.
const SMALL: f64 = 0.001;
/// Small actions have rows of their own in a table that has no more rows than this.
const MANY_ROWS: usize = 30;

/// At most 64 characters: the beginning, which says whose action it is, and the end, which has the hook.
fn cut(action: &str) -> String {
    const LONGEST: usize = 64;
    const END: usize = 30;
    let characters: Vec<char> = action.chars().collect();
    if characters.len() <= LONGEST {
        return action.to_owned();
    }
    let part = |range: &[char]| range.iter().collect::<String>();
    let begin = LONGEST - END - 3;
    format!("{}...{}", part(&characters[..begin]), part(&characters[characters.len() - END..]))
}

/// Lightning's table: cells are at least 15 wide and end with a tab.
struct Table {
    text: String,
    action_width: usize,
    line_width: usize,
}

impl Table {
    fn new(rows: &[&Recorded], extended: bool) -> Self {
        let longest = rows.iter().map(|row| row.action.chars().count()).max();
        let mut table = Self { text: String::new(), action_width: longest.unwrap_or(0), line_width: 0 };
        let mean = "Mean duration (s)";
        if extended {
            table.row("Action", [mean, "Num calls", "Total time (s)", "Percentage %"]);
        } else {
            table.row("Action", [mean, "Total time (s)"]);
        }
        let header = std::mem::take(&mut table.text);
        table.line_width = width_with_tabs(&header);
        table.line();
        table.text.push_str(&header);
        table.line();
        table
    }

    fn row<const N: usize>(&mut self, action: &str, cells: [&str; N]) {
        self.text.push_str(&format!("\n|  {action:<0$}\t|", self.action_width));
        for cell in cells {
            self.text.push_str(&format!("  {cell:<15}\t|"));
        }
    }

    fn line(&mut self) {
        self.text.push('\n');
        self.text.push_str(&"-".repeat(self.line_width));
    }
}

/// Characters of a line that begins with a line break, with tabs at every eighth column.
fn width_with_tabs(line: &str) -> usize {
    let columns = line.trim_start_matches('\n').chars().fold(0, |column, c| match c {
        '\t' => (column / 8 + 1) * 8,
        _ => column + 1,
    });
    columns + 1
}

impl Profiler for SimpleProfiler {
    fn records_modules(&self) -> bool {
        self.records_modules
    }

    fn setup(&mut self, run: &ProfiledRun) -> Result<()> {
        self.output.setup(run);
        Ok(())
    }

    fn start(&mut self, action: &str) -> Result<()> {
        if self.running.contains_key(action) {
            return Err(ProfilerError::AlreadyStarted { action: action.to_owned() }.into());
        }
        self.running.insert(action.to_owned(), Instant::now());
        Ok(())
    }

    fn stop(&mut self, action: &str) -> Result<()> {
        let now = Instant::now();
        let Some(started) = self.running.remove(action) else {
            return Err(ProfilerError::NeverStarted { action: action.to_owned() }.into());
        };
        self.record(action, now - started);
        Ok(())
    }

    fn summary(&self) -> String {
        self.report(self.begun.elapsed())
    }

    fn describe(&mut self) -> Result<()> {
        let elapsed = self.begun.elapsed();
        let is_whole = self.output.is_to_files();
        self.output.write(&if is_whole { self.report(elapsed) } else { self.short_report(elapsed) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Stage;
    use crate::error::Error;

    #[test]
    fn the_report_is_that_of_lightning() {
        for (extended, expected) in [
            (true, include_str!("../../tests/fixtures/profilers/extended.txt")),
            (false, include_str!("../../tests/fixtures/profilers/short.txt")),
        ] {
            let mut profiler =
                SimpleProfiler::new(SimpleProfilerConfig { extended, ..SimpleProfilerConfig::default() });
            let run = ProfiledRun {
                stage: Stage::Fit,
                rank: 0,
                world_size: 1,
                log_dir: PathBuf::new(),
                device: crate::Device::Cpu,
            };
            profiler.setup(&run).expect("nothing to fail");
            for (action, millis) in [
                ("run_training_batch", 1.5),
                ("[LightningModule]Net.on_train_batch_end", 0.0125),
                ("run_training_batch", 2.5),
                ("run_training_epoch", 2000.0),
                ("a", 0.001),
                ("save_checkpoint", 123_456.0),
            ] {
                profiler.record(action, Duration::from_secs_f64(millis / 1e3));
            }
            assert_eq!(profiler.report(Duration::from_secs(250)), expected);
        }
    }

    #[test]
    fn a_terminal_shows_the_largest_actions_and_short_names() {
        let mut profiler = SimpleProfiler::default();
        let long =
            format!("[Callback]ModelCheckpoint{{{}}}.on_train_batch_end", "'monitor': None, ".repeat(20));
        profiler.record(&long, Duration::from_secs(5));
        profiler.record("run_training_epoch", Duration::from_secs(9));
        for number in 0..100 {
            profiler.record(&format!("hook {number}"), Duration::from_micros(100));
        }
        let elapsed = Duration::from_secs(10);
        let text = profiler.short_report(elapsed);
        assert!(text.contains("[Callback]ModelCheckpoint{'moni...r': None, }.on_train_batch_end"), "{text}");
        assert!(text.contains("100 others, each below 0.1 %"), "{text}");
        assert!(text.lines().count() < 15 && text.lines().all(|line| line.len() < 180), "{text}");
        let total = text.lines().find(|line| line.contains("Total  ")).expect("a row");
        assert!(total.contains("102"), "{total}");
        // a file, and a table of few rows, have all
        let whole = profiler.report(elapsed);
        assert!(whole.contains(&long) && whole.contains("hook 99"), "{whole}");
        let mut few = SimpleProfiler::default();
        few.record("small", Duration::from_nanos(1));
        few.record("smaller", Duration::ZERO);
        assert_eq!(few.short_report(elapsed), few.report(elapsed));
    }

    #[test]
    fn actions_that_begin_twice_or_never_are_refused() {
        let mut profiler = SimpleProfiler::default();
        profiler.start("a").expect("the first time");
        let error = profiler.start("a").expect_err("the second time");
        assert!(matches!(error, Error::Profiler(ProfilerError::AlreadyStarted { .. })), "{error}");
        profiler.stop("a").expect("it runs");
        let error = profiler.stop("a").expect_err("it has ended");
        assert!(error.to_string().contains("`a`, which was never started; start it first"), "{error}");
        assert!(SimpleProfiler::default().summary().contains("Profiler Report"));
    }
}
