//! Reports of profilers: where they go, and how numbers are written.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use super::profiler::ProfiledRun;
use crate::config::expand_home;
use crate::error::{Error, Result, write_stderr};

/// Where a profiler writes: a file for each stage and rank, or standard error of rank 0.
#[derive(Debug, Default)]
pub(super) struct Output {
    dirpath: Option<PathBuf>,
    filename: Option<String>,
    run: Option<ProfiledRun>,
}

impl Output {
    /// To standard error if both are none; otherwise what is none is the folder of the run, or no name but the stage's.
    pub fn new(dirpath: Option<PathBuf>, filename: Option<String>) -> Self {
        Self { dirpath: dirpath.map(expand_home), filename, run: None }
    }

    pub fn setup(&mut self, run: &ProfiledRun) {
        self.run = Some(run.clone());
    }

    /// `FIT Profiler Report`
    pub fn title(&self) -> String {
        let stage = self.run.as_ref().map(|run| format!("{} ", run.stage.as_str().to_uppercase()));
        format!("{}Profiler Report", stage.unwrap_or_default())
    }

    /// `<stage>-<filename>-<rank>`, without what there is not; characters that a path cannot have become one `_`.
    fn stem(&self) -> String {
        let run = self.run.as_ref();
        let parts = [
            run.map(|run| run.stage.to_string()),
            self.filename.clone().filter(|name| !name.is_empty()),
            run.filter(|run| run.world_size > 1).map(|run| run.rank.to_string()),
        ];
        let joined = parts.into_iter().flatten().collect::<Vec<_>>().join("-");
        let mut stem = String::new();
        for c in joined.chars() {
            let c = if r#"\/:*?"<>|"#.contains(c) || c.is_control() { '_' } else { c };
            if c != '_' || !stem.ends_with('_') {
                stem.push(c);
            }
        }
        if stem.trim().is_empty() { "profile".to_owned() } else { stem.trim().to_owned() }
    }

    /// The file of this stage and rank with another ending.
    pub fn path(&self, extension: &str) -> PathBuf {
        let folder = self.dirpath.clone().or_else(|| Some(self.run.as_ref()?.log_dir.clone()));
        folder.unwrap_or_default().join(format!("{}.{extension}", self.stem()))
    }

    /// Whether reports go to files.
    pub fn is_to_files(&self) -> bool {
        self.dirpath.is_some() || self.filename.is_some()
    }

    /// Appends a report to the file, or prints it on rank 0.
    pub fn write(&self, report: &str) -> Result<()> {
        if !self.is_to_files() {
            if self.run.as_ref().is_none_or(|run| run.rank == 0) {
                write_stderr(report);
            }
            return Ok(());
        }
        let path = self.path("txt");
        self.append(&path, report)?;
        tracing::info!("profiler: report in {}", path.display());
        Ok(())
    }

    fn append(&self, path: &std::path::Path, report: &str) -> Result<()> {
        self.make_folder(path)?;
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|source| Error::io("open", path, source))?;
        file.write_all(report.as_bytes()).map_err(|source| Error::io("write", path, source))
    }

    /// Writes a file, in place of one of that name.
    pub fn replace(&self, path: &std::path::Path, text: &str) -> Result<()> {
        self.make_folder(path)?;
        fs::write(path, text).map_err(|source| Error::io("write", path, source))
    }

    fn make_folder(&self, path: &std::path::Path) -> Result<()> {
        let folder = path.parent().unwrap_or(path);
        fs::create_dir_all(folder).map_err(|source| Error::io("create", folder, source))
    }
}

/// A number with so many significant digits, as Python's `format(value, ".5")` writes a float.
pub(super) fn significant(value: f64, digits: usize) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value:?}").to_lowercase();
    }
    let scientific = format!("{value:.*e}", digits.saturating_sub(1));
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if exponent < -4 || exponent >= digits as i32 - 1 {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", trimmed(mantissa), exponent.abs());
    }
    let decimals = (digits as i32 - 1 - exponent).max(0) as usize;
    let text = trimmed(&format!("{value:.decimals$}")).to_owned();
    if text.contains('.') { text } else { format!("{text}.0") }
}

/// Without zeros at the end of the decimals.
fn trimmed(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Stage;

    #[test]
    fn numbers_are_as_python_writes_them() {
        for (value, text) in [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (0.25, "0.25"),
            (100.0, "100.0"),
            (12345.0, "1.2345e+04"),
            (1234.5678, "1234.6"),
            (0.0001234567, "0.00012346"),
            (0.00001234567, "1.2346e-05"),
            (9999.96, "1e+04"),
            (99999.7, "1e+05"),
            (1e-9, "1e-09"),
        ] {
            assert_eq!(significant(value, 5), text);
        }
    }

    #[test]
    fn a_file_is_named_after_stage_name_and_rank() {
        let run = |rank, world_size| ProfiledRun {
            stage: Stage::Fit,
            rank,
            world_size,
            log_dir: "logs".into(),
            device: crate::Device::Cpu,
        };
        let named = |dirpath: Option<&str>, filename: Option<&str>, run: ProfiledRun| {
            let mut output = Output::new(dirpath.map(Into::into), filename.map(Into::into));
            output.setup(&run);
            output.path("txt").display().to_string()
        };
        assert_eq!(named(None, Some("perf"), run(0, 1)), "logs/fit-perf.txt");
        assert_eq!(named(Some("here"), Some("a:b/c"), run(1, 2)), "here/fit-a_b_c-1.txt");
        assert_eq!(named(Some("here"), None, run(0, 1)), "here/fit.txt");
    }
}
