//! The folder of a run: `<save_dir>/<name>/version_<n>`.

use std::io::Write;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::checkpoint::write_atomically;
use crate::error::Result;

/// Which run among those of one name: a number, or a folder name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Version {
    /// The folder `version_<n>`.
    Number(u64),
    /// The folder of this name.
    Name(String),
}

/// Where a logger writes.
#[derive(Debug, Clone)]
pub(super) struct RunFolder {
    pub path: PathBuf,
    /// As shown in the progress bar.
    pub version: String,
    /// The user chose the version, so the folder may hold an earlier run.
    pub is_chosen: bool,
}

impl RunFolder {
    /// `<save_dir>/<name>/version_<n>`, n one above the highest there unless `version` says otherwise. Nothing is
    /// created yet.
    pub fn new(save_dir: &Path, name: &str, version: Option<&Version>) -> Self {
        let (folder, label) = match version {
            Some(Version::Name(label)) => (label.clone(), label.clone()),
            Some(Version::Number(number)) => (format!("version_{number}"), number.to_string()),
            None => {
                let number = next_version(save_dir, name);
                (format!("version_{number}"), number.to_string())
            }
        };
        Self { path: save_dir.join(name).join(folder), version: label, is_chosen: version.is_some() }
    }

    /// Writes `hparams.yaml`.
    pub fn write_hparams(&self, hyper_parameters: &serde_json::Value) -> Result<()> {
        let text = crate::config::to_yaml(hyper_parameters);
        write_atomically(&self.path.join("hparams.yaml"), |file| file.write_all(text.as_bytes()))
    }

    /// The path of one of the run's files. An earlier run's file of that name is removed, with a warning.
    pub fn claim(&self, file: &str) -> Result<PathBuf> {
        let path = self.path.join(file);
        if self.is_chosen && path.exists() {
            tracing::warn!("{} is of an earlier run of this version and is overwritten", path.display());
            crate::checkpoint::remove_file(&path)?;
        }
        Ok(path)
    }
}

fn next_version(save_dir: &Path, name: &str) -> u64 {
    let Ok(entries) = std::fs::read_dir(save_dir.join(name)) else { return 0 };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("version_")?.parse::<u64>().ok())
        .max()
        .map_or(0, |highest| highest + 1)
}

/// Puts `<prefix>-` before the names of metrics, if there is a prefix; `step` and `epoch` keep their names.
pub(super) fn with_prefix(metrics: &[(String, f64)], prefix: &str) -> Vec<(String, f64)> {
    let name = |name: &String| match name.as_str() {
        _ if prefix.is_empty() => name.clone(),
        "step" | "epoch" => name.clone(),
        _ => format!("{prefix}-{name}"),
    };
    metrics.iter().map(|(key, value)| (name(key), *value)).collect()
}
