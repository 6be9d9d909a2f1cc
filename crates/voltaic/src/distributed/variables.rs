//! Variables of the environment, as launchers set them.

use std::collections::HashMap;

use super::cluster::ClusterEnvironment;
use super::launcher::LAUNCHER;
use crate::error::ConfigError;

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

    /// Ranks that a launcher has started, if this process is one of them.
    pub(crate) fn launched_ranks(&self) -> Option<usize> {
        let names: &[&str] = match ClusterEnvironment::detect(self) {
            ClusterEnvironment::Slurm => &["SLURM_NTASKS"],
            ClusterEnvironment::Lsf => &["JSM_NAMESPACE_SIZE"],
            ClusterEnvironment::Mpi => &["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"],
            ClusterEnvironment::Lightning if self.text("LOCAL_RANK").is_none() => &[],
            _ => &["WORLD_SIZE"],
        };
        names.iter().find_map(|name| self.number(name).ok()?)
    }

    /// Whether voltaic's launcher has started this process as one of several ranks.
    pub(crate) fn is_rank_of_launcher(&self) -> bool {
        self.text(LAUNCHER).is_some() && self.launched_ranks().is_some_and(|ranks| ranks > 1)
    }

    /// Whether another program has started this process as a rank that is not the first, and whose output appears among
    /// that of the others. Those of voltaic's launcher and pods have logs of their own.
    pub(crate) fn is_one_more_rank(&self) -> bool {
        let names: &[&str] = match ClusterEnvironment::detect(self) {
            _ if self.text(LAUNCHER).is_some() => &[],
            ClusterEnvironment::Kubeflow => &[],
            ClusterEnvironment::TorchElastic => &["RANK"],
            ClusterEnvironment::Slurm => &["SLURM_PROCID"],
            ClusterEnvironment::Lsf => &["JSM_NAMESPACE_RANK"],
            ClusterEnvironment::Mpi => &["OMPI_COMM_WORLD_RANK", "PMI_RANK"],
            ClusterEnvironment::Lightning => &["LOCAL_RANK"],
        };
        names.iter().find_map(|name| self.number(name).ok()?).is_some_and(|rank| rank > 0)
    }

    /// Refuses to let each of several processes train for itself, only because the configuration speaks of one.
    pub(crate) fn check_alone(&self) -> Result<(), ConfigError> {
        let names: &[&str] = match ClusterEnvironment::detect(self) {
            _ if self.text(LAUNCHER).is_some() => return Ok(()), // a rank may well train something by itself
            // an allocation may have more tasks than the step that runs
            ClusterEnvironment::Slurm => &["SLURM_STEP_NUM_TASKS"],
            ClusterEnvironment::Lsf => &["JSM_NAMESPACE_SIZE"],
            ClusterEnvironment::Mpi => &["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"],
            _ => &["WORLD_SIZE"],
        };
        let found = names.iter().find_map(|&name| Some((name, self.number(name).ok()??)));
        match found.filter(|&(_, size)| size > 1) {
            None => Ok(()),
            Some((name, size)) => Err(ConfigError::new(
                name,
                format!("{size} ranks, but trainer.devices and trainer.num_nodes speak of one"),
                "set them to what was started, or trainer.strategy=single_device for processes that have nothing to do \
                 with each other",
            )),
        }
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, ConfigError> {
        let parse = |text: &str| {
            text.trim().parse().map_err(|_| {
                ConfigError::new(
                    name,
                    format!("`{text}` is no number"),
                    "set it to a number from 0, or unset it",
                )
            })
        };
        self.text(name).map(parse).transpose()
    }

    pub(super) fn required(&self, name: &str, launcher: ClusterEnvironment) -> Result<usize, ConfigError> {
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
            _ => Err(ConfigError::new(name, format!("{number} is no port"), "use a port from 1 to 65535")),
        }
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Variables {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}
