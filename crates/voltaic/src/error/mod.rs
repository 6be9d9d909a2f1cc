//! One error type for the library. Each message says what is wrong with its values, where, and how to fix it.
//!
//! Functions that users call return [`Result`]; functions that users implement (steps, datasets, callbacks) return
//! `anyhow::Result`, so that any `?` works there, and reaches the caller as [`Error::Hook`].

mod checkpoint;
mod config;
mod data;
mod device;
mod distributed;
mod graph;
mod libtorch;
mod log;
mod module;
mod optim;
mod printable;
mod problem;
mod profiler;
mod setting;
mod stderr;
mod switch;
#[cfg(test)]
mod tests;
mod torch;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

pub use checkpoint::CheckpointError;
pub use config::{ConfigError, ConfigProblem};
pub use data::DataError;
pub use device::DeviceError;
pub use distributed::{CollectiveFailure, DistributedError};
pub(crate) use distributed::{NAMED_RANKS, name_ranks};
pub use graph::GraphError;
pub use libtorch::LibtorchError;
pub(crate) use log::print_log;
pub use module::ModuleError;
pub use optim::OptimError;
pub(crate) use printable::{first_of, printable, shortened};
pub use problem::Problem;
pub use profiler::ProfilerError;
pub use setting::SettingError;
pub(crate) use stderr::{report_lost_lines, write_stderr};
pub use switch::SwitchError;
pub use torch::{TorchError, TorchErrorKind};

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
        r#source: std::io::Error,
        /// How to fix it.
        remedy: Cow<'static, str>,
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
        /// The user's error. Its text is in this error's, so that it is not a cause of its own.
        r#source: anyhow::Error,
    },
    /// `detect_anomaly` has found a loss or gradient that is NaN or infinite.
    #[error(
        "{what} is not finite in epoch {epoch} at global_step {global_step}: {}; {ANOMALY}", made_by(operation.as_deref())
    )]
    Anomaly {
        /// `the loss`, or the gradient of a parameter.
        what: String,
        /// The first operation that made NaN or infinity of finite tensors, with the backward function that ran it if any; none if
        /// the values came with the data, the weights or a constant.
        operation: Option<String>,
        /// The epoch in progress, from 0.
        epoch: u64,
        /// Optimizer steps done so far.
        global_step: u64,
    },
    /// The run was asked to stop by a signal.
    #[error("interrupted by {signal} at global_step {global_step}; {INTERRUPTED}")]
    Interrupted {
        /// `SIGINT`, `SIGTERM`, `SIGHUP`, `SIGUSR1` or `SIGUSR2`.
        signal: &'static str,
        /// Optimizer steps done so far.
        global_step: u64,
    },
}

fn made_by(operation: Option<&str>) -> String {
    match operation {
        Some(operation) => format!("the first operation that made NaN or infinity is {operation}"),
        None => "no operation made it of finite tensors, so that it came with the data, the weights or a constant, as in \
                 `loss * NAN`"
            .to_owned(),
    }
}

const ANOMALY: &str = "look at what goes into it, or lower the learning rate";
const INTERRUPTED: &str = "resume with ckpt_path=last if a checkpoint was saved";

impl Error {
    /// Says of a checkpoint that does not fit which file it is.
    pub(crate) fn of_file(self, path: &Path) -> Self {
        match self {
            Self::Checkpoint(CheckpointError::Mismatch { module, problem: Problem { what, remedy } }) => {
                let problem = Problem::new(format!("{}: {what}", path.display()), remedy);
                CheckpointError::Mismatch { module, problem }.into()
            }
            other => other,
        }
    }

    /// How to fix it, which is what the message ends with; none if that is not known, such as for an error of the user's
    /// code. Of an error that the user's code passed on ([`Error::Hook`]), that error's remedy.
    pub fn remedy(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Config(error) => Some(error.remedy()),
            Self::Device(error) => Some(error.remedy()),
            Self::Data(error) => Some(error.remedy()),
            Self::Module(error) => error.remedy(),
            Self::Checkpoint(error) => Some(error.remedy()),
            Self::Distributed(error) => Some(error.remedy()),
            Self::Optim(error) => Some(error.remedy()),
            Self::Graph(error) => Some(error.remedy()),
            Self::Profiler(error) => Some(error.remedy().into()),
            Self::Switch(error) => Some(error.remedy().into()),
            Self::Setting(error) => Some(error.remedy().into()),
            Self::Libtorch(error) => Some(error.remedy().into()),
            Self::Torch(error) => error.remedy().map(Into::into),
            Self::Io { remedy, .. } => Some((&**remedy).into()),
            Self::Hook { source, .. } => source.downcast_ref::<Self>().and_then(Self::remedy),
            Self::Anomaly { .. } => Some(ANOMALY.into()),
            Self::Interrupted { .. } => Some(INTERRUPTED.into()),
        }
    }

    /// The error as a [`Problem`] of what led to it, such as a key of the configuration.
    pub(crate) fn into_problem(self, otherwise: &'static str) -> Problem {
        let text = self.to_string();
        let Some(remedy) = self.remedy() else { return Problem::new(text, otherwise) };
        let what = text.strip_suffix(&*remedy).and_then(|text| text.strip_suffix("; ")).unwrap_or(&text);
        Problem::new(what, remedy.into_owned())
    }

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
        Self::Io { action, path: path.as_ref().to_path_buf(), source, remedy: remedy.into() }
    }
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
