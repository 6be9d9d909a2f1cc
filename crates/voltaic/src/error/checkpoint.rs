//! Errors of checkpoints.

use std::borrow::Cow;
use std::path::PathBuf;

use super::problem::Problem;

/// A checkpoint cannot be read or applied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file is not a checkpoint, or a damaged one.
    #[error("{}: not a readable checkpoint: {problem}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// The names or shapes of a state dict differ from the module's.
    #[error("state dict does not fit {module}: {problem}")]
    Mismatch {
        /// The module's type.
        module: String,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// A rank could not save or read a checkpoint or its part of one, or write what its loggers keep; all ranks have this error.
    #[error("cannot {action} {}: {problem}", path.display())]
    OnRanks {
        /// `save`, `read` or `write`.
        action: &'static str,
        /// The folder.
        path: PathBuf,
        /// Which rank failed and why, and how to fix it.
        problem: Problem,
    },
}

impl CheckpointError {
    /// How to fix it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            Self::Unreadable { problem, .. }
            | Self::Mismatch { problem, .. }
            | Self::OnRanks { problem, .. } => (&*problem.remedy).into(),
        }
    }
}
