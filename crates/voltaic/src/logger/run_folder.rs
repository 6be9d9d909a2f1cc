//! The folder of a run: `<save_dir>/<name>/version_<n>`.

use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::checkpoint::write_atomically;
use crate::config::expand_home;
use crate::error::{Error, Result};

/// The folder below the root folder, as in Lightning.
pub(super) const DEFAULT_NAME: &str = "lightning_logs";

/// The name of a folder, of which null is none.
pub(super) fn name_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

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
    /// `<save_dir>/<name>`.
    root: PathBuf,
}

/// The folders that the loggers of a run have taken: those below one root share a version.
#[derive(Debug, Default)]
pub struct RunFolders(HashMap<PathBuf, u64>);

impl RunFolders {
    /// The version of this run below `root`: the first one, from `version` on, whose folder this run can create. Another run that
    /// starts at the same time gets another version.
    fn take(&mut self, root: &Path, version: u64) -> Result<u64> {
        if let Some(&taken) = self.0.get(root) {
            return Ok(taken);
        }
        let failed = |path: &Path, error| Error::io("create folder", path, error);
        std::fs::create_dir_all(root).map_err(|error| failed(root, error))?;
        let mut version = version;
        loop {
            let folder = root.join(format!("version_{version}"));
            match std::fs::create_dir(&folder) {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => version += 1,
                Err(error) => return Err(failed(&folder, error)),
            }
        }
        self.0.insert(root.to_owned(), version);
        Ok(version)
    }
}

impl RunFolder {
    /// `<save_dir>/<name>/version_<n>`, n one above the highest there unless `version` says otherwise. Nothing is
    /// created before [`RunFolder::take`].
    pub fn new(save_dir: &Path, name: &str, version: Option<&Version>) -> Self {
        let save_dir = &*expand_home(save_dir);
        let (folder, label) = match version {
            Some(Version::Name(label)) => (label.clone(), label.clone()),
            Some(Version::Number(number)) => (format!("version_{number}"), number.to_string()),
            None => {
                let number = next_version(save_dir, name);
                (format!("version_{number}"), number.to_string())
            }
        };
        let root = save_dir.join(name);
        Self { path: root.join(folder), version: label, is_chosen: version.is_some(), root }
    }

    /// Makes the folder and moves to a later version if another run has made it, unless the user chose the version.
    pub fn take(&mut self, folders: &mut RunFolders) -> Result<()> {
        if self.is_chosen {
            return Ok(());
        }
        let version = folders.take(&self.root, self.version.parse().unwrap_or(0))?;
        (self.path, self.version) = (self.root.join(format!("version_{version}")), version.to_string());
        Ok(())
    }

    /// Writes `hparams.yaml`.
    pub fn write_hparams(&self, hyper_parameters: &serde_json::Value) -> Result<()> {
        let text = crate::config::to_yaml(hyper_parameters);
        write_atomically(&self.path.join("hparams.yaml"), |file| file.write_all(text.as_bytes()))
    }

    /// The bytes of a file that an earlier run has left in the folder that the user chose, if there is one; without a last line
    /// that a killed run has not finished.
    pub fn lines_of_earlier_run(&self, file: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path.join(file);
        if !self.is_chosen || !path.exists() {
            return Ok(None);
        }
        let mut bytes = std::fs::read(&path).map_err(|error| Error::io("read", &path, error))?;
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1));
        Ok(Some(bytes))
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
        .map_or(0, |highest| highest.saturating_add(1))
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

/// What all loggers that write below a [`RunFolder`] say of it.
macro_rules! in_run_folder {
    () => {
        fn log_dir(&self) -> Option<&std::path::Path> {
            Some(&self.folder.path)
        }

        fn version(&self) -> Option<String> {
            Some(self.folder.version.clone())
        }

        fn begin(&mut self, folders: &mut RunFolders) -> Result<()> {
            self.folder.take(folders)
        }
    };
}
pub(super) use in_run_folder;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_start_together_have_a_folder_each_and_their_loggers_share_it() {
        let folder = tempfile::tempdir().expect("temp folder");
        let new = || RunFolder::new(folder.path(), "logs", None);
        let mut runs: Vec<[RunFolder; 2]> = (0..4).map(|_| [new(), new()]).collect();
        std::thread::scope(|scope| {
            for loggers in &mut runs {
                scope.spawn(|| {
                    let mut folders = RunFolders::default();
                    loggers.iter_mut().for_each(|logger| logger.take(&mut folders).expect("taken"));
                });
            }
        });
        let mut taken: Vec<PathBuf> = runs.iter().map(|[csv, _]| csv.path.clone()).collect();
        taken.sort();
        let expected: Vec<PathBuf> =
            (0..4).map(|n| folder.path().join("logs").join(format!("version_{n}"))).collect();
        assert_eq!(taken, expected);
        for [csv, tensorboard] in &runs {
            assert_eq!((&csv.path, &csv.version), (&tensorboard.path, &tensorboard.version));
        }
    }
}
