//! The hooks of one owner, which its handles share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::nn::calls::entry::Entry;
use crate::nn::calls::table::{Entries, Table};

/// What all clones of [`ModuleHooks`](crate::nn::ModuleHooks) share.
#[derive(Default)]
pub(super) struct Registry {
    entries: Mutex<Vec<Arc<Entry>>>,
    /// Changes of the entries so far.
    version: AtomicU64,
    /// Hooks so far, with those that were removed.
    pub(super) count: AtomicU64,
    /// Of the hooks when their modules were last checked for calls, and 1.
    pub(super) checked: AtomicU64,
    /// Of the last tree.
    table: Mutex<Option<Table>>,
}

impl Registry {
    pub(super) fn entries(&self) -> MutexGuard<'_, Vec<Arc<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Option<Table>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The entries have changed.
    pub(super) fn note_change(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Gives the modules of a table the hooks of now. Returns those of before, to be dropped when nothing is borrowed: what a
    /// removed hook owns may do anything then.
    #[must_use]
    pub(super) fn sort(&self, table: &mut Table) -> Vec<Entries> {
        let version = self.version();
        if table.version() == Some(version) {
            return Vec::new();
        }
        table.sort(&self.entries(), version)
    }

    /// Keeps the table for the next time.
    pub(super) fn keep(&self, table: Table) {
        *self.table() = Some(table);
    }
}
