//! Why a weight could not be unsharded, where no error can be returned.

use std::cell::{Cell, RefCell};

use crate::error::Error;

thread_local! {
    static FAILURE: RefCell<Option<Error>> = const { RefCell::new(None) };
    /// Whether a [`UnshardWatch`] exists on this thread.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Notes why a weight could not be unsharded where no error can be returned; the first one counts. Without a [`UnshardWatch`] it is
/// logged at once.
pub(super) fn note_failure(error: Error) {
    if !WATCHED.get() {
        tracing::error!("{error}; an undefined tensor stands for it");
    }
    FAILURE.with_borrow_mut(|failure| {
        failure.get_or_insert(error);
    });
}

/// Why a weight could not be unsharded on this thread since this was last called. Operators got an undefined tensor in its place,
/// and have failed or ignored it.
pub fn take_unshard_failure() -> Option<Error> {
    FAILURE.with_borrow_mut(Option::take)
}

/// Collects failures to unshard weights on this thread, until it is dropped. Earlier failures are put back then.
pub(crate) struct UnshardWatch {
    failure_before: Option<Error>,
    was_watched: bool,
}

impl UnshardWatch {
    pub(crate) fn begin() -> Self {
        Self { failure_before: take_unshard_failure(), was_watched: WATCHED.replace(true) }
    }

    /// Why the first one could not be unsharded.
    pub(crate) fn end(self) -> Option<Error> {
        take_unshard_failure()
    }
}

impl Drop for UnshardWatch {
    fn drop(&mut self) {
        FAILURE.set(self.failure_before.take());
        WATCHED.set(self.was_watched);
    }
}
