//! Errors of the libtorch that is loaded.

use std::path::PathBuf;

/// The libtorch that this process has loaded is another version than the one that voltaic was compiled with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is {}, but this program was compiled with libtorch {compiled}: layouts and functions differ; {}",
    path.display(), describe(loaded.as_deref()), self.remedy()
)]
pub struct LibtorchError {
    /// Version that the shim was compiled with.
    pub compiled: String,
    /// Version of the loaded library; `None` if it is too old to report one.
    pub loaded: Option<String>,
    /// The library that is loaded.
    pub path: PathBuf,
}

impl LibtorchError {
    /// How to fix it.
    pub fn remedy(&self) -> &'static str {
        "remove its folder from LD_LIBRARY_PATH and LD_PRELOAD, or compile the program again with LIBTORCH set to it"
    }
}

fn describe(version: Option<&str>) -> String {
    version.map_or_else(
        || "a libtorch too old to tell its version".to_owned(),
        |version| format!("libtorch {version}"),
    )
}
