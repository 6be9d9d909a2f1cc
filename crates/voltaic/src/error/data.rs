//! Errors of data sets and loaders.

use std::path::PathBuf;

/// A data set or loader cannot give its samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file does not hold what its format promises.
    #[error("{}: at byte {offset}: {what}; {remedy}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in the file, in bytes from its start.
        offset: u64,
        /// What was expected and what was found.
        what: String,
        /// How to mend it.
        remedy: String,
    },
    /// A file of the data set is not there.
    #[error("{} is missing; {remedy}", path.display())]
    Missing {
        /// The file or folder looked for.
        path: PathBuf,
        /// How to mend it.
        remedy: String,
    },
}
