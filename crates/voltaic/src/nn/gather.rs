//! Why a weight could not be gathered, where no error can be returned.

use std::cell::{Cell, RefCell};

use crate::error::Error;

thread_local! {
    static FAILURE: RefCell<Option<Error>> = const { RefCell::new(None) };
    /// Whether somebody waits for failures.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Notes why a weight could not be gathered where no error can be returned; the first one counts. Where nobody waits for it the log
/// has it at once.
pub(super) fn note_failure(error: Error) {
    if !WATCHED.get() {
        tracing::error!("{error}; an undefined tensor stands for it");
    }
    FAILURE.with_borrow_mut(|failure| {
        failure.get_or_insert(error);
    });
}

/// Why a weight could not be gathered on this thread since this was last called. An operator that met it had an undefined
/// tensor in its place, and has failed, or has done without it.
pub fn take_gather_failure() -> Option<Error> {
    FAILURE.with_borrow_mut(Option::take)
}

/// Waits for a weight that cannot be gathered on this thread, until it is dropped. What failed before belongs to others.
pub(crate) struct GatherWatch {
    failure_before: Option<Error>,
    was_watched: bool,
}

impl GatherWatch {
    pub(crate) fn begin() -> Self {
        Self { failure_before: take_gather_failure(), was_watched: WATCHED.replace(true) }
    }

    /// What could not be gathered.
    pub(crate) fn end(self) -> Option<Error> {
        take_gather_failure()
    }
}

impl Drop for GatherWatch {
    fn drop(&mut self) {
        FAILURE.set(self.failure_before.take());
        WATCHED.set(self.was_watched);
    }
}
