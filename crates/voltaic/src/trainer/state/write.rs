//! Writes the checkpoints that were asked for.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::callback::Callback;
use crate::checkpoint::{Checkpoint, RankState, parts_to_host, rank_from_bytes, rank_to_bytes};
use crate::data::Stage;
use crate::distributed::{ProcessGroup, SlurmJob, World, collective_scope};
use crate::error::{CheckpointError, Error, Problem, Result};
use crate::module::{CheckpointRequest, LightningModule};
use crate::profiler::actions;
use crate::trainer::session::frozen::{AfterFit, FitState, Frozen};
use crate::trainer::session::run::Run;
use crate::trainer::session::session::Session;
use crate::trainer::state::agree::agreed;
use crate::trainer::state::collect::{self, collect, complete, own_state, saves_parts};
use crate::trainer::state::requeue::next_path;

impl<M: LightningModule> Session<'_, M> {
    /// Writes the checkpoints that hooks have asked for. Called only where a resumed run can go on: between batches,
    /// when validation and schedules have had their turn.
    ///
    /// # Collective
    /// If a full checkpoint has been asked for.
    pub(crate) fn write_checkpoints(&mut self) -> Result<()> {
        if self.run.asks.checkpoints.is_empty() {
            return Ok(());
        }
        let _named = collective_scope("checkpoint");
        let requests = std::mem::take(&mut self.run.asks.checkpoints);
        let is_full = |request: &CheckpointRequest| !request.weights_only && request.link_to.is_none();
        let by_parts = saves_parts(self.run);
        let is_gathered = !by_parts && requests.iter().any(is_full);
        let mut ranks = if is_gathered { gather_ranks(self)? } else { Vec::new() };
        let done = if self.run.world().is_global_zero() { self.flush_loggers() } else { Ok(()) };
        let all_write = by_parts && requests.iter().any(|request| request.link_to.is_none());
        let path = requests.iter().find(|request| request.link_to.is_none()).map(|request| &request.path);
        let done = match path {
            Some(path) if all_write => agreed(self.run.world(), "save", path, done),
            _ => done,
        };
        let done = done.and_then(|()| self.write_all(&requests, by_parts, &mut ranks));
        match path {
            Some(path) if all_write || is_gathered => agreed(self.run.world(), "save", path, done)?,
            _ => self.keep_failure(done)?,
        }
        self.run.callbacks.iter_mut().for_each(|callback| callback.on_checkpoints_written());
        Ok(())
    }

    fn write_all(
        &mut self,
        requests: &[CheckpointRequest],
        by_parts: bool,
        ranks: &mut Vec<RankState>,
    ) -> Result<()> {
        for request in requests {
            if by_parts && request.link_to.is_none() {
                write_parts(self, request)?;
            } else if self.run.world().is_global_zero() {
                write(self, request, ranks)?;
            }
        }
        Ok(())
    }

    /// Rows that are older than a checkpoint reach the disk before it: a run that goes on from it does not log them again.
    fn flush_loggers(&mut self) -> Result<()> {
        for logger in &mut self.run.loggers {
            logger.save()?;
            for file in logger.files() {
                let Ok(open) = std::fs::File::open(&file) else { continue }; // one of a logger of the user's, not made yet
                open.sync_data().map_err(|error| Error::io("flush to disk", &file, error))?;
            }
        }
        Ok(())
    }

    /// Keeps the run as it is now for the checkpoints to come, if there may be some: what follows is done because the run
    /// ends here, and would be done again, or at another time, by one that goes on.
    pub(crate) fn freeze(&mut self) -> Result<()> {
        let mut callbacks = self.run.callbacks.iter();
        let saves = callbacks.any(|callback| callback.saves_checkpoints() || callback.saves_on_exception());
        let is_asked = !self.run.asks.checkpoints.is_empty() || self.plan.save_on_signal;
        if self.frozen.is_none() && (saves || is_asked) {
            self.frozen = Some(collect::freeze(self)?);
        }
        Ok(())
    }

    /// An error if a signal asked the run to end, after the checkpoint for it if the run is to save one.
    pub(crate) fn check_signals(&mut self) -> Result<()> {
        let Some(signal) = self.agreed_signal() else { return Ok(()) };
        let trains = self.run.at.stage == Stage::Fit && !self.plan.fast_dev_run;
        let job = SlurmJob::of_process()
            .filter(|_| trains && self.plan.requeue_signal.is_some_and(|own| own.name() == signal));
        let mut claim = None;
        // nobody who closes a terminal means to end the run
        let hangs_up = || self.run.callbacks.iter().any(|callback| callback.saves_checkpoints());
        let saves = self.plan.save_on_signal || (signal == "SIGHUP" && hangs_up());
        if (job.is_some() || (saves && trains)) && !self.run.at.is_sanity_check {
            let saved = self.run.callbacks.iter().find_map(|callback| callback.checkpoint_paths()?.folder);
            let folder = saved.unwrap_or_else(|| self.run.facts.log_dir.join("checkpoints"));
            let is_writer = self.run.world().is_global_zero();
            let path = match job {
                Some(_) if is_writer => {
                    let (path, claimed) = next_path(&self.run.facts.default_root_dir);
                    claim = claimed;
                    path
                }
                _ => folder.join("on_signal.ckpt"),
            };
            let path = self.run.world().of_rank_zero(path)?;
            tracing::info!("{signal}: saving {}", path.display());
            let request =
                CheckpointRequest { path, weights_only: false, link_to: None, then_remove: Vec::new() };
            self.run.asks.checkpoints = vec![request]; // others wait for a better moment, which does not come
            self.write_checkpoints()?;
        }
        if let Some(job) = job {
            // one that is written while training goes on has to be there first
            let done = self.run.checkpoint_io.teardown();
            agreed(self.run.world(), "save", &self.run.facts.default_root_dir, done)?;
            drop(claim);
            if self.run.world().is_global_zero()
                && let Err(problem) = job.requeue()
            {
                tracing::error!("the job is not queued again: {problem}");
            }
            let _named = collective_scope("requeue");
            self.run.world().barrier()?; // Slurm may end all tasks when the first has ended
        }
        Err(Error::Interrupted { signal, global_step: self.run.at.progress.global_step })
    }
}

/// Gives rank 0 what the other ranks have to themselves, for the checkpoints that all of them are about to ask for.
///
/// # Collective
/// All ranks must call it after the same batch.
pub(crate) fn gather_ranks<M: LightningModule>(session: &Session<M>) -> Result<Vec<RankState>> {
    let Some(group) = session.run.world().group().filter(|group| group.world_size() > 1) else {
        return Ok(Vec::new());
    };
    match &session.frozen {
        Some(Frozen::Own(own)) => gather(group, own),
        _ if group.rank() == 0 => gather(group, &[]),
        _ => gather(group, &rank_to_bytes(&own_state(session)?)?),
    }
}

fn gather(group: &ProcessGroup, own: &[u8]) -> Result<Vec<RankState>> {
    let all = group.gather_bytes(own, 0)?;
    all.iter().skip(1).map(|bytes| rank_from_bytes(bytes)).collect()
}

/// Writes the checkpoint that a callback asked for, then removes those it replaces. `ranks` is what the other ranks
/// have to themselves; it may be taken out.
pub(crate) fn write<M: LightningModule>(
    session: &mut Session<M>,
    request: &CheckpointRequest,
    ranks: &mut Vec<RankState>,
) -> Result<()> {
    match &request.link_to {
        Some(target) => session.run.checkpoint_io.link_checkpoint(target, &request.path)?,
        None => {
            let _action = session.profile(actions::SAVE_CHECKPOINT)?;
            let mut checkpoint = match &session.frozen {
                Some(Frozen::Whole(frozen)) if !request.weights_only => {
                    with_savers(frozen, &session.run.callbacks)?
                }
                _ => collect(session, request.weights_only)?,
            };
            if let Some(training) = &mut checkpoint.training {
                training.ranks = std::mem::take(ranks);
            }
            session.run.checkpoint_io.save_checkpoint(&checkpoint, &request.path, None)?;
            if let Some(training) = checkpoint.training {
                *ranks = training.ranks; // for the next file of the same moment
            }
            if !request.weights_only {
                session.run.note_checkpoint(&request.path)?;
            }
        }
    }
    remove_replaced(session.run, request)
}

/// Removes the checkpoints that one replaces.
fn remove_replaced(run: &mut Run, request: &CheckpointRequest) -> Result<()> {
    let Run { checkpoint_io, resumed_from, .. } = run;
    let is_kept = |old: &&PathBuf| !resumed_from.as_ref().is_some_and(|resumed| is_same_file(resumed, old));
    request.then_remove.iter().filter(is_kept).try_for_each(|old| checkpoint_io.remove_checkpoint(old))
}

/// Writes this rank's parts of the checkpoint that a callback asked for; rank 0 then removes those it replaces.
///
/// # Collective
/// All ranks must call it.
fn write_parts<M: LightningModule>(session: &mut Session<M>, request: &CheckpointRequest) -> Result<()> {
    let _action = session.profile(actions::SAVE_CHECKPOINT)?;
    let checkpoint = match &session.frozen {
        Some(Frozen::Whole(frozen)) if !request.weights_only => with_savers(frozen, &session.run.callbacks),
        _ => collect(session, request.weights_only),
    };
    let checkpoint = agreed(session.run.world(), "save", &request.path, checkpoint)?;
    save(session.run, &checkpoint, &request.path, None)?;
    drop(checkpoint);
    if !session.run.world().is_global_zero() {
        return Ok(());
    }
    if !request.weights_only {
        session.run.note_checkpoint(&request.path)?;
    }
    remove_replaced(session.run, request)
}

/// Writes a checkpoint of which this rank may have parts. Rank 0 writes one of weights alone that are whole.
///
/// # Collective
/// All ranks must call it, if it has parts or a training state.
pub(crate) fn save(
    run: &mut Run,
    checkpoint: &Checkpoint,
    path: &Path,
    storage_options: Option<&Value>,
) -> Result<()> {
    let group = run.world().group().filter(|_| saves_parts(run)).cloned();
    match group.filter(|_| !checkpoint.parts.is_empty() || checkpoint.training.is_some()) {
        Some(group) => run.checkpoint_io.save_parts(checkpoint, &group, path, storage_options),
        None if run.world().is_global_zero() => {
            run.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        }
        None => Ok(()),
    }
}

/// Whether two paths lead to one file, links included.
fn is_same_file(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// A frozen checkpoint with the state that callbacks which save checkpoints have now: they know the files.
fn with_savers(frozen: &Checkpoint, callbacks: &[Box<dyn Callback>]) -> Result<Checkpoint> {
    let mut checkpoint = frozen.to_host()?;
    let states = checkpoint.training.as_mut().and_then(|training| training.json["callbacks"].as_array_mut());
    let Some(states) = states else { return Ok(checkpoint) };
    for callback in callbacks.iter().filter(|callback| callback.saves_checkpoints()) {
        let (key, own) = (callback.state_key(), callback.state_dict());
        if let (Some(saved), Some(own)) = (states.iter_mut().find(|saved| saved[0] == key.as_str()), own) {
            saved[1] = own;
        }
    }
    Ok(checkpoint)
}

/// Writes a checkpoint of a fit that is over.
///
/// # Collective
/// All ranks must call it.
pub(crate) fn write_after_fit<M: LightningModule>(
    session: &mut Session<M>,
    after: &AfterFit,
    path: &Path,
    storage_options: Option<&Value>,
) -> Result<()> {
    if saves_parts(session.run) {
        let Some(checkpoint) = after_fit(session, after)? else { return Ok(()) };
        save(session.run, &checkpoint, path, storage_options)?;
        return session.run.checkpoint_io.teardown();
    }
    let group = session.run.world().group().filter(|group| group.world_size() > 1).cloned();
    let ranks = match &group {
        Some(group) => {
            let own = match after {
                AfterFit::Own(own) | AfterFit::Frozen(Frozen::Own(own)) => own.as_slice(),
                _ => &[],
            };
            gather(group, own)?
        }
        None => Vec::new(),
    };
    let Some(mut checkpoint) = after_fit(session, after)? else { return Ok(()) }; // rank 0 writes
    if let Some(training) = &mut checkpoint.training {
        training.ranks = ranks;
    }
    session.run.checkpoint_io.save_checkpoint(&checkpoint, path, storage_options)?;
    session.run.checkpoint_io.teardown()
}

/// What rank 0 did ends all ranks, if it has failed.
///
/// # Collective
/// All ranks must call it.
pub(crate) fn as_on_rank_zero(world: &World, done: Result<()>, path: &Path) -> Result<()> {
    if world.world_size == 1 || matches!(done, Err(Error::Distributed(_))) {
        return done; // nobody is there, or known to be there
    }
    if matches!(done, Err(Error::Checkpoint(CheckpointError::OnRanks { .. }))) {
        return done; // all have it
    }
    let _named = collective_scope("checkpoint");
    let own = done.map_err(|error| {
        let Problem { what, remedy } = error.into_problem("look at the file system of this rank");
        Problem::new(format!("rank {}: {what}", world.rank), remedy)
    });
    let failed = |problem| CheckpointError::OnRanks { action: "save", path: path.to_path_buf(), problem };
    let told = match (world.of_rank_zero(own.clone()), &own) {
        (Err(_), Err(own)) => Err(own.clone()), // nobody hears it
        (told, _) => told?,
    };
    told.and(own).map_err(|problem| failed(problem).into())
}

/// The checkpoint of a fit that is over; `None` on ranks that do not write.
fn after_fit<M: LightningModule>(session: &mut Session<M>, after: &AfterFit) -> Result<Option<Checkpoint>> {
    match after {
        AfterFit::Frozen(Frozen::Whole(frozen)) => with_savers(frozen, &session.run.callbacks).map(Some),
        AfterFit::Whole(kept) => {
            let FitState { state, training, parts } = kept.as_ref();
            let (state, training, parts) = (state.clone(), training.to_host()?, parts_to_host(parts)?);
            complete(session, Some(FitState { state, training, parts })).map(Some)
        }
        AfterFit::Own(_) | AfterFit::Frozen(Frozen::Own(_)) => Ok(None),
    }
}
