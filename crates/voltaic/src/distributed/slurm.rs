//! The Slurm job that this process belongs to, and how it is queued again.

use std::fmt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGTERM, SIGUSR1, SIGUSR2};
use voltaic_macros::Defaults;

use super::variables::Variables;
use crate::error::{Error, Result};

/// What a run does in a Slurm job.
///
/// Source: `lightning.pytorch.plugins.environments.SLURMEnvironment`.
#[derive(Defaults, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SlurmEnvironment {
    /// Whether the signal saves `hpc_ckpt_<n>.ckpt` and queues the job again; otherwise it only ends the run.
    #[default(true)]
    pub auto_requeue: bool,
    /// The signal that `#SBATCH --signal` names; SIGUSR1 unless set.
    pub requeue_signal: Option<RequeueSignal>,
}

/// By what Slurm says that the time of a job is nearly over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum RequeueSignal {
    /// `#SBATCH --signal=USR1@90`
    SigUsr1,
    /// `#SBATCH --signal=USR2@90`
    SigUsr2,
    /// `#SBATCH --signal=HUP@90`
    SigHup,
    /// `#SBATCH --signal=TERM@90`
    SigTerm,
}

impl RequeueSignal {
    /// As in C.
    pub fn name(self) -> &'static str {
        match self {
            Self::SigUsr1 => "SIGUSR1",
            Self::SigUsr2 => "SIGUSR2",
            Self::SigHup => "SIGHUP",
            Self::SigTerm => "SIGTERM",
        }
    }

    pub(crate) fn number(self) -> i32 {
        match self {
            Self::SigUsr1 => SIGUSR1,
            Self::SigUsr2 => SIGUSR2,
            Self::SigHup => SIGHUP,
            Self::SigTerm => SIGTERM,
        }
    }
}

impl fmt::Display for RequeueSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether a notice was received, by [`RequeueSignal`]; signals without a handler are not set.
static NOTICES: [OnceLock<Arc<AtomicBool>>; 4] = [const { OnceLock::new() }; 4];

const SIGNALS: [RequeueSignal; 4] =
    [RequeueSignal::SigUsr1, RequeueSignal::SigUsr2, RequeueSignal::SigHup, RequeueSignal::SigTerm];

/// Keeps a notice that comes before a run has begun, from now on. Only in a Slurm job: elsewhere the signal does what it does.
pub(crate) fn keep_notice(signal: RequeueSignal) -> Result<()> {
    if SlurmJob::of_process().is_none() {
        return Ok(());
    }
    let mut result = Ok(());
    NOTICES[signal as usize].get_or_init(|| {
        let flag = Arc::default();
        result = signal_hook::flag::register(signal.number(), Arc::clone(&flag)).map(drop);
        flag
    });
    result.map_err(|error| Error::io("watch signals for", "this process", error))
}

/// The pre-emption notice, if received.
pub(crate) fn notice() -> Option<RequeueSignal> {
    let has_come = |signal: &RequeueSignal| {
        NOTICES[*signal as usize].get().is_some_and(|flag| flag.load(Ordering::Relaxed))
    };
    SIGNALS.into_iter().find(has_come)
}

/// A job that Slurm can start again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlurmJob {
    /// As `scontrol` takes it; the same each time that it is started.
    pub id: String,
    /// How often it has been started again.
    pub restarts: usize,
}

impl SlurmJob {
    /// The job of this process; `None` outside of one, and in an interactive one.
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
    pub fn requeue(&self) -> std::result::Result<(), String> {
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

    #[test]
    fn settings_have_the_names_of_lightning() {
        let read = |text: &str| serde_json::from_str::<SlurmEnvironment>(text).unwrap();
        assert_eq!(read("{}"), SlurmEnvironment { auto_requeue: true, requeue_signal: None });
        for signal in SIGNALS {
            let text = format!(r#"{{"auto_requeue": false, "requeue_signal": "{signal}"}}"#);
            assert_eq!(read(&text), SlurmEnvironment { auto_requeue: false, requeue_signal: Some(signal) });
        }
    }
}
