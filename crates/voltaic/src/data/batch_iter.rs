//! The running end of a loader: worker threads and in-order delivery.
//!
//! Worker `w` of `n` loads batches `w`, `w + n`, `w + 2n`, ... of the range into a bounded channel of its own, and the
//! iterator takes from the channels in turn. So batches arrive in order without a reorder buffer, memory is bounded
//! by `num_workers * (prefetch + 1)` batches, and a worker that is gone shows as a closed channel, never as a wait
//! without end. Workers use one intra-op thread each, so that they do not compete with the training step's.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::batch::Batch;
use super::dataset::Dataset;
use crate::error::{DataError, Problem};
use crate::{Result, ffi};

/// All that is needed to load any batch of one epoch.
pub(super) struct EpochPlan<B: Batch> {
    /// For errors.
    pub loader: String,
    pub dataset: Arc<dyn Dataset<Batch = B>>,
    pub indices: Vec<usize>,
    pub batch_size: usize,
    pub seed: u64,
    pub epoch: u64,
    /// The epoch whose random numbers are used.
    pub drawn_epoch: u64,
    pub rank: usize,
}

impl<B: Batch> EpochPlan<B> {
    fn indices_of(&self, batch_idx: usize) -> &[usize] {
        let end = self.indices.len();
        let first = (batch_idx * self.batch_size).min(end);
        &self.indices[first..(first + self.batch_size).min(end)]
    }

    fn load(&self, batch_idx: usize) -> Result<B> {
        let indices = self.indices_of(batch_idx);
        let mut rng = batch_rng(self.seed, self.drawn_epoch, batch_idx, self.rank);
        let loaded = catch_unwind(AssertUnwindSafe(|| self.dataset.batch(indices, &mut rng)));
        let loaded = loaded.unwrap_or_else(|panic| Err(anyhow::anyhow!("panicked: {}", panic_text(&*panic))));
        let failed = |source| {
            let (loader, epoch) = (self.loader.clone(), self.epoch);
            DataError::Batch { loader, epoch, batch_idx, indices: shortened(indices), source }.into()
        };
        loaded.map_err(failed)
    }
}

/// The generator of one batch's random transforms. A new major version of rand may give other numbers.
fn batch_rng(seed: u64, epoch: u64, batch_idx: usize, rank: usize) -> StdRng {
    let mut bytes = [0; 32];
    for (place, part) in bytes.chunks_exact_mut(8).zip([seed, epoch, batch_idx as u64, rank as u64]) {
        place.copy_from_slice(&part.to_le_bytes());
    }
    StdRng::from_seed(bytes)
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        return (*text).to_owned();
    }
    panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "with a value that is not text".to_owned())
}

fn shortened(indices: &[usize]) -> String {
    const MAX_SHOWN: usize = 16;
    if indices.len() <= MAX_SHOWN {
        return format!("{indices:?}");
    }
    let shown: Vec<String> = indices[..MAX_SHOWN].iter().map(usize::to_string).collect();
    format!("[{}, ... {} in all]", shown.join(", "), indices.len())
}

struct Worker<B> {
    batches: Option<Receiver<Result<B>>>,
    thread: Option<JoinHandle<()>>,
}

/// Batches of one epoch in order. After an error it ends.
///
/// Dropping it stops the workers: each finishes at most the batch it is loading, which the drop waits for, so that no
/// thread is inside libtorch when the process ends.
pub struct BatchIter<B: Batch> {
    plan: Arc<EpochPlan<B>>,
    first: usize,
    next: usize,
    end: usize,
    workers: Vec<Worker<B>>,
    stop: Arc<AtomicBool>,
}

impl<B: Batch> BatchIter<B> {
    /// Starts as many workers as there are batches for, at most `num_workers`.
    pub(super) fn start(
        plan: EpochPlan<B>,
        first: usize,
        end: usize,
        num_workers: usize,
        prefetch: usize,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let num_workers = num_workers.min(end - first);
        let mut iter = Self { plan: Arc::new(plan), first, next: first, end, workers: Vec::new(), stop };
        for worker in 0..num_workers {
            let (sender, receiver) = bounded(prefetch);
            let (plan, stop) = (iter.plan.clone(), iter.stop.clone());
            let batches = (first + worker..end).step_by(num_workers);
            let thread = Builder::new()
                .name(format!("loader-{worker}"))
                .spawn(move || work(&plan, batches, &sender, &stop))
                .map_err(|error| DataError::Worker {
                    worker,
                    problem: Problem::new(
                        format!("its thread could not be started: {error}"),
                        "use fewer num_workers, or raise the limit on threads",
                    ),
                })?;
            iter.workers.push(Worker { batches: Some(receiver), thread: Some(thread) });
        }
        Ok(iter)
    }

    /// Place in the epoch of the batch that `next` will give.
    pub fn next_batch_idx(&self) -> usize {
        self.next
    }

    /// Samples of the data set that a batch of the epoch is made of; empty if there is no such batch.
    pub fn batch_indices(&self, batch_idx: usize) -> &[usize] {
        self.plan.indices_of(batch_idx)
    }

    fn receive(&self, batch_idx: usize) -> Result<B> {
        if self.workers.is_empty() {
            return self.plan.load(batch_idx);
        }
        let worker = (batch_idx - self.first) % self.workers.len();
        let received = self.workers[worker].batches.as_ref().and_then(|batches| batches.recv().ok());
        received.unwrap_or_else(|| {
            Err(DataError::Worker {
                worker,
                problem: Problem::new(
                    format!("it ended before it delivered batch {batch_idx}"),
                    "set num_workers=0 to see what ends it",
                ),
            }
            .into())
        })
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for worker in &mut self.workers {
            worker.batches = None;
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // a worker catches the panics of the dataset's code, and its result goes through the channel
                let _ = thread.join();
            }
        }
    }
}

fn work<B: Batch>(
    plan: &EpochPlan<B>,
    batches: impl Iterator<Item = usize>,
    sender: &Sender<Result<B>>,
    stop: &AtomicBool,
) {
    ffi::set_thread_num_threads(1);
    for batch_idx in batches {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let batch = plan.load(batch_idx);
        let failed = batch.is_err();
        if sender.send(batch).is_err() || failed {
            return;
        }
    }
}

impl<B: Batch> Iterator for BatchIter<B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        if self.next == self.end {
            return None;
        }
        let batch = self.receive(self.next);
        if batch.is_ok() {
            self.next += 1;
        } else {
            self.end = self.next;
        }
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.end - self.next))
    }
}

impl<B: Batch> Drop for BatchIter<B> {
    fn drop(&mut self) {
        self.stop();
    }
}
