//! What ranks agree on before one of them acts on it: a stop, a signal, and a failure of one rank alone.

use std::path::Path;

use crate::config::format_size;
use crate::distributed::{ProcessGroup, World, collective_scope};
use crate::error::{CheckpointError, Error, Problem, Result};
use crate::module::{LightningModule, Requests};
use crate::nn::kept_within;
use crate::strategy::Votes;
use crate::trainer::session::engine::Engine;
use crate::trainer::session::session::{Run, Session};

/// The requests and signals of this rank, and whether it has failed.
pub(crate) fn votes(engine: &Engine, requests: &Requests) -> Votes {
    let signal = engine.signal();
    Votes {
        failure: engine.of_call.failure.is_some(),
        interrupt: signal == Some("SIGINT"),
        terminate: signal == Some("SIGTERM"),
        stop: requests.stop.is_some(),
        hangup: signal == Some("SIGHUP"),
        notice: signal == Some("SIGUSR1"),
        notice_2: signal == Some("SIGUSR2"),
        without_loss: 0,
    }
}

impl Run {
    /// After the first batch: which checkpointed modules keep what they save, within the budget. Rank 0 decides, since ranks have to gather
    /// weights in the same order, and their times differ.
    ///
    /// # Collective
    /// All ranks must call it after the same batch.
    pub(crate) fn choose_kept_activations(&mut self) -> Result<()> {
        let Some(checkpoints) = &mut self.engine.of_call.checkpoints else { return Ok(()) };
        let Some(budget) = checkpoints.budget.take() else { return Ok(()) };
        let calls = checkpoints.calls.clone();
        let costs = calls.costs();
        let mut kept = kept_within(&costs, budget);
        if let Some(group) = self.world().group() {
            let _named = collective_scope("kept activations");
            kept = group.broadcast_object(&kept, 0)?;
        }
        let bytes =
            costs.iter().zip(&kept).filter(|(_, kept)| **kept).map(|(cost, _)| cost.bytes).sum::<u64>();
        tracing::info!(
            "{} of {} checkpointed modules keep their activations, {} of {}",
            kept.iter().filter(|kept| **kept).count(),
            kept.len(),
            format_size(bytes as usize),
            format_size(budget as usize)
        );
        calls.keep(kept);
        Ok(())
    }
}

impl<M: LightningModule> Session<'_, M> {
    /// Exchanges the votes of all ranks, where no backward pass does.
    pub(crate) fn agree(&mut self) -> Result<()> {
        let _named = collective_scope("stop or signal");
        let agreed = self.run.engine.strategy.agree(votes(&self.run.engine, &self.run.requests))?;
        // a rank that was asked to stop says so each time, until its callback takes it back
        self.run.engine.agreed = Votes { stop: agreed.stop, ..self.run.engine.agreed.or(agreed) };
        Ok(())
    }

    /// Keeps an error of what this rank does alone until all ranks know of it: the others would wait in the next collective for a
    /// rank that has left. A process alone fails at once.
    ///
    /// # Errors
    /// Of a process alone.
    pub(crate) fn keep_failure(&mut self, done: Result<()>) -> Result<()> {
        match done {
            Err(error) if self.run.world().world_size > 1 => {
                self.run.engine.of_call.failure.get_or_insert(error);
                Ok(())
            }
            done => done,
        }
    }

    /// Ends all ranks with the error that one of them has kept, once their votes show it.
    ///
    /// # Collective
    /// All ranks must call it after they have the same votes.
    pub(crate) fn check_failures(&mut self) -> Result<()> {
        if self.run.engine.agreed.failure { self.compare_failures(Ok(())) } else { Ok(()) }
    }

    /// Ends all ranks with the error that one of them has kept, or has now.
    ///
    /// # Collective
    /// All ranks must call it.
    pub(crate) fn compare_failures(&mut self, done: Result<()>) -> Result<()> {
        let done = self.run.engine.of_call.failure.take().map_or(done, Err);
        let _named = collective_scope("what a rank writes");
        agreed(self.run.world(), "write", &self.run.facts.log_dir, done)
    }

    /// Whether a stop was requested, on any rank, and all ranks know.
    pub(crate) fn is_asked_to_stop(&self) -> bool {
        if self.run.world().world_size > 1 {
            self.run.engine.agreed.stop
        } else {
            self.run.requests.stop.is_some()
        }
    }

    /// Whether `min_epochs` and `min_steps` let a run end.
    pub(crate) fn reached_minimum(&self) -> bool {
        let progress = &self.run.at.progress;
        let epochs = progress.current_epoch + u64::from(progress.epoch_ended);
        epochs >= self.plan.min_epochs && progress.global_step >= self.plan.min_steps
    }

    /// Why a run is requested to stop.
    pub(crate) fn stop_reason(&self) -> String {
        self.run.requests.stop.clone().unwrap_or_else(|| "another rank asked to stop".to_owned())
    }

    /// Why a run stops as soon as `min_epochs` and `min_steps` are reached, if it is.
    pub(crate) fn pending_stop(&self) -> Option<String> {
        let is_pending = self.is_asked_to_stop() && !self.reached_minimum();
        is_pending.then(|| self.stop_reason())
    }

    /// The signal on which to end, known to all ranks.
    pub(crate) fn agreed_signal(&self) -> Option<&'static str> {
        if self.run.world().world_size == 1 {
            return self.run.engine.signal();
        }
        let Votes { interrupt, terminate, hangup, notice, notice_2, .. } = self.run.engine.agreed;
        let ends = [(interrupt, "SIGINT"), (terminate, "SIGTERM"), (hangup, "SIGHUP")];
        let notices = [(notice, "SIGUSR1"), (notice_2, "SIGUSR2")];
        let signals = [notices.as_slice(), &ends].concat();
        signals.into_iter().find_map(|(is_there, signal)| is_there.then_some(signal))
    }
}

/// What this rank has read or written, if all ranks could do theirs; else the first error of a rank, on all.
///
/// # Collective
/// All ranks must call it.
///
/// # Errors
/// [`CheckpointError::OnRanks`] if a rank has failed. An error of the connections stays as it is, without a collective.
pub(crate) fn agreed<T>(world: &World, action: &'static str, path: &Path, done: Result<T>) -> Result<T> {
    let Some(group) = world.peers() else { return done };
    let (done, error) = match done {
        Ok(done) => (Some(done), None),
        Err(error) => (None, Some(error)),
    };
    let failed = first_failure(group, error)?;
    match (failed, done) {
        (None, Some(done)) => Ok(done),
        (failed, _) => {
            let problem = failed.unwrap_or_else(|| Problem::new("", ""));
            Err(CheckpointError::OnRanks { action, path: path.to_path_buf(), problem }.into())
        }
    }
}

/// The first failure of a rank, on all.
fn first_failure(group: &ProcessGroup, own: Option<Error>) -> Result<Option<Problem>> {
    let own = match own {
        Some(error @ Error::Distributed(_)) => return Err(error), // the other ranks may be gone
        own => own.map(|error| problem_of(error, group.rank())),
    };
    match (group.all_gather_object(&own), own) {
        (Err(_), Some(own)) => Ok(Some(own)), // the other ranks are gone
        (all, _) => Ok(all?.into_iter().flatten().next()),
    }
}

/// What went wrong, and on which rank.
fn problem_of(error: Error, rank: usize) -> Problem {
    if let Error::Checkpoint(CheckpointError::OnRanks { problem, .. }) = error {
        return problem; // of another rank
    }
    let Problem { what, remedy } = error.into_problem("look at the file system of this rank");
    Problem::new(format!("rank {rank}: {what}"), remedy)
}
