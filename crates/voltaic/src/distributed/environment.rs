//! Which launcher started this process, and how many ranks it says there are.

use std::fmt;

use super::variables::{LAUNCHER, Variables};

/// What starts the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClusterEnvironment {
    /// `torchrun` (`TORCHELASTIC_RUN_ID` is set).
    TorchElastic,
    /// `srun` in a job that is not interactive.
    Slurm,
    /// `jsrun` under LSF.
    Lsf,
    /// `mpirun` of Open MPI, MPICH or Intel MPI.
    Mpi,
    /// One process per pod (`RANK` without `LOCAL_RANK`), as Kubeflow's PyTorchJob starts them.
    Kubeflow,
    /// voltaic's own launcher, or another one that sets the same variables.
    Lightning,
}

impl fmt::Display for ClusterEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TorchElastic => "torchrun",
            Self::Slurm => "Slurm",
            Self::Lsf => "LSF",
            Self::Mpi => "MPI",
            Self::Kubeflow => "Kubeflow (RANK is set and LOCAL_RANK is not)",
            Self::Lightning => "a launcher that sets LOCAL_RANK",
        })
    }
}

impl ClusterEnvironment {
    /// The launcher that has set the variables.
    pub fn detect(variables: &Variables) -> Self {
        let has = |name: &str| variables.text(name).is_some();
        let has_all = |names: &[&str]| names.iter().all(|name| has(name));
        let job = variables.text("SLURM_JOB_NAME");
        let mpi_size =
            ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].into_iter().find_map(|name| variables.number(name).ok()?);
        if has("TORCHELASTIC_RUN_ID") {
            Self::TorchElastic
        } else if has("SLURM_NTASKS") && !matches!(job, Some("bash" | "interactive")) {
            Self::Slurm
        } else if has_all(&[
            "LSB_JOBID",
            "LSB_DJOB_RANKFILE",
            "JSM_NAMESPACE_LOCAL_RANK",
            "JSM_NAMESPACE_SIZE",
        ]) {
            Self::Lsf
        } else if mpi_size.is_some_and(|size| size > 1) {
            Self::Mpi
        } else if has_all(&["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
            && !["LOCAL_RANK", "NODE_RANK", "GROUP_RANK"].into_iter().any(has)
        {
            Self::Kubeflow
        } else {
            Self::Lightning
        }
    }
}

impl Variables {
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
}
