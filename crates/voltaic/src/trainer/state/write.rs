//! Writes the checkpoints that were requested.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::{Checkpoint, RankState, rank_from_bytes, rank_to_bytes};
use crate::data::Stage;
use crate::distributed::{SlurmJob, World, collective_scope};
use crate::error::{CheckpointError, Error, Problem, Result};
use crate::module::{CheckpointRequest, LightningModule};
use crate::nn::ModuleExt;
use crate::profiler::actions;
use crate::trainer::session::agree::agreed;
use crate::trainer::session::session::{Run, RunSnapshot, Session};
use crate::trainer::state::collect::{
    check_mesh, collect, own_state, saves_shards, sharded_weights, snapshot,
};
use crate::trainer::state::restart::next_path;

impl<M: LightningModule> Session<'_, M> {
    /// Writes the checkpoints that hooks have requested. Called only where a run can be resumed: between batches,
    /// when validation and schedules have had their turn.
    ///
    /// # Collective
    /// If a full checkpoint has been requested.
    pub(crate) fn write_checkpoints(&mut self) -> Result<()> {
        if self.run.requests.checkpoints.is_empty() {
            return Ok(());
        }
        let _named = collective_scope("checkpoint");
        let requests = std::mem::take(&mut self.run.requests.checkpoints);
        let is_full = |request: &CheckpointRequest| !request.weights_only && request.link_to.is_none();
        let by_shards = saves_shards(self.run);
        let is_gathered = !by_shards && requests.iter().any(is_full);
        let mut ranks = if is_gathered { gather_ranks(self)? } else { Vec::new() };
        let done = if self.run.world().is_global_zero() { self.flush_loggers() } else { Ok(()) };
        let all_write = by_shards && requests.iter().any(|request| request.link_to.is_none());
        let path = requests.iter().find(|request| request.link_to.is_none()).map(|request| &request.path);
        let done = match path {
            Some(path) if all_write => agreed(self.run.world(), "save", path, done),
            _ => done,
        };
        let write_all = |()| requests.iter().try_for_each(|request| write(self, request, &mut ranks));
        let done = done.and_then(write_all);
        match path {
            Some(path) if all_write || is_gathered => agreed(self.run.world(), "save", path, done)?,
            _ => self.keep_failure(done)?,
        }
        self.run.callbacks.iter_mut().for_each(|callback| callback.on_checkpoints_written());
        Ok(())
    }

    /// Rows that are older than a checkpoint reach the disk before it: a run that resumes it does not log them again.
    pub(crate) fn flush_loggers(&mut self) -> Result<()> {
        for logger in &mut self.run.loggers {
            logger.save()?;
            for file in logger.files() {
                let Ok(open) = std::fs::File::open(&file) else { continue }; // one of a logger of the user's, not made yet
                open.sync_data().map_err(|error| Error::io("flush to disk", &file, error))?;
            }
        }
        Ok(())
    }

    /// Keeps the run, which is about to be cut short within an epoch, for the checkpoints to come, if there may be some: what follows is
    /// done because the run ends here. A resumed run would do it again, or at another time.
    pub(crate) fn keep_cut_short(&mut self) -> Result<()> {
        let mut callbacks = self.run.callbacks.iter();
        let saves = callbacks.any(|callback| callback.saves_checkpoints() || callback.saves_on_exception());
        let is_asked = !self.run.requests.checkpoints.is_empty() || self.plan.save_on_signal;
        if self.snapshot.is_none() && (saves || is_asked) {
            self.snapshot = Some(snapshot(self, true)?);
        }
        Ok(())
    }

    /// Writes a checkpoint of a fit that is over.
    ///
    /// # Collective
    /// All ranks must call it.
    pub(crate) fn write_after_fit(&mut self, path: &Path, storage_options: Option<&Value>) -> Result<()> {
        let mut ranks = if saves_shards(self.run) { Vec::new() } else { gather_ranks(self)? };
        write_state(self, path, (false, storage_options), &mut ranks)?;
        self.run.checkpoint_io.teardown()
    }

    /// An error if a signal is to end the run, after the checkpoint for it if the run is to save one.
    pub(crate) fn check_signals(&mut self) -> Result<()> {
        let Some(signal) = self.agreed_signal() else { return Ok(()) };
        let trains = self.run.at.stage == Stage::Fit && !self.plan.fast_dev_run;
        let job = SlurmJob::of_process()
            .filter(|_| trains && self.plan.requeue_signal.is_some_and(|own| own.name() == signal));
        let mut claim = None;
        // closing a terminal is not meant to end the run
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
            self.run.requests.checkpoints = vec![request]; // others wait for the end of validation, which does not come
            self.write_checkpoints()?;
        }
        if let Some(job) = job {
            // one that is written while training continues has to be there first
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

/// Sends the own states of the other ranks to rank 0, for the checkpoints that all ranks are about to request.
///
/// # Collective
/// All ranks must call it after the same batch.
pub(crate) fn gather_ranks<M: LightningModule>(session: &Session<M>) -> Result<Vec<RankState>> {
    let Some(group) = session.run.world().peers() else {
        return Ok(Vec::new());
    };
    let all = match &session.snapshot {
        Some(RunSnapshot::OwnState(own)) => group.gather_bytes(own, 0)?,
        _ if group.rank() == 0 => group.gather_bytes(&[], 0)?,
        _ => group.gather_bytes(&rank_to_bytes(&own_state(session)?)?, 0)?,
    };
    all.iter().skip(1).map(|bytes| rank_from_bytes(bytes)).collect()
}

/// Writes the checkpoint that a callback has requested; rank 0 then removes those it replaces. `ranks` has the own states of the other
/// ranks. Does nothing on a rank that has nothing to write.
///
/// # Collective
/// If ranks save their own shards.
pub(crate) fn write<M: LightningModule>(
    session: &mut Session<M>,
    request: &CheckpointRequest,
    ranks: &mut Vec<RankState>,
) -> Result<()> {
    let is_global_zero = session.run.world().is_global_zero();
    if !is_global_zero && (request.link_to.is_some() || !saves_shards(session.run)) {
        return Ok(());
    }
    match &request.link_to {
        Some(target) => session.run.checkpoint_io.link_checkpoint(target, &request.path)?,
        None => {
            let _action = session.profile(actions::SAVE_CHECKPOINT)?;
            write_state(session, &request.path, (request.weights_only, None), ranks)?;
            if is_global_zero && !request.weights_only {
                session.run.note_checkpoint(&request.path)?;
            }
        }
    }
    if is_global_zero { remove_replaced(session.run, request) } else { Ok(()) }
}

/// Writes the state of the run as it is now, or of its snapshot; of weights alone with `weights_only`.
///
/// # Collective
/// If ranks save their own shards.
fn write_state<M: LightningModule>(
    session: &mut Session<M>,
    path: &Path,
    (weights_only, storage_options): (bool, Option<&Value>),
    ranks: &mut Vec<RankState>,
) -> Result<()> {
    check_mesh(session.run, "device mesh", "saves a checkpoint")?;
    let mut checkpoint = match saves_shards(session.run) {
        true => {
            let own = collect(session, weights_only);
            agreed(session.run.world(), "save", path, own)?
        }
        false if session.run.world().is_global_zero() => collect(session, weights_only)?,
        false => return Ok(()),
    };
    if let Some(training) = &mut checkpoint.training {
        training.ranks = std::mem::take(ranks);
    }
    save(session.run, &checkpoint, path, storage_options)?;
    if let Some(training) = checkpoint.training {
        *ranks = training.ranks; // for the next file of the same moment
    }
    Ok(())
}

/// Removes the checkpoints that one replaces.
fn remove_replaced(run: &mut Run, request: &CheckpointRequest) -> Result<()> {
    let Run { checkpoint_io, resumed_from, .. } = run;
    let is_kept = |old: &&PathBuf| !resumed_from.as_ref().is_some_and(|resumed| is_same_file(resumed, old));
    request.then_remove.iter().filter(is_kept).try_for_each(|old| checkpoint_io.remove_checkpoint(old))
}

/// Writes a checkpoint of which this rank may have shards. Rank 0 writes one of weights alone that are not sharded.
///
/// # Collective
/// All ranks must call it, if it has shards or a training state.
pub(crate) fn save(
    run: &mut Run,
    checkpoint: &Checkpoint,
    path: &Path,
    storage_options: Option<&Value>,
) -> Result<()> {
    let group = run.world().group().filter(|_| saves_shards(run)).cloned();
    match group.filter(|_| !checkpoint.shards.is_empty() || checkpoint.training.is_some()) {
        Some(group) => run.checkpoint_io.save_shards(checkpoint, &group, path, storage_options),
        None if run.world().is_global_zero() => {
            run.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        }
        None => Ok(()),
    }
}

/// Writes the weights and hyper-parameters of a module, of the names that pass the filter, tensor by tensor where they are sharded among
/// ranks.
///
/// # Collective
/// All ranks must call it.
pub(crate) fn save_weights<M: LightningModule>(
    run: &mut Run,
    module: &M,
    path: &Path,
    storage_options: Option<&Value>,
    filter: &dyn Fn(&str) -> bool,
) -> Result<()> {
    let strategy = run.engine.strategy.as_ref();
    let checkpoint = match strategy.keeps(module.as_dyn()) || strategy.world().is_global_zero() {
        true => sharded_weights(strategy, module, &run.at.progress, true),
        false => Ok(Checkpoint::default()),
    };
    let saved = checkpoint
        .and_then(|mut checkpoint| {
            checkpoint.keep(filter);
            if !saves_shards(run) {
                checkpoint.merge_shards()?;
            }
            save(run, &checkpoint, path, storage_options)
        })
        .and_then(|()| run.checkpoint_io.teardown());
    as_on_rank_zero(run.world(), saved, path)
}

/// Whether two paths lead to one file, links included.
fn is_same_file(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// What rank 0 did ends all ranks, if it has failed.
///
/// # Collective
/// All ranks must call it.
pub(crate) fn as_on_rank_zero(world: &World, done: Result<()>, path: &Path) -> Result<()> {
    if world.world_size == 1 || matches!(done, Err(Error::Distributed(_))) {
        return done; // the other ranks may be gone
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
    let of_rank_zero = match (world.of_rank_zero(own.clone()), &own) {
        (Err(_), Err(own)) => Err(own.clone()), // the other ranks are gone
        (received, _) => received?,
    };
    of_rank_zero.and(own).map_err(|problem| failed(problem).into())
}
