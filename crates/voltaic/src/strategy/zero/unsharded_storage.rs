//! Storage of weights that are unsharded only while they are used, and how many elements are.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::Tensor;

use crate::distributed::Work;
use crate::error::Result;
use crate::ffi::ReleasableStorage;

/// The storage of a unit's unsharded weights, which has memory only while they are used.
#[derive(Debug)]
pub(super) struct UnshardedStorage {
    storage: ReleasableStorage,
    /// Uses of the weights in progress, such as calls of modules.
    pub uses: usize,
    /// They were accessed outside of a module's call, whose end would free them: they are kept until the next step.
    pub is_kept_until_step_end: bool,
    /// The backward pass has reached a module that uses them.
    pub is_in_backward: bool,
    /// Memory was allocated only to see whether there is enough; it has no values.
    is_only_reserved: bool,
    /// The gather in progress: there is memory, but the values may not have arrived.
    arriving: Option<Arrival>,
    /// Elements of the unit, which are added to the counts of all units.
    len: usize,
    tally: Arc<Tally>,
}

impl UnshardedStorage {
    /// The storage of a flat tensor, whose values are in memory.
    pub fn of(flat: &Tensor, len: usize) -> Self {
        Self {
            storage: ReleasableStorage::of(flat),
            uses: 0,
            is_kept_until_step_end: false,
            is_in_backward: false,
            is_only_reserved: false,
            arriving: None,
            len,
            tally: Arc::default(),
        }
    }

    /// Adds the elements to the counts of all units, from now on.
    pub fn count_in(&mut self, tally: &Arc<Tally>) {
        self.tally = tally.clone();
        tally.all.fetch_add(self.len, Ordering::Relaxed);
        if !self.is_released() {
            tally.set_live(self.len, true);
        }
    }

    /// Whether the memory is freed.
    pub fn is_released(&self) -> bool {
        self.storage.is_released()
    }

    /// Allocates the memory; its contents are not set.
    ///
    /// # Errors
    /// If memory is short.
    pub fn restore(&mut self) -> Result<()> {
        if self.storage.restore()? {
            self.tally.set_live(self.len, true);
        }
        Ok(())
    }

    /// Frees the memory.
    pub fn release(&mut self) -> Result<()> {
        if !self.is_released() {
            self.storage.release()?;
            self.tally.set_live(self.len, false);
        }
        Ok(())
    }

    /// Tries to allocate the memory, without values, until [`UnshardedStorage::release_reserved`]. Returns false if there is not enough.
    pub fn try_reserve(&mut self) -> Result<bool> {
        if !self.is_released() {
            return Ok(true);
        }
        match self.restore() {
            Ok(()) => {
                self.is_only_reserved = true;
                Ok(true)
            }
            Err(error) if error.is_out_of_memory() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Frees the memory of [`UnshardedStorage::try_reserve`].
    pub fn release_reserved(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_only_reserved) { self.release() } else { Ok(()) }
    }

    /// Whether a gather is in progress.
    pub fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Sets the gather in progress, or that there is none. Returns the previous one.
    pub fn set_arriving(&mut self, arrival: Option<Arrival>) -> Option<Arrival> {
        let before = std::mem::replace(&mut self.arriving, arrival);
        if before.is_some() != self.arriving.is_some() {
            self.tally.set_arriving(self.len, self.arriving.is_some());
        }
        before
    }
}

/// A gather in progress; without work if there are no other ranks.
#[derive(Debug)]
pub(super) struct Arrival(pub Option<Work>);

/// Counts of elements of all units whose weights are sharded.
#[derive(Debug, Default)]
pub(super) struct Tally {
    all: AtomicUsize,
    live: AtomicUsize,
    arriving: AtomicUsize,
}

impl Tally {
    /// So many elements more, or fewer, have memory.
    fn set_live(&self, len: usize, is_live: bool) {
        change(&self.live, len, is_live);
    }

    /// So many elements more, or fewer, are being gathered.
    fn set_arriving(&self, len: usize, is_arriving: bool) {
        change(&self.arriving, len, is_arriving);
    }

    /// Elements with memory, those being gathered among them.
    pub fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Elements being gathered.
    pub fn arriving(&self) -> usize {
        self.arriving.load(Ordering::Relaxed)
    }

    /// Whether all elements have memory.
    pub fn is_full(&self) -> bool {
        self.live() == self.all.load(Ordering::Relaxed)
    }
}

fn change(count: &AtomicUsize, len: usize, grows: bool) {
    let add = |old: usize| Some(if grows { old + len } else { old.saturating_sub(len) });
    let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
}
