//! Event files for TensorBoard, with Lightning's folder and tag names.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use super::logger::Logger;
use super::run_folder::{
    DEFAULT_NAME, RunFolder, RunFolders, Version, in_run_folder, name_or_none, with_prefix,
};
use super::tfevents::{self, Event};
use crate::error::{Error, Result};

/// What [`TensorBoardLogger`] writes, and where.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = serde_json::json!({
    "log_graph": {"what": "there is no graph of Python's to log", "remedy": "set false", "unless_off": true},
})))]
pub struct TensorBoardLoggerConfig {
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
    /// Folder below the version for the event file.
    pub sub_dir: Option<PathBuf>,
    /// Write `hp_metric` = -1 beside the hyper-parameters, so that the HPARAMS page lists the run.
    #[default(true)]
    pub default_hp_metric: bool,
    /// Seconds after which what is in memory is written.
    #[default(120)]
    pub flush_secs: u64,
}

/// Writes `<save_dir>/<name>/version_<n>/events.out.tfevents.*`, which TensorBoard shows, and `hparams.yaml` beside it.
///
/// Each metric is a scalar under its own name; hyper-parameters go to the HPARAMS page. Values are float32, as
/// TensorBoard keeps them.
#[derive(Debug)]
pub struct TensorBoardLogger {
    folder: RunFolder,
    /// The event file is in this folder below the run's.
    sub_dir: Option<PathBuf>,
    prefix: String,
    default_hp_metric: bool,
    flush_every: Duration,
    file: Option<EventFile>,
}

#[derive(Debug)]
struct EventFile {
    path: PathBuf,
    writer: BufWriter<File>,
    flushed: Instant,
}

impl TensorBoardLogger {
    /// A logger for a new run below `save_dir`, named `lightning_logs`.
    pub fn new(save_dir: impl AsRef<Path>) -> Self {
        Self::from_config(TensorBoardLoggerConfig::default(), save_dir.as_ref())
    }

    /// A logger as `config` says, below `default_root_dir` if it names no folder.
    pub fn from_config(config: TensorBoardLoggerConfig, default_root_dir: &Path) -> Self {
        let save_dir = config.save_dir.as_deref().unwrap_or(default_root_dir);
        let folder = RunFolder::new(save_dir, &config.name, config.version.as_ref());
        Self {
            folder,
            sub_dir: config.sub_dir,
            prefix: config.prefix,
            default_hp_metric: config.default_hp_metric,
            flush_every: Duration::from_secs(config.flush_secs),
            file: None,
        }
    }

    /// Appends events, and flushes if it is time to.
    fn write(&mut self, events: &[Event]) -> Result<()> {
        let mut file = match self.file.take() {
            Some(file) => file,
            None => {
                let below = |sub_dir: &PathBuf| self.folder.path.join(sub_dir);
                let event_folder = self.sub_dir.as_ref().map_or_else(|| self.folder.path.clone(), below);
                EventFile::create(&event_folder)?
            }
        };
        events.iter().try_for_each(|event| file.write(event))?;
        if file.flushed.elapsed() >= self.flush_every {
            file.flush()?;
        }
        self.file = Some(file);
        Ok(())
    }
}

impl EventFile {
    fn create(folder: &Path) -> Result<Self> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create folder", folder, e))?;
        let host = sysinfo::System::host_name().unwrap_or_else(|| "localhost".to_owned());
        let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("events.out.tfevents.{:010}.{host}.{}.{unique}", now() as u64, std::process::id());
        let path = folder.join(name);
        let file = File::create_new(&path).map_err(|e| Error::io("create", &path, e))?;
        let mut file = Self { path, writer: BufWriter::new(file), flushed: Instant::now() };
        file.write(&Event::version(now()))?;
        file.flush()?;
        Ok(file)
    }

    fn write(&mut self, event: &Event) -> Result<()> {
        tfevents::write_record(&mut self.writer, event.encode())
            .map_err(|e| Error::io("write", &self.path, e))
    }

    fn flush(&mut self) -> Result<()> {
        self.flushed = Instant::now();
        self.writer.flush().map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// `{"model": {"width": 2}}` as `model/width`.
fn flatten(prefix: &str, value: &Value, flat: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            for (key, value) in entries {
                let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}/{key}") };
                flatten(&name, value, flat);
            }
        }
        value => flat.push((prefix.to_owned(), value.clone())),
    }
}

impl Logger for TensorBoardLogger {
    in_run_folder!();

    fn resume(&mut self, _num_rows: Option<u64>, step: u64) -> Result<()> {
        self.write(&[Event::session_start(now(), step)])
    }

    fn log_hyperparams(&mut self, hyper_parameters: &Value) -> Result<()> {
        self.folder.write_hparams(hyper_parameters)?;
        if !self.default_hp_metric {
            return Ok(());
        }
        let mut flat = Vec::new();
        flatten("", hyper_parameters, &mut flat);
        let time = now();
        let metric = with_prefix(&[("hp_metric".to_owned(), -1.0)], &self.prefix);
        let mut events = vec![Event::scalars(time, 0, &metric)];
        events.extend(tfevents::hparams(time, &flat, &metric));
        self.write(&events)
    }

    fn log_metrics(&mut self, metrics: &[(String, f64)], step: u64) -> Result<()> {
        let mut metrics = with_prefix(metrics, &self.prefix);
        // a metric called `step` is the x-axis
        let step = match metrics.iter().position(|(name, _)| name == "step") {
            Some(at) => metrics.remove(at).1 as u64,
            None => step,
        };
        self.write(&[Event::scalars(now(), step, &metrics)])
    }

    fn save(&mut self) -> Result<()> {
        self.file.as_mut().map_or(Ok(()), EventFile::flush)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.file.iter().map(|file| file.path.clone()).collect()
    }
}
