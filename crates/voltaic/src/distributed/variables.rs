//! Variables of the environment, as launchers set them.

use std::collections::HashMap;
use std::fmt;

use crate::error::ConfigError;
use crate::ffi::JobSecret;

/// Set for ranks that voltaic's launcher started: it holds the store. Its value is another for each launcher.
pub(super) const LAUNCHER: &str = "VOLTAIC_LAUNCHER";
/// How often it has started the ranks again.
pub(super) const ATTEMPT: &str = "VOLTAIC_RESTART_COUNT";

/// Where ranks report to voltaic's launcher that their configuration is wrong.
pub(super) const NOTE: &str = "VOLTAIC_LAUNCHER_NOTE";

/// The secret of a job's ranks: voltaic's launcher sets it for ranks on one host, the user for several hosts.
pub(super) const SECRET: &str = "VOLTAIC_JOB_SECRET";

/// Variables of the environment.
#[derive(Debug, Clone, Default)]
pub struct Variables(pub(super) HashMap<String, String>);

impl Variables {
    /// Those of this process.
    pub fn of_process() -> Self {
        let pairs = std::env::vars_os();
        pairs
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect()
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The secret of this job's ranks, if it is set.
    pub(super) fn secret(&self) -> Option<JobSecret> {
        self.text(SECRET).map(JobSecret::of)
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, ConfigError> {
        let parse = |text: &str| {
            text.trim().parse().map_err(|_| {
                ConfigError::new(
                    name,
                    format!("`{text}` is not a number"),
                    "set it to a number from 0, or unset it",
                )
            })
        };
        self.text(name).map(parse).transpose()
    }

    pub(super) fn required(&self, name: &str, launcher: impl fmt::Display) -> Result<usize, ConfigError> {
        self.number(name)?.ok_or_else(|| {
            ConfigError::new(
                name,
                format!("not set, but {launcher} started this process"),
                "set it, or start with another launcher",
            )
        })
    }

    pub(super) fn port(&self, name: &str) -> Result<Option<u16>, ConfigError> {
        let Some(number) = self.number(name)? else { return Ok(None) };
        match u16::try_from(number) {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(ConfigError::new(name, format!("{number} is not a port"), "use a port from 1 to 65535")),
        }
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Variables {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}
