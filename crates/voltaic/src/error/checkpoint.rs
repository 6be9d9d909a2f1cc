//! Errors of checkpoints.

use std::path::PathBuf;

/// A checkpoint cannot be read or applied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file is no checkpoint, or a damaged one.
    #[error("{}: not a readable checkpoint: {what}; {remedy}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
        /// How to mend it.
        remedy: String,
    },
    /// The names or shapes of a state dict differ from the module's.
    #[error("state dict does not fit {module}: {what}; {remedy}")]
    Mismatch {
        /// The module's type.
        module: String,
        /// Missing and unexpected names, and shapes that differ.
        what: String,
        /// How to mend it.
        remedy: String,
    },
}
