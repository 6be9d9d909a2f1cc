//! Writes checkpoints in the background.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use serde_json::Value;

use super::checkpoint::Checkpoint;
use super::io::{CheckpointIo, FileCheckpointIo};
use super::shards::gather::as_on_all;
use super::shards::write::{not_saved, of_rank};
use crate::distributed::{IN_BACKGROUND, ProcessGroup, collective_scope};
use crate::error::{Error, Result};

/// Snapshots kept in memory at a time: the best and the last checkpoint of one moment. A third save waits.
const MAX_SNAPSHOTS: usize = 2;

/// Copies a checkpoint to the host, then writes it with another [`CheckpointIo`] on a thread while training continues.
///
/// Links and removals wait for the checkpoints before them, and are skipped if one of those could not be written, so that the last
/// good checkpoint is kept. An error is returned by the next save, at the latest at the end of the fit. Lightning's
/// `AsyncCheckpointIO`, and `torch.distributed.checkpoint.async_save` for ranks that have shards.
///
/// Of a checkpoint of which ranks have shards, each rank copies its own. The threads of all ranks then save it together, over a process
/// group of their own. An error of one rank is that of all.
pub struct AsyncCheckpointIo {
    inner: Arc<Mutex<Box<dyn CheckpointIo>>>,
    /// The user chose the inner one.
    is_chosen: bool,
    worker: Option<Worker>,
    group: Option<ThreadGroup>,
}

/// The group in which the threads of all ranks save together.
struct ThreadGroup {
    /// Made from this one.
    of: ProcessGroup,
    group: Arc<ProcessGroup>,
}

impl AsyncCheckpointIo {
    /// Around the accelerator's own [`CheckpointIo`].
    pub fn new() -> Self {
        Self {
            inner: Arc::new(Mutex::new(Box::new(FileCheckpointIo))),
            is_chosen: false,
            worker: None,
            group: None,
        }
    }

    /// Around `inner`, which is called on another thread with tensors of the host.
    pub fn around(inner: impl CheckpointIo + 'static) -> Self {
        Self { inner: Arc::new(Mutex::new(Box::new(inner))), is_chosen: true, worker: None, group: None }
    }

    fn worker(&mut self) -> Result<&mut Worker> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => Worker::start(Arc::clone(&self.inner))?,
        };
        Ok(self.worker.insert(worker))
    }

    /// Waits for everything that was begun.
    fn wait(&mut self) -> Result<()> {
        self.worker.as_mut().map_or(Ok(()), |worker| worker.wait_for_saves(0))
    }

    /// The group for the threads of these ranks.
    ///
    /// # Collective
    /// All ranks must call it.
    fn group(&mut self, ranks: &ProcessGroup) -> Result<Arc<ProcessGroup>> {
        let own = match self.group.take().filter(|own| own.of.is_same(ranks)) {
            Some(own) => own,
            None => ThreadGroup { of: ranks.shared(), group: Arc::new(ranks.for_thread()?) },
        };
        Ok(self.group.insert(own).group.clone())
    }
}

impl Default for AsyncCheckpointIo {
    fn default() -> Self {
        Self::new()
    }
}

impl CheckpointIo for AsyncCheckpointIo {
    /// # Sync
    /// Copies all tensors to the host.
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()> {
        let worker = self.worker()?;
        worker.wait_for_saves(MAX_SNAPSHOTS - 1)?;
        let snapshot = Box::new(checkpoint.snapshot()?);
        worker.send(Job::Save(snapshot, path.to_path_buf(), storage_options.cloned()))
    }

    fn reads_shards(&self) -> bool {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).reads_shards()
    }

    /// # Sync
    /// Copies this rank's tensors to the host.
    fn save_shards(
        &mut self,
        checkpoint: &Checkpoint,
        ranks: &ProcessGroup,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()> {
        let begun = self.worker().and_then(|worker| {
            worker.wait_for_saves(MAX_SNAPSHOTS - 1)?;
            Ok(Box::new(checkpoint.snapshot()?))
        });
        let snapshot = as_on_all(begun, ranks, path)?; // or the threads of the others would wait for this rank's
        let group = self.group(ranks)?;
        self.worker()?.send(Job::SaveShards(snapshot, group, path.to_path_buf(), storage_options.cloned()))
    }

    fn load_checkpoint(&mut self, path: &Path) -> Result<Checkpoint> {
        self.wait()?;
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).load_checkpoint(path)
    }

    fn remove_checkpoint(&mut self, path: &Path) -> Result<()> {
        self.worker()?.send(Job::Remove(path.to_path_buf()))
    }

    fn link_checkpoint(&mut self, target: &Path, path: &Path) -> Result<()> {
        self.worker()?.send(Job::Link(target.to_path_buf(), path.to_path_buf()))
    }

    fn teardown(&mut self) -> Result<()> {
        self.wait()?;
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).teardown()
    }

    fn set_inner(&mut self, inner: Box<dyn CheckpointIo>) {
        let mut own = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_chosen {
            own.set_inner(inner);
        } else {
            *own = inner;
        }
    }
}

enum Job {
    Save(Box<Checkpoint>, PathBuf, Option<Value>),
    SaveShards(Box<Checkpoint>, Arc<ProcessGroup>, PathBuf, Option<Value>),
    Remove(PathBuf),
    Link(PathBuf, PathBuf),
}

impl Job {
    fn is_save(&self) -> bool {
        matches!(self, Self::Save(..) | Self::SaveShards(..))
    }

    fn run(self, io: &mut dyn CheckpointIo) -> Result<()> {
        match self {
            Self::Save(checkpoint, path, options) => io.save_checkpoint(&checkpoint, &path, options.as_ref()),
            Self::SaveShards(checkpoint, group, path, options) => {
                let _named = collective_scope(format!("checkpoint {IN_BACKGROUND}"));
                let saved = io.save_shards(&checkpoint, &group, &path, options.as_ref());
                saved.map_err(|error| match error {
                    // these connections are not those of training, where all ranks get the error
                    Error::Distributed(_) => not_saved(&path, of_rank(group.rank(), error)),
                    error => error,
                })
            }
            Self::Remove(path) => io.remove_checkpoint(&path),
            Self::Link(target, path) => io.link_checkpoint(&target, &path),
        }
    }
}

/// The thread that writes, and what it has not answered yet.
struct Worker {
    jobs: Option<Sender<Job>>,
    results: Receiver<Result<()>>,
    /// For each job without an answer, oldest first: whether it holds a snapshot.
    open: std::collections::VecDeque<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start(io: Arc<Mutex<Box<dyn CheckpointIo>>>) -> Result<Self> {
        let (jobs, received) = unbounded::<Job>();
        let (answer, results) = unbounded();
        let write = move || {
            let mut has_failed = false;
            for job in received {
                if job.is_save() {
                    has_failed = false;
                }
                // what follows a failed save would take the old checkpoint away
                let result = if has_failed {
                    Ok(())
                } else {
                    job.run(io.lock().unwrap_or_else(PoisonError::into_inner).as_mut())
                };
                has_failed |= result.is_err();
                if answer.send(result).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("voltaic-checkpoint".to_owned())
            .spawn(write)
            .map_err(|e| Error::io("start a thread for", "checkpoints", e))?;
        Ok(Self { jobs: Some(jobs), results, open: std::collections::VecDeque::new(), thread: Some(thread) })
    }

    fn send(&mut self, job: Job) -> Result<()> {
        let is_save = job.is_save();
        match &self.jobs {
            Some(jobs) if jobs.send(job).is_ok() => {
                self.open.push_back(is_save);
                Ok(())
            }
            _ => Err(died()),
        }
    }

    /// Waits until at most `snapshots` saves are in progress, and with 0 until all requests are done. Returns the first failure.
    fn wait_for_saves(&mut self, snapshots: usize) -> Result<()> {
        let mut first_failure = None;
        while !self.open.is_empty() {
            let saves = self.open.iter().filter(|is_save| **is_save).count();
            let must_wait = saves > snapshots || snapshots == 0;
            let answer = match self.results.try_recv() {
                Err(crossbeam_channel::TryRecvError::Empty) if !must_wait => break,
                Ok(answer) => answer,
                // the writer is at work on files, or waits for other ranks, no longer than their time-out
                Err(_) => self.results.recv().map_err(|_| died())?,
            };
            self.open.pop_front();
            first_failure = first_failure.or(answer.err());
        }
        first_failure.map_or(Ok(()), Err)
    }
}

fn died() -> Error {
    let source = std::io::Error::other("the thread that writes them panicked");
    Error::io("write", "checkpoints", source)
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.take()); // the thread ends when it has done what is open
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("{}", died());
        }
        for failure in self.results.try_iter().filter_map(Result::err) {
            tracing::error!("a checkpoint could not be written: {failure}");
        }
    }
}
