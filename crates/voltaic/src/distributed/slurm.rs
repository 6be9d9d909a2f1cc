//! The Slurm job that this process belongs to, and how it is queued again.

use std::process::Command;

use super::variables::Variables;

/// A job that Slurm can start again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlurmJob {
    /// As `scontrol` takes it.
    id: String,
    /// How often it has been started again.
    pub restarts: usize,
}

impl SlurmJob {
    /// That of this process; none if there is none, or somebody works in it by hand.
    pub fn of_process() -> Option<Self> {
        Self::of(&Variables::of_process())
    }

    fn of(variables: &Variables) -> Option<Self> {
        let is_by_hand = matches!(variables.text("SLURM_JOB_NAME"), Some("bash" | "interactive"));
        let id = variables.text("SLURM_JOB_ID").filter(|_| !is_by_hand)?;
        let task = (variables.text("SLURM_ARRAY_JOB_ID"), variables.text("SLURM_ARRAY_TASK_ID"));
        let id = match task {
            (Some(job), Some(task)) => format!("{job}_{task}"),
            _ => id.to_owned(),
        };
        let restarts = variables.number("SLURM_RESTART_COUNT").ok().flatten().unwrap_or(0);
        Some(Self { id, restarts })
    }

    /// Has Slurm end this job and put it into its queue again; why not, if that fails.
    pub fn requeue(&self) -> Result<(), String> {
        let output = Command::new("scontrol")
            .args(["requeue", &self.id])
            .output()
            .map_err(|error| format!("scontrol cannot be started: {error}"))?;
        if output.status.success() {
            tracing::info!("Slurm has queued job {} again", self.id);
            return Ok(());
        }
        Err(format!(
            "scontrol requeue {} ended with {}: {}",
            self.id,
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_known_by_their_variables() {
        let of = |pairs: &[(&str, &str)]| SlurmJob::of(&pairs.iter().copied().collect());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NAME", "bash")]), None);
        let job = |id: &str, restarts| Some(SlurmJob { id: id.to_owned(), restarts });
        assert_eq!(of(&[("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "2")]), job("7", 2));
        let array = [("SLURM_JOB_ID", "9"), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "3")];
        assert_eq!(of(&array), job("7_3", 0));
    }
}
