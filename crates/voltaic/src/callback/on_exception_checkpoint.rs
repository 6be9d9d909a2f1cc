//! Saves a checkpoint when a run fails.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use crate::checkpoint::CheckpointPaths;
use crate::config::expand_home;
use crate::data::Stage;
use crate::error::ConfigError;
use crate::lightning::Callback;
use crate::module::{CheckpointRequest, HookContext};
use crate::nn::Module;

/// Where [`OnExceptionCheckpoint`] saves.
#[derive(Defaults, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OnExceptionCheckpointConfig {
    /// Folder. Must be set, since a run may fail before it has one.
    pub dirpath: PathBuf,
    /// File name without `.ckpt`.
    #[default("on_exception".to_owned())]
    pub filename: String,
}

/// Saves a full checkpoint when a fit fails or is interrupted, over one of an earlier failure. A fit without `ckpt_path`
/// resumes from it if it is there, and deletes it when it ends well. A fit that fails before it trains, such as one
/// that cannot resume from the file, leaves it as it is, and so does a `fast_dev_run`. Source: Lightning's `OnExceptionCheckpoint`.
#[derive(Debug)]
pub struct OnExceptionCheckpoint {
    path: PathBuf,
    /// The fit is a fast_dev_run, which leaves the file of another run alone.
    fast_dev_run: bool,
}

impl OnExceptionCheckpoint {
    /// From its configuration.
    ///
    /// # Errors
    /// [`ConfigError`] if folder or name is empty.
    pub fn new(config: OnExceptionCheckpointConfig) -> Result<Self, ConfigError> {
        let OnExceptionCheckpointConfig { dirpath, filename } = config;
        for (key, is_empty) in
            [("dirpath", dirpath.as_os_str().is_empty()), ("filename", filename.is_empty())]
        {
            if is_empty {
                let key = format!("OnExceptionCheckpoint.{key}");
                return Err(ConfigError::new(key, "it is empty", "name a folder and a file"));
            }
        }
        Ok(Self { path: expand_home(dirpath).join(format!("{filename}.ckpt")), fast_dev_run: false })
    }

    /// Where it saves.
    pub fn ckpt_path(&self) -> &std::path::Path {
        &self.path
    }
}

impl Callback for OnExceptionCheckpoint {
    fn state_key(&self) -> String {
        format!("OnExceptionCheckpoint{{{}}}", self.path.display())
    }

    fn saves_on_exception(&self) -> bool {
        true
    }

    fn checkpoint_paths(&self) -> Option<CheckpointPaths> {
        Some(CheckpointPaths { best: None, last: Some(self.path.clone()), folder: None })
    }

    fn on_fit_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.fast_dev_run = ctx.facts().fast_dev_run;
        Ok(())
    }

    fn on_exception(&mut self, ctx: &mut HookContext, _error: &crate::Error) {
        if ctx.has_begun() && !ctx.facts().fast_dev_run {
            ctx.request_checkpoint(CheckpointRequest {
                path: self.path.clone(),
                weights_only: false,
                link_to: None,
                then_remove: Vec::new(),
            });
        }
    }

    fn teardown(&mut self, stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        if stage == Stage::Fit && !self.fast_dev_run {
            crate::checkpoint::remove_file(&self.path)?;
        }
        Ok(())
    }
}
