//! Weights that are in memory only while they are used, and how many there are.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::Tensor;

use crate::distributed::Work;
use crate::error::Result;
use crate::ffi::ReleasableStorage;

/// Weights that are in memory only while they are used.
#[derive(Debug)]
pub(super) struct Coming {
    storage: ReleasableStorage,
    /// Calls of modules and others that use the weights now.
    pub holds: usize,
    /// They were touched by somebody who does not say when he is done: they stay until the next step.
    pub is_stray: bool,
    /// Backward is at a module that uses them.
    pub is_in_backward: bool,
    /// Memory is there for them, to see whether there is some; they are not.
    has_room_only: bool,
    /// Memory is there for them, but they may not be.
    arriving: Option<Arrival>,
    /// Elements of the unit, which are counted where those of all units are.
    len: usize,
    tally: Arc<Tally>,
}

impl Coming {
    /// Those of a flat tensor, which are here.
    pub fn of(flat: &Tensor, len: usize) -> Self {
        Self {
            storage: ReleasableStorage::of(flat),
            holds: 0,
            is_stray: false,
            is_in_backward: false,
            has_room_only: false,
            arriving: None,
            len,
            tally: Arc::default(),
        }
    }

    /// Counts the elements there from now on.
    pub fn count_in(&mut self, tally: &Arc<Tally>) {
        self.tally = tally.clone();
        tally.all.fetch_add(self.len, Ordering::Relaxed);
        if !self.is_released() {
            tally.set_live(self.len, true);
        }
    }

    /// Whether there is no memory for them.
    pub fn is_released(&self) -> bool {
        self.storage.is_released()
    }

    /// Gives them memory, whose contents are not set.
    ///
    /// # Errors
    /// If memory is short.
    pub fn restore(&mut self) -> Result<()> {
        if self.storage.restore()? {
            self.tally.set_live(self.len, true);
        }
        Ok(())
    }

    /// Frees their memory.
    pub fn release(&mut self) -> Result<()> {
        if !self.is_released() {
            self.storage.release()?;
            self.tally.set_live(self.len, false);
        }
        Ok(())
    }

    /// Whether there is memory for them, which they then have until [`Coming::give_room`], without values.
    pub fn try_room(&mut self) -> Result<bool> {
        if !self.is_released() {
            return Ok(true);
        }
        match self.restore() {
            Ok(()) => {
                self.has_room_only = true;
                Ok(true)
            }
            Err(error) if error.is_out_of_memory() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Frees the memory of [`Coming::try_room`].
    pub fn give_room(&mut self) -> Result<()> {
        if std::mem::take(&mut self.has_room_only) { self.release() } else { Ok(()) }
    }

    /// Whether they are on their way.
    pub fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// They are on their way, or have arrived. Returns what was known before.
    pub fn set_arriving(&mut self, arrival: Option<Arrival>) -> Option<Arrival> {
        let before = std::mem::replace(&mut self.arriving, arrival);
        if before.is_some() != self.arriving.is_some() {
            self.tally.set_arriving(self.len, self.arriving.is_some());
        }
        before
    }
}

/// Weights on their way; no work where there is nobody to get them from.
#[derive(Debug)]
pub(super) struct Arrival(pub Option<Work>);

/// Elements of weights that come and go, of all units.
#[derive(Debug, Default)]
pub(super) struct Tally {
    all: AtomicUsize,
    live: AtomicUsize,
    arriving: AtomicUsize,
}

impl Tally {
    /// Memory is there for so many more, or fewer.
    fn set_live(&self, len: usize, is_live: bool) {
        change(&self.live, len, is_live);
    }

    /// So many more, or fewer, are on their way.
    fn set_arriving(&self, len: usize, is_arriving: bool) {
        change(&self.arriving, len, is_arriving);
    }

    /// In memory, or on their way.
    pub fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// On their way.
    pub fn arriving(&self) -> usize {
        self.arriving.load(Ordering::Relaxed)
    }

    /// Whether all have memory.
    pub fn is_full(&self) -> bool {
        self.live() == self.all.load(Ordering::Relaxed)
    }
}

fn change(count: &AtomicUsize, len: usize, grows: bool) {
    let add = |old: usize| Some(if grows { old + len } else { old.saturating_sub(len) });
    let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
}
