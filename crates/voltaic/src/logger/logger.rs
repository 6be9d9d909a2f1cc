//! What takes the numbers of a run.

use std::path::{Path, PathBuf};

use super::run_folder::RunFolders;
use crate::error::Result;

/// How the names of metrics begin that are about the device and not about the model.
pub(crate) const DEVICE_STATS: &str = "DeviceStatsMonitor.";

/// Takes the metrics of a run. Called on rank 0 only.
pub trait Logger: Send {
    /// Folder of this run, if the logger has one; checkpoints go below the first logger's.
    fn log_dir(&self) -> Option<&Path>;

    /// Label of this run among the runs of the same name, such as `0`.
    fn version(&self) -> Option<String> {
        None
    }

    /// Called when the run starts, before anything else is written: makes the folder of the run, and moves to another
    /// version if a run that started at the same time has it.
    ///
    /// # Errors
    /// If it cannot be made.
    fn begin(&mut self, folders: &mut RunFolders) -> Result<()> {
        let _ = folders;
        Ok(())
    }

    /// Rows so far, also those of an earlier run that were kept; or another measure by which [`Logger::resume`] finds the place. A
    /// checkpoint has this number.
    fn num_rows(&self) -> u64 {
        0
    }

    /// Called when a fit is resumed from a checkpoint, before its first row. If the user chose the folder of an earlier run, the
    /// first `num_rows` of its rows stay: those that it had when the checkpoint was taken, or all, if the checkpoint does not tell.
    /// `step` is the first that is still to be logged.
    ///
    /// # Errors
    /// If they cannot be read or written.
    fn resume(&mut self, num_rows: Option<u64>, step: u64) -> Result<()> {
        let _ = (num_rows, step);
        Ok(())
    }

    /// Records the values that made the module.
    ///
    /// # Errors
    /// If they cannot be written.
    fn log_hyperparams(&mut self, hyper_parameters: &serde_json::Value) -> Result<()>;

    /// Records metrics at a step; `step` counts optimizer steps from 0.
    ///
    /// # Errors
    /// If they cannot be written.
    fn log_metrics(&mut self, metrics: &[(String, f64)], step: u64) -> Result<()>;

    /// Writes what is still in memory.
    ///
    /// # Errors
    /// If it cannot be written.
    fn save(&mut self) -> Result<()>;

    /// Ends the run, which succeeded or failed.
    ///
    /// # Errors
    /// If the rest cannot be written.
    fn finalize(&mut self, success: bool) -> Result<()> {
        let _ = success;
        self.save()
    }

    /// Files it has written for the user; the command line prints their paths.
    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }
}
