//! Event files for TensorBoard, with Lightning's folder and tag names.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
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
use super::tfevents::{self, Effect, Event};
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
    /// There are rows of the run that this one resumes.
    is_continued: bool,
}

#[derive(Debug)]
struct EventFile {
    path: PathBuf,
    writer: BufWriter<File>,
    flushed: Instant,
    /// Bytes of the event files that were in the folder before, and of this one.
    num_bytes: u64,
}

/// Values of a step in the event files of a folder.
struct Record {
    step: u64,
    /// TensorBoard showed it when the checkpoint was taken.
    is_kept: bool,
    /// It was written after the checkpoint.
    is_after: bool,
    /// TensorBoard shows it now.
    is_shown: bool,
    bytes: Vec<u8>,
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
            is_continued: false,
        }
    }

    fn event_folder(&self) -> PathBuf {
        self.sub_dir
            .as_ref()
            .map_or_else(|| self.folder.path.clone(), |sub_dir| self.folder.path.join(sub_dir))
    }

    /// Appends events.
    fn write(&mut self, events: &[Event]) -> Result<()> {
        self.write_records(events.iter().map(Event::encode))
    }

    /// Appends records, and flushes if it is time to.
    fn write_records<'a>(&mut self, mut records: impl Iterator<Item = &'a [u8]>) -> Result<()> {
        let mut file = match self.file.take() {
            Some(file) => file,
            None => EventFile::create(&self.event_folder())?,
        };
        records.try_for_each(|record| file.write(record))?;
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
        let earlier = event_files(folder)?;
        let num_bytes = earlier.iter().map(|path| path.metadata().map_or(0, |metadata| metadata.len())).sum();
        let host = sysinfo::System::host_name().unwrap_or_else(|| "localhost".to_owned());
        let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = |seconds: u64| {
            folder.join(format!("{EVENT_FILE}{seconds:010}.{host}.{}.{unique}", std::process::id()))
        };
        let seconds = now() as u64;
        // TensorBoard reads files in the order of their names
        let is_before = earlier.last().is_some_and(|last| path(seconds) <= *last);
        let path = path(seconds + u64::from(is_before));
        let file = File::create_new(&path).map_err(|e| Error::io("create", &path, e))?;
        let mut file = Self { path, writer: BufWriter::new(file), flushed: Instant::now(), num_bytes };
        file.write(Event::version(now()).encode())?;
        file.flush()?;
        Ok(file)
    }

    fn write(&mut self, record: &[u8]) -> Result<()> {
        self.num_bytes += tfevents::framed(record);
        tfevents::write_record(&mut self.writer, record).map_err(|e| Error::io("write", &self.path, e))
    }

    fn flush(&mut self) -> Result<()> {
        self.flushed = Instant::now();
        self.writer.flush().map_err(|e| Error::io("write", &self.path, e))
    }
}

const EVENT_FILE: &str = "events.out.tfevents.";

/// The event files of a folder, in TensorBoard's order.
fn event_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("read", folder, error)),
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(EVENT_FILE))
        })
        .collect();
    found.sort();
    Ok(found)
}

/// The records with values of the event files of a folder, of which the first `num_bytes` are kept. TensorBoard's reading of a file ends
/// where a record is damaged or was not written to its end.
fn records(folder: &Path, num_bytes: u64) -> Result<Vec<Record>> {
    let mut found: Vec<Record> = Vec::new();
    let mut before = 0;
    for path in event_files(folder)? {
        let fail = |e| Error::io("read", &path, e);
        let file = File::open(&path).map_err(fail)?;
        let length = file.metadata().map_err(fail)?.len();
        let (mut reader, mut end) = (BufReader::new(file), before);
        while let Ok(Some(bytes)) = tfevents::read_record(&mut reader) {
            end += tfevents::framed(&bytes);
            let is_kept = end <= num_bytes;
            match Effect::of(&bytes) {
                Some(Effect::Values(step)) => {
                    found.push(Record { step, is_kept, is_after: !is_kept, is_shown: true, bytes })
                }
                Some(Effect::Drops(from)) => {
                    found.iter_mut().filter(|record| record.step >= from).for_each(|record| {
                        record.is_shown = false;
                        record.is_kept &= !is_kept;
                    })
                }
                None => {}
            }
        }
        before += length;
    }
    Ok(found)
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

    /// In bytes of all event files of the folder.
    fn num_rows(&self) -> u64 {
        self.file.as_ref().map_or(0, |file| file.num_bytes)
    }

    /// TensorBoard drops values from a step on, whenever they were written: what it would drop beside those after the checkpoint
    /// is written again.
    fn resume(&mut self, num_rows: Option<u64>, step: u64) -> Result<()> {
        self.save()?;
        let Some(num_bytes) = num_rows.filter(|&bytes| bytes > 0) else {
            return self.write(&[Event::session_start(now(), step)]); // nothing was written, or the checkpoint does not tell
        };
        let records = records(&self.event_folder(), num_bytes)?;
        self.is_continued = records.iter().any(|record| record.is_kept);
        let from = records
            .iter()
            .filter(|record| record.is_after && record.is_shown)
            .map(|record| record.step)
            .min();
        let is_dropped = |record: &&Record| !record.is_shown || from.is_some_and(|from| record.step >= from);
        let again = records.iter().filter(|record| record.is_kept).filter(is_dropped);
        let start = from.map(|from| Event::session_start(now(), from));
        let again = again.map(|record| record.bytes.as_slice());
        self.write_records(start.iter().map(Event::encode).chain(again))
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
        let scalar = (!self.is_continued).then(|| Event::scalars(time, 0, &metric));
        let mut events: Vec<Event> = scalar.into_iter().collect();
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
