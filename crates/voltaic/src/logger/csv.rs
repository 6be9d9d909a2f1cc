//! `metrics.csv` and `hparams.yaml`, with Lightning's folder names and columns.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use super::logger::Logger;
use super::plot::plot_metrics;
use super::plot_memory::plot_memory;
use super::run_folder::{
    DEFAULT_NAME, RunFolder, RunFolders, Version, in_run_folder, name_or_none, with_prefix,
};
use crate::checkpoint::write_atomically;
use crate::error::{Error, Result};

/// What [`CsvLogger`] writes, and where.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CsvLoggerConfig {
    /// Root folder; `trainer.default_root_dir` unless set.
    pub save_dir: Option<PathBuf>,
    /// Folder below it; empty or null for none.
    #[serde(deserialize_with = "name_or_none")]
    #[schemars(with = "Option<String>")]
    #[default(DEFAULT_NAME.to_owned())]
    pub name: String,
    /// The run's folder: a number for `version_<n>`, or a name; the next number unless set.
    pub version: Option<Version>,
    /// Put `<prefix>-` before the names of metrics.
    pub prefix: String,
    /// Rows kept in memory before they are appended to the file; also written at the end of each epoch.
    #[schemars(range(min = 1))]
    #[default(100)]
    pub flush_logs_every_n_steps: u64,
    /// Draw pictures of the curves at the end.
    #[default(true)]
    pub plots: bool,
}

/// Writes `<save_dir>/<name>/version_<n>/metrics.csv`, and at the end `curves.png` beside it, with
/// [`DeviceStatsMonitor`](crate::callback::DeviceStatsMonitor) also `memory.png`.
///
/// Columns are sorted; a row has the metrics of one call and its `step`, other cells are empty. A metric that
/// appears later adds a column.
#[derive(Debug)]
pub struct CsvLogger {
    folder: RunFolder,
    prefix: String,
    columns: BTreeSet<String>,
    /// Rows not yet in the file.
    pending: Vec<Row>,
    /// Rows kept in memory before they are appended to the file.
    flush_rows: usize,
    /// This run has written to the file.
    is_started: bool,
    num_rows: u64,
    writer: Option<BufWriter<File>>,
    plots: bool,
}

impl CsvLogger {
    /// A logger for a new run below `save_dir`, named `lightning_logs`.
    pub fn new(save_dir: impl AsRef<Path>) -> Self {
        Self::with_name(save_dir, "lightning_logs")
    }

    /// A logger for a new run below `<save_dir>/<name>`.
    pub fn with_name(save_dir: impl AsRef<Path>, name: &str) -> Self {
        let config = CsvLoggerConfig { name: name.to_owned(), ..CsvLoggerConfig::default() };
        Self::from_config(config, save_dir.as_ref())
    }

    /// A logger as `config` says, below `default_root_dir` if it names no folder.
    pub fn from_config(config: CsvLoggerConfig, default_root_dir: &Path) -> Self {
        let save_dir = config.save_dir.as_deref().unwrap_or(default_root_dir);
        Self {
            folder: RunFolder::new(save_dir, &config.name, config.version.as_ref()),
            prefix: config.prefix,
            columns: BTreeSet::new(),
            pending: Vec::new(),
            flush_rows: usize::try_from(config.flush_logs_every_n_steps.max(1)).unwrap_or(usize::MAX),
            is_started: false,
            num_rows: 0,
            writer: None,
            plots: config.plots,
        }
    }

    /// Whether the pictures are drawn at the end (they are).
    pub fn plots(mut self, plots: bool) -> Self {
        self.plots = plots;
        self
    }

    fn metrics_path(&self) -> PathBuf {
        self.folder.path.join("metrics.csv")
    }

    fn curves_path(&self) -> PathBuf {
        self.folder.path.join("curves.png")
    }

    fn memory_path(&self) -> PathBuf {
        self.folder.path.join("memory.png")
    }

    fn failed(&self) -> impl Fn(std::io::Error) -> Error + use<> {
        let path = self.metrics_path();
        move |error| Error::io("write", &path, error)
    }

    /// Starts the file again with all columns known, keeping the rows it had.
    fn rewrite(&mut self) -> Result<()> {
        let path = if self.is_started { self.metrics_path() } else { self.folder.claim("metrics.csv")? };
        self.is_started = true;
        let mut rows = match path.exists() {
            true => {
                read_rows(&std::fs::read(&path).map_err(|error| Error::io("read", &path, error))?, &path)?
            }
            false => Vec::new(),
        };
        rows.append(&mut self.pending);
        self.write(&rows)
    }

    /// Writes the whole file.
    fn write(&mut self, rows: &[Row]) -> Result<()> {
        let path = self.metrics_path();
        let columns = &self.columns;
        write_atomically(&path, |file| {
            let mut csv = csv::Writer::from_writer(file);
            csv.write_record(columns)?;
            for row in rows {
                csv.write_record(cells(columns, row))?;
            }
            csv.flush()
        })?;
        let file = File::options().append(true).open(&path).map_err(self.failed())?;
        self.writer = Some(BufWriter::new(file));
        Ok(())
    }
}

fn cells<'a>(columns: &'a BTreeSet<String>, row: &'a [(String, f64)]) -> impl Iterator<Item = String> + 'a {
    columns.iter().map(|column| {
        row.iter().find(|(name, _)| name == column).map_or_else(String::new, |(_, value)| value.to_string())
    })
}

type Row = Vec<(String, f64)>;

fn read_rows(bytes: &[u8], path: &Path) -> Result<Vec<Row>> {
    let failed = |error: csv::Error| Error::io("read", path, error.into());
    let mut reader = csv::Reader::from_reader(bytes);
    let columns = reader.headers().map_err(failed)?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(failed)?;
        let row = columns.iter().zip(record.iter());
        rows.push(row.filter_map(|(name, cell)| Some((name.to_owned(), cell.parse().ok()?))).collect());
    }
    Ok(rows)
}

impl Logger for CsvLogger {
    in_run_folder!();

    fn num_rows(&self) -> u64 {
        self.num_rows
    }

    fn resume(&mut self, num_rows: Option<u64>, _step: u64) -> Result<()> {
        let path = self.metrics_path();
        let lines = self.folder.lines_of_earlier_run("metrics.csv")?;
        let Some(lines) = lines.filter(|_| !self.is_started) else { return Ok(()) };
        let mut rows = read_rows(&lines, &path)?;
        rows.truncate(num_rows.map_or(usize::MAX, |num_rows| num_rows as usize));
        self.num_rows = rows.len() as u64;
        self.columns.extend(rows.iter().flatten().map(|(name, _)| name.clone()));
        self.is_started = true;
        self.columns.insert("step".to_owned());
        self.write(&rows)
    }

    fn log_hyperparams(&mut self, hyper_parameters: &serde_json::Value) -> Result<()> {
        self.folder.write_hparams(hyper_parameters)
    }

    fn log_metrics(&mut self, metrics: &[(String, f64)], step: u64) -> Result<()> {
        let mut row = with_prefix(metrics, &self.prefix);
        if !row.iter().any(|(name, _)| name == "step") {
            row.push(("step".to_owned(), step as f64));
        }
        let known = self.columns.len();
        for (name, _) in &row {
            if !self.columns.contains(name) {
                self.columns.insert(name.clone());
            }
        }
        self.pending.push(row);
        self.num_rows += 1;
        if self.columns.len() > known {
            self.writer = None; // the header has to change
        }
        if self.pending.len() >= self.flush_rows { self.save() } else { Ok(()) }
    }

    fn save(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let failed = self.failed();
        let Some(mut writer) = self.writer.take() else { return self.rewrite() };
        let mut csv = csv::Writer::from_writer(Vec::new());
        for row in self.pending.drain(..) {
            csv.write_record(cells(&self.columns, &row)).map_err(|e| failed(e.into()))?;
        }
        let bytes = csv.into_inner().map_err(|e| failed(e.into_error()))?;
        writer.write_all(&bytes).and_then(|()| writer.flush()).map_err(failed)?;
        self.writer = Some(writer);
        Ok(())
    }

    fn finalize(&mut self, _success: bool) -> Result<()> {
        self.save()?;
        if self.plots && self.metrics_path().exists() {
            plot_metrics(&self.metrics_path(), &self.curves_path())?;
            plot_memory(&self.metrics_path(), &self.memory_path())?;
        }
        Ok(())
    }

    fn files(&self) -> Vec<PathBuf> {
        let paths = [self.metrics_path(), self.curves_path(), self.memory_path()];
        paths.into_iter().filter(|path| path.exists()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_metric_adds_a_column_and_keeps_the_rows() {
        let folder = tempfile::tempdir().expect("temp folder");
        let mut logger = CsvLogger::new(folder.path()).plots(false);
        logger.log_metrics(&[("loss".into(), 0.5), ("epoch".into(), 0.0)], 1).expect("logs");
        logger.save().expect("saves");
        logger.log_metrics(&[("acc".into(), 0.25)], 3).expect("logs");
        logger.save().expect("saves");
        logger.log_metrics(&[("loss".into(), f64::NAN)], 5).expect("logs");
        logger.finalize(true).expect("finishes");
        let text = std::fs::read_to_string(logger.metrics_path()).expect("readable");
        assert_eq!(text, "acc,epoch,loss,step\n,0,0.5,1\n0.25,,,3\n,,NaN,5\n");
    }

    #[test]
    fn a_chosen_version_starts_again_and_a_prefix_leaves_step_and_epoch_alone() {
        let folder = tempfile::tempdir().expect("temp folder");
        for value in [0.5, 0.25] {
            let version = Some(Version::Name("mine".into()));
            let config = CsvLoggerConfig { version, prefix: "a".into(), plots: false, ..Default::default() };
            let mut logger = CsvLogger::from_config(config, folder.path());
            logger.log_metrics(&[("loss".into(), value), ("epoch".into(), 0.0)], 1).expect("logs");
            logger.finalize(true).expect("finishes");
        }
        let path = folder.path().join("lightning_logs/mine/metrics.csv");
        assert_eq!(std::fs::read_to_string(path).expect("readable"), "a-loss,epoch,step\n0.25,0,1\n");
    }

    #[test]
    fn versions_count_up() {
        let folder = tempfile::tempdir().expect("temp folder");
        for expected in 0..3 {
            let mut logger = CsvLogger::new(folder.path());
            assert_eq!(logger.version(), Some(expected.to_string()));
            logger.log_metrics(&[("loss".into(), 1.0)], 0).expect("logs");
            logger.save().expect("saves");
        }
    }
}
