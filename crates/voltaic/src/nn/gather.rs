//! Why a weight could not be gathered, where no error can be returned.

use std::cell::RefCell;

use crate::error::Error;

thread_local! {
    static FAILURE: RefCell<Option<Error>> = const { RefCell::new(None) };
}

/// Notes why a weight could not be gathered where no error can be returned; the first one counts.
pub(super) fn note_failure(error: Error) {
    FAILURE.with_borrow_mut(|failure| {
        failure.get_or_insert(error);
    });
}

/// Why a weight could not be gathered on this thread since this was last called. An operator that met it had an undefined
/// tensor in its place, and has failed, or has done without it.
pub fn take_gather_failure() -> Option<Error> {
    FAILURE.with_borrow_mut(Option::take)
}
