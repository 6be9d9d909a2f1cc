//! One error type for the library. Each message says what is wrong with its values, where, and how to mend it.
//!
//! What the user calls returns [`Result`]; what the user implements (steps, datasets, callbacks) returns
//! `anyhow::Result`, so that any `?` works there, and reaches the caller as [`Error::Hook`].

mod checkpoint;
mod config;
mod data;
mod distributed;
mod graph;
mod libtorch;
mod module;
mod optim;
mod profiler;
mod setting;
mod switch;

use std::path::{Path, PathBuf};

pub use checkpoint::CheckpointError;
pub use config::{ConfigError, ConfigProblem};
pub use data::DataError;
pub use distributed::{CollectiveFailure, DistributedError};
pub use graph::GraphError;
pub use libtorch::LibtorchError;
pub use module::ModuleError;
pub use optim::OptimError;
pub use profiler::ProfilerError;
pub use setting::SettingError;
pub use switch::SwitchError;

/// Result of what the user calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in voltaic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One or more problems of the configuration, reported together.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A device is absent or refuses.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A data set or loader cannot give its samples.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A module was given what it cannot use.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// A checkpoint cannot be written, read or applied.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Ranks cannot work together.
    #[error(transparent)]
    Distributed(#[from] DistributedError),
    /// An optimizer or a learning rate schedule cannot do its step.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A graph cannot be recorded or replayed.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Actions of a profiler do not begin and end as they should.
    #[error(transparent)]
    Profiler(#[from] ProfilerError),
    /// A switch in the environment has a value it cannot have.
    #[error(transparent)]
    Switch(#[from] SwitchError),
    /// A variable of the environment has a value it cannot have.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The libtorch that is loaded is not the one that voltaic was compiled with.
    #[error(transparent)]
    Libtorch(#[from] LibtorchError),
    /// libtorch refused an operation.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// A file or folder could not be used.
    #[error("cannot {action} {}: {source}; {remedy}", path.display())]
    Io {
        /// What was tried, such as "create".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
        /// How to mend it.
        remedy: String,
    },
    /// The user's code returned an error or panicked.
    #[error("{hook} failed in epoch {epoch} at global_step {global_step} on rank {rank}: {source:#}")]
    Hook {
        /// Name of the hook, such as `training_step`.
        hook: &'static str,
        /// Global rank of the process.
        rank: usize,
        /// The epoch in progress, from 0.
        epoch: u64,
        /// Optimizer steps done so far.
        global_step: u64,
        /// The user's error.
        source: anyhow::Error,
    },
    /// `detect_anomaly` has found a loss or gradient that is NaN or infinite.
    #[error(
        "{what} is not finite in epoch {epoch} at global_step {global_step}: the first operation that made NaN or \
         infinity is {operation}; look at what goes into it, or lower the learning rate"
    )]
    Anomaly {
        /// `the loss`, or the gradient of a parameter.
        what: String,
        /// The operation, with the backward function that ran it if any.
        operation: String,
        /// The epoch in progress, from 0.
        epoch: u64,
        /// Optimizer steps done so far.
        global_step: u64,
    },
    /// The run was asked to stop by a signal.
    #[error(
        "interrupted by {signal} at global_step {global_step}; resume with ckpt_path=last if a checkpoint was saved"
    )]
    Interrupted {
        /// `SIGINT` or `SIGTERM`.
        signal: &'static str,
        /// Optimizer steps done so far.
        global_step: u64,
    },
}

impl Error {
    /// Whether memory of a device or of the host is used up; also if a hook says so, since tch's operators panic then.
    pub fn is_out_of_memory(&self) -> bool {
        let says_so = |text: &str| {
            let text = text.to_lowercase();
            text.contains("out of memory") || text.contains("not enough memory")
        };
        match self {
            Self::Torch(error) => error.kind == TorchErrorKind::OutOfMemory || says_so(&error.message),
            Self::Hook { source, .. } => says_so(&format!("{source:#}")),
            Self::Data(_) => says_so(&self.to_string()),
            _ => false,
        }
    }

    /// An [`Error::Io`] whose remedy follows from the kind of failure.
    pub fn io(action: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let remedy = match source.kind() {
            ErrorKind::NotFound => "check that the path is right and that its parent folder exists",
            ErrorKind::PermissionDenied => "check the permissions of the file and its folder",
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "free some disk space, or choose another folder"
            }
            ErrorKind::FileTooLarge => {
                "raise the limit on the size of files (ulimit -f), or choose another file system"
            }
            ErrorKind::ReadOnlyFilesystem => "choose a folder that can be written to",
            _ => "check the path and the file system",
        };
        Self::Io { action, path: path.as_ref().to_path_buf(), source, remedy: remedy.to_owned() }
    }
}

/// A device that is absent, or a device name that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text names no device.
    #[error("`{text}` is not a device; use cpu, cuda, cuda:<index>, hpu or hpu:<index>")]
    Unknown {
        /// What was given.
        text: String,
    },
    /// A variable of the environment that describes devices has a value that makes no sense.
    #[error("{name}=`{value}` in the environment makes no sense; use {accepted}, or unset it")]
    Setting {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What it may be.
        accepted: String,
    },
    /// The devices of a process are set up once, and were set up otherwise.
    #[error(
        "this process has {settings} already, and cannot have {asked}; use one setting, or two processes"
    )]
    AlreadySetUp {
        /// What there is.
        settings: String,
        /// What was asked for.
        asked: String,
    },
    /// The machine, or this build, has no such device.
    #[error("{device} is not available: {reason}")]
    Unavailable {
        /// The device or accelerator asked for.
        device: String,
        /// Why, and what to do.
        reason: String,
    },
}

/// libtorch's own error, with the operation that raised it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("libtorch: {op}: {message}")]
#[non_exhaustive]
pub struct TorchError {
    /// The function called, such as `_fused_adamw_`.
    pub op: &'static str,
    /// Which family of errors it belongs to.
    pub kind: TorchErrorKind,
    /// libtorch's text without its C++ backtrace.
    pub message: String,
}

/// Family of a [`TorchError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TorchErrorKind {
    /// Memory of a device is used up.
    OutOfMemory,
    /// An index lies outside its dimension.
    Index,
    /// libtorch has no such operation for these arguments.
    NotImplemented,
    /// Anything else.
    Other,
}

impl TorchError {
    /// An error of `op`; the text's C++ backtrace is cut off.
    pub(crate) fn new(op: &'static str, kind: TorchErrorKind, message: &str) -> Self {
        let end = message.find("\nException raised from").unwrap_or(message.len());
        let message = match lacks_hpu(message) {
            true => NO_HPU,
            false => message[..end].trim_end(),
        };
        Self { op, kind, message: message.to_owned() }
    }
}

const NO_HPU: &str =
    "no HPU is set up in this process; build a trainer with accelerator=hpu first, which sets it up";

/// Whether there is no back end that makes tensors on HPUs.
fn lacks_hpu(message: &str) -> bool {
    let makes_tensors = ["aten::empty.memory_format'", "aten::empty_strided'"];
    message.contains("from the 'HPU' backend")
        && makes_tensors.iter().any(|op| message.contains(&format!("Could not run '{op}")))
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        let message = match &error {
            tch::TchError::Torch(text) => text.clone(),
            other => other.to_string(),
        };
        let kind = if message.contains("out of memory") {
            TorchErrorKind::OutOfMemory
        } else {
            TorchErrorKind::Other
        };
        TorchError::new("tensor operation", kind, &message).into()
    }
}
