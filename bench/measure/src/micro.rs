//! What the benchmarks of voltaic's own parts tell `make bench-micro`: a line of JSON for each number with a target.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Names the file that numbers are appended to; without it they are only printed.
pub const FILE: &str = "VOLTAIC_BENCH_ROWS";

/// What a number should be.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
}

/// A measured number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The benchmark that measured it, as `cargo bench --bench` takes it.
    pub bench: String,
    /// What was measured.
    pub what: String,
    /// Such as `us`; empty for a ratio.
    pub unit: String,
    /// First quartile, median and third quartile.
    pub quartiles: [f64; 3],
    /// What the median should be.
    pub target: Target,
}

impl Row {
    /// A number of the benchmark `bench`, by the values that were measured.
    pub fn of(bench: &str, what: impl Into<String>, unit: &str, values: Vec<f64>, target: Target) -> Self {
        Self {
            bench: bench.to_owned(),
            what: what.into(),
            unit: unit.to_owned(),
            quartiles: quartiles(values),
            target,
        }
    }

    /// Whether the median is what it should be.
    pub fn is_met(&self) -> bool {
        match self.target {
            Target::AtMost(most) => self.quartiles[1] <= most,
            Target::AtLeast(least) => self.quartiles[1] >= least,
        }
    }

    /// `met`, or `MISSED` for what is not.
    pub fn verdict(&self) -> &'static str {
        if self.is_met() { "met" } else { "MISSED" }
    }

    /// Prints the number beside its target, and appends it to the file that the environment names.
    ///
    /// # Errors
    /// If there is such a file and it cannot be written.
    pub fn record(&self) -> anyhow::Result<()> {
        let ([low, middle, high], target) = (self.quartiles, self.target_text());
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        println!(
            "target: {}: {middle:.2}{unit} ({low:.2} to {high:.2}), {target}: {}",
            self.what,
            self.verdict()
        );
        match std::env::var_os(FILE) {
            Some(path) => self.append(Path::new(&path)),
            None => Ok(()),
        }
    }

    /// The target in words.
    pub fn target_text(&self) -> String {
        match self.target {
            Target::AtMost(most) => format!("at most {most}"),
            Target::AtLeast(least) => format!("at least {least}"),
        }
    }

    fn append(&self, path: &Path) -> anyhow::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(path).with_context(|| {
            format!("{FILE}={}: cannot be written; name another file, or unset it", path.display())
        })?;
        Ok(writeln!(file, "{}", serde_json::to_string(self)?)?)
    }
}

/// First quartile, median and third quartile; no numbers if there are no values.
pub fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| {
        let place = (values.len().saturating_sub(1) * quarter) as f64 / 4.0;
        let (low, high) = (values.get(place as usize), values.get(place.ceil() as usize));
        low.zip(high).map_or(f64::NAN, |(low, high)| low + (high - low) * place.fract())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_values() {
        assert_eq!(quartiles(vec![3.0, 1.0, 2.0, 5.0, 4.0]), [2.0, 3.0, 4.0]);
        assert_eq!(quartiles(vec![2.0, 1.0]), [1.25, 1.5, 1.75]);
        assert_eq!(quartiles(vec![7.0]), [7.0; 3]);
        assert!(quartiles(Vec::new()).iter().all(|value| value.is_nan()));
    }

    #[test]
    fn a_target_is_met_at_its_limit_and_missed_without_a_value() {
        let row = |value: f64, target| Row::of("graph", "mlp", "", vec![value], target);
        for (value, target, is_met) in [
            (20.0, Target::AtMost(20.0), true),
            (20.1, Target::AtMost(20.0), false),
            (1.0, Target::AtLeast(1.0), true),
            (0.9, Target::AtLeast(1.0), false),
            (f64::NAN, Target::AtMost(20.0), false),
        ] {
            assert_eq!(row(value, target).is_met(), is_met, "{value} {target:?}");
        }
    }
}
