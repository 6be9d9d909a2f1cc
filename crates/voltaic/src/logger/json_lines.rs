//! `metrics.jsonl`: an object per row.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use super::logger::Logger;
use super::run_folder::{
    DEFAULT_NAME, RunFolder, RunFolders, Version, in_run_folder, name_or_none, with_prefix,
};
use crate::checkpoint::write_atomically;
use crate::error::{Error, Result};

/// What [`JsonLinesLogger`] writes, and where.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct JsonLinesLoggerConfig {
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
}

/// Writes `<save_dir>/<name>/version_<n>/metrics.jsonl`: a line per row, `{"step":5,"epoch":0,"train_loss":0.25}`.
///
/// Unlike a CSV file it needs no rewriting when a metric appears later. JSON has no word for values that are not
/// finite: they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.
#[derive(Debug)]
pub struct JsonLinesLogger {
    folder: RunFolder,
    prefix: String,
    writer: Option<BufWriter<File>>,
    num_rows: u64,
}

impl JsonLinesLogger {
    /// A logger for a new run below `save_dir`, named `lightning_logs`.
    pub fn new(save_dir: impl AsRef<Path>) -> Self {
        Self::from_config(JsonLinesLoggerConfig::default(), save_dir.as_ref())
    }

    /// A logger as `config` says, below `default_root_dir` if it names no folder.
    pub fn from_config(config: JsonLinesLoggerConfig, default_root_dir: &Path) -> Self {
        let save_dir = config.save_dir.as_deref().unwrap_or(default_root_dir);
        let folder = RunFolder::new(save_dir, &config.name, config.version.as_ref());
        Self { folder, prefix: config.prefix, writer: None, num_rows: 0 }
    }

    fn path(&self) -> PathBuf {
        self.folder.path.join("metrics.jsonl")
    }

    fn failed(&self) -> impl Fn(std::io::Error) -> Error + use<> {
        let path = self.path();
        move |error| Error::io("write", &path, error)
    }

    fn open(&mut self) -> Result<()> {
        let path = self.path();
        let file = File::options().create(true).append(true).open(&path);
        self.writer = Some(BufWriter::new(file.map_err(|e| Error::io("create", &path, e))?));
        Ok(())
    }

    fn writer(&mut self) -> Result<&mut BufWriter<File>> {
        if self.writer.is_none() {
            self.folder.claim("metrics.jsonl")?;
            std::fs::create_dir_all(&self.folder.path)
                .map_err(|e| Error::io("create folder", &self.folder.path, e))?;
            self.open()?;
        }
        self.writer
            .as_mut()
            .ok_or_else(|| Error::io("write", "metrics.jsonl", std::io::Error::other("closed")))
    }
}

fn number(value: f64) -> Value {
    let word = if value.is_nan() {
        "NaN"
    } else if value > 0.0 {
        "Infinity"
    } else {
        "-Infinity"
    };
    serde_json::Number::from_f64(value).map_or_else(|| Value::from(word), Value::Number)
}

impl Logger for JsonLinesLogger {
    in_run_folder!();

    fn num_rows(&self) -> u64 {
        self.num_rows
    }

    fn resume(&mut self, num_rows: Option<u64>, _step: u64) -> Result<()> {
        let lines = self.folder.lines_of_earlier_run("metrics.jsonl")?;
        let Some(lines) = lines.filter(|_| self.writer.is_none()) else { return Ok(()) };
        let lines = String::from_utf8_lossy(&lines);
        let kept = lines.lines().take(num_rows.map_or(usize::MAX, |num_rows| num_rows as usize));
        self.num_rows = kept.clone().count() as u64;
        write_atomically(&self.path(), |file| kept.clone().try_for_each(|line| writeln!(file, "{line}")))?;
        self.open()
    }

    fn log_hyperparams(&mut self, hyper_parameters: &Value) -> Result<()> {
        self.folder.write_hparams(hyper_parameters)
    }

    fn log_metrics(&mut self, metrics: &[(String, f64)], step: u64) -> Result<()> {
        let mut row = Map::new();
        row.insert("step".to_owned(), Value::from(step));
        for (name, value) in with_prefix(metrics, &self.prefix) {
            let is_count = matches!(name.as_str(), "step" | "epoch") && value >= 0.0 && value.fract() == 0.0;
            row.insert(name, if is_count { Value::from(value as u64) } else { number(value) });
        }
        let failed = self.failed();
        writeln!(self.writer()?, "{}", Value::Object(row)).map_err(failed)?;
        self.num_rows += 1;
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        let failed = self.failed();
        self.writer.as_mut().map_or(Ok(()), |writer| writer.flush().map_err(failed))
    }

    fn files(&self) -> Vec<PathBuf> {
        Some(self.path()).filter(|path| path.exists()).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_an_object_also_when_values_are_not_finite() {
        let folder = tempfile::tempdir().expect("temp folder");
        let mut logger = JsonLinesLogger::new(folder.path());
        logger.log_metrics(&[("loss".into(), 0.1), ("epoch".into(), 0.0)], 1).expect("logs");
        logger.log_metrics(&[("acc".into(), f64::NAN), ("low".into(), f64::NEG_INFINITY)], 3).expect("logs");
        logger.log_metrics(&[("acc".into(), 0.25), ("step".into(), 9.0)], 5).expect("logs");
        logger.finalize(true).expect("finishes");
        let text = std::fs::read_to_string(&logger.files()[0]).expect("readable");
        let expected = "{\"step\":1,\"loss\":0.1,\"epoch\":0}\n{\"step\":3,\"acc\":\"NaN\",\"low\":\"-Infinity\"}\n\
            {\"step\":9,\"acc\":0.25}\n";
        assert_eq!(text, expected);
    }
}
