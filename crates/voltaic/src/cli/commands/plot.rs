//! `plot`: the metrics of several runs in one picture.

use std::path::{Path, PathBuf};

use crate::cli::args::PlotArgs;
use crate::cli::outcome::Failure;
use crate::error::ConfigError;
use crate::logger::plot_runs;

/// The file of metrics in the folder of a run.
const METRICS: &str = "metrics.csv";

/// Draws the runs; returns the message for the user.
pub(in crate::cli) fn plot(arguments: &PlotArgs) -> Result<String, Failure> {
    let paths: Vec<PathBuf> = arguments.runs.iter().map(|run| metrics_of(run)).collect::<Result<_, _>>()?;
    let names = names(&arguments.runs);
    let runs: Vec<(String, PathBuf)> = names.into_iter().zip(paths).collect();
    plot_runs(&runs, &arguments.output).map_err(|error| Failure::run(error.into()))?;
    Ok(format!("picture  {}\n", arguments.output.display()))
}

/// The CSV file of a run.
fn metrics_of(run: &Path) -> Result<PathBuf, ConfigError> {
    let path = if run.is_dir() { run.join(METRICS) } else { run.to_path_buf() };
    match path.is_file() {
        true => Ok(path),
        false => {
            let what = format!("there is no {}", path.display());
            let remedy = "give the folder of a run that the CSV logger has written, or a CSV file";
            Err(ConfigError::new("plot", what, remedy))
        }
    }
}

/// What runs are called: the end of the path, as long as tells them from the others.
fn names(runs: &[PathBuf]) -> Vec<String> {
    let end = |run: &Path, count: usize| {
        let parts: Vec<_> = run.components().collect();
        let last = parts[parts.len().saturating_sub(count)..].iter().collect::<PathBuf>();
        last.display().to_string()
    };
    let most = runs.iter().map(|run| run.components().count()).max().unwrap_or(1);
    let of = |count: usize| runs.iter().map(|run| end(run, count)).collect::<Vec<String>>();
    let differ = |names: &[String]| (1..names.len()).all(|i| !names[..i].contains(&names[i]));
    (1..most).map(of).find(|names| differ(names)).unwrap_or_else(|| of(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_named_by_what_differs() {
        let name = |paths: &[&str]| names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(name(&["logs/version_0", "logs/version_1/"]), ["version_0", "version_1"]);
        assert_eq!(name(&["a/logs/version_0", "b/logs/version_0"]), ["a/logs/version_0", "b/logs/version_0"]);
        assert_eq!(name(&["x/metrics.csv", "y/metrics.csv"]), ["x/metrics.csv", "y/metrics.csv"]);
        assert_eq!(name(&["run"]), ["run"]);
    }
}
