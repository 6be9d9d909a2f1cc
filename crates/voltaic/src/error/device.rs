//! Errors of devices.

use std::borrow::Cow;

use super::problem::Problem;

/// A device that is absent, or a device name that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text names no device.
    #[error("`{text}` is not a device; {}", self.remedy())]
    Unknown {
        /// What was given.
        text: String,
    },
    /// A variable of the environment that describes devices has a invalid value.
    #[error("{name}=`{value}` in the environment is not valid; {}", self.remedy())]
    Setting {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What it may be.
        accepted: String,
    },
    /// The devices of a process are set up once, and were set up otherwise.
    #[error("this process has {settings} already, and cannot have {asked}; {}", self.remedy())]
    AlreadySetUp {
        /// What there is.
        settings: String,
        /// The requested device.
        asked: String,
    },
    /// The machine, or this build, has no such device.
    #[error("{device} is not available: {problem}")]
    Unavailable {
        /// The device or accelerator asked for.
        device: String,
        /// Why, and how to fix it.
        problem: Problem,
    },
}

impl DeviceError {
    /// How to fix it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            Self::Unknown { .. } => "use cpu, cuda, cuda:<index>, hpu or hpu:<index>".into(),
            Self::Setting { accepted, .. } => format!("use {accepted}, or unset it").into(),
            Self::AlreadySetUp { .. } => "use one setting, or two processes".into(),
            Self::Unavailable { problem, .. } => (&*problem.remedy).into(),
        }
    }
}
