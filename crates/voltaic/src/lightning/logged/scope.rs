//! How a value is logged, and in which hook.

use serde::{Deserialize, Serialize};

use super::value::ReduceFx;

/// Hook and name of a logged value, Lightning's key.
pub(super) type Key = (String, String);

/// Options of one logged value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LogOptions {
    pub prog_bar: bool,
    pub logger: bool,
    pub on_step: bool,
    pub on_epoch: bool,
    pub reduce_fx: ReduceFx,
    #[serde(default)]
    pub sync_dist: bool,
    #[serde(default = "yes")]
    pub add_dataloader_idx: bool,
    #[serde(skip)]
    pub batch_size: Option<usize>,
}

fn yes() -> bool {
    true
}

impl LogOptions {
    /// Both a step value and an epoch value are reported, so their names get suffixes.
    pub fn is_forked(&self) -> bool {
        self.on_step && self.on_epoch
    }
}

/// Which results a value belongs to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    #[default]
    Train,
    Eval,
}

/// Whether a hook may log, and at which level it does by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Level {
    #[default]
    Denied,
    Step,
    Epoch,
    /// As `Epoch`; values of single steps are refused.
    EpochOnly,
}

/// The hook that is running, as far as logging is concerned.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogScope {
    pub hook: &'static str,
    pub phase: Phase,
    pub level: Level,
    pub batch_size: Option<usize>,
    /// Set if there are several evaluation loaders.
    pub dataloader_idx: Option<usize>,
}
