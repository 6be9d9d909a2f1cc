//! Loggers by class name, as YAML and the command line write them.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::csv::CsvLogger;
use super::json_lines::JsonLinesLogger;
use super::logger::Logger;
use super::run_folder::Version;
use super::tensorboard::TensorBoardLogger;

/// What [`CsvLogger`] writes, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CsvLoggerConfig {
    /// Root folder; `trainer.default_root_dir` unless set.
    pub save_dir: Option<PathBuf>,
    /// Folder below it; empty for none.
    pub name: String,
    /// The run's folder: a number for `version_<n>`, or a name; the next number unless set.
    pub version: Option<Version>,
    /// Put `<prefix>-` before the names of metrics.
    pub prefix: String,
    /// Rows kept in memory before they are appended to the file; also written at the end of each epoch.
    #[schemars(range(min = 1))]
    pub flush_logs_every_n_steps: u64,
    /// Draw pictures of the curves at the end.
    pub plots: bool,
}

impl Default for CsvLoggerConfig {
    fn default() -> Self {
        Self {
            save_dir: None,
            name: NAME.to_owned(),
            version: None,
            prefix: String::new(),
            flush_logs_every_n_steps: 100,
            plots: true,
        }
    }
}

/// What [`TensorBoardLogger`] writes, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TensorBoardLoggerConfig {
    /// Root folder; `trainer.default_root_dir` unless set.
    pub save_dir: Option<PathBuf>,
    /// Folder below it; empty for none.
    pub name: String,
    /// The run's folder: a number for `version_<n>`, or a name; the next number unless set.
    pub version: Option<Version>,
    /// Put `<prefix>-` before the names of metrics.
    pub prefix: String,
    /// Folder below the version for the event file.
    pub sub_dir: Option<PathBuf>,
    /// Write `hp_metric` = -1 beside the hyper-parameters, so that the HPARAMS page lists the run.
    pub default_hp_metric: bool,
    /// Seconds after which what is in memory is written.
    pub flush_secs: u64,
}

impl Default for TensorBoardLoggerConfig {
    fn default() -> Self {
        Self {
            save_dir: None,
            name: NAME.to_owned(),
            version: None,
            prefix: String::new(),
            sub_dir: None,
            default_hp_metric: true,
            flush_secs: 120,
        }
    }
}

/// What [`JsonLinesLogger`] writes, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct JsonLinesLoggerConfig {
    /// Root folder; `trainer.default_root_dir` unless set.
    pub save_dir: Option<PathBuf>,
    /// Folder below it; empty for none.
    pub name: String,
    /// The run's folder: a number for `version_<n>`, or a name; the next number unless set.
    pub version: Option<Version>,
    /// Put `<prefix>-` before the names of metrics.
    pub prefix: String,
}

impl Default for JsonLinesLoggerConfig {
    fn default() -> Self {
        Self { save_dir: None, name: NAME.to_owned(), version: None, prefix: String::new() }
    }
}

const NAME: &str = "lightning_logs";

/// A logger by class name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum LoggerConfig {
    /// Writes `metrics.csv` and pictures of the curves.
    #[serde(rename = "CSVLogger")]
    Csv(CsvLoggerConfig),
    /// Writes an event file for TensorBoard.
    #[serde(rename = "TensorBoardLogger")]
    TensorBoard(TensorBoardLoggerConfig),
    /// Writes `metrics.jsonl`, an object per row.
    #[serde(rename = "JsonLinesLogger")]
    JsonLines(JsonLinesLoggerConfig),
}

impl LoggerConfig {
    /// Makes the logger; `default_root_dir` is its root folder if it names none.
    pub fn build(self, default_root_dir: &Path) -> Box<dyn Logger> {
        match self {
            Self::Csv(config) => Box::new(CsvLogger::from_config(config, default_root_dir)),
            Self::TensorBoard(config) => Box::new(TensorBoardLogger::from_config(config, default_root_dir)),
            Self::JsonLines(config) => Box::new(JsonLinesLogger::from_config(config, default_root_dir)),
        }
    }
}

/// Which loggers a run has: `true` for a [`CsvLogger`], `false` for none, or a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Loggers {
    /// The default logger, or none.
    Flag(bool),
    /// These; checkpoints go below the first one's folder.
    List(Vec<LoggerConfig>),
}

impl Loggers {
    /// Whether there is a logger.
    pub fn is_enabled(&self) -> bool {
        match self {
            Self::Flag(flag) => *flag,
            Self::List(list) => !list.is_empty(),
        }
    }

    /// The loggers by class name.
    pub fn list(&self) -> Vec<LoggerConfig> {
        match self {
            Self::Flag(true) => vec![LoggerConfig::Csv(CsvLoggerConfig::default())],
            Self::Flag(false) => Vec::new(),
            Self::List(list) => list.clone(),
        }
    }
}

impl From<bool> for Loggers {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl From<Vec<LoggerConfig>> for Loggers {
    fn from(list: Vec<LoggerConfig>) -> Self {
        Self::List(list)
    }
}

impl From<LoggerConfig> for Loggers {
    fn from(logger: LoggerConfig) -> Self {
        Self::List(vec![logger])
    }
}
