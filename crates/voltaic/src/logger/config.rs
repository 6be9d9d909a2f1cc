//! Loggers by class name, as YAML and the command line write them.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::csv::{CsvLogger, CsvLoggerConfig};
use super::json_lines::{JsonLinesLogger, JsonLinesLoggerConfig};
use super::logger::Logger;
use super::tensorboard::{TensorBoardLogger, TensorBoardLoggerConfig};
use crate::config::conversions;

/// Classes of Lightning that there are none of.
fn services() -> serde_json::Value {
    let names = ["WandbLogger", "MLFlowLogger", "CometLogger", "NeptuneLogger"];
    let refused = |name: &str| {
        let what = format!("{name} writes to a service, which voltaic does not");
        let remedy = "use TensorBoardLogger or CSVLogger, or a Logger of your own (with_logger)";
        serde_json::json!({"what": what, "remedy": remedy})
    };
    serde_json::Value::Object(names.into_iter().map(|name| (name.to_owned(), refused(name))).collect())
}

/// A logger by class name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum LoggerConfig {
    /// Writes `metrics.csv` and pictures of the curves.
    #[serde(rename = "CSVLogger")]
    #[schemars(extend("x-refused" = services()))]
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

conversions! { Loggers:
    bool => |flag| Self::Flag(flag),
    Vec<LoggerConfig> => |list| Self::List(list),
    LoggerConfig => |logger| Self::List(vec![logger]),
}
