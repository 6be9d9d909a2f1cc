//! Weights that are not always there: what a strategy does when one of them is touched.

use std::cell::RefCell;
use std::fmt;

use super::parameter::Parameter;
use crate::error::{Error, Result};

/// Keeps weights elsewhere, such as in parts on several ranks; a strategy implements it.
///
/// A strategy hands it over with [`Parameter::attach`], frees a weight's memory, and says so with
/// [`Parameter::set_away`]. From then on each use of the weight calls [`Gather::gather`].
pub trait Gather: fmt::Debug + Send + Sync {
    /// Makes the weight whole, in the memory of [`Parameter::leaf`], and says so with [`Parameter::set_away`]. It stays until
    /// the strategy takes it away again, mostly at the end of the step.
    ///
    /// # Collective
    /// If weights are divided among ranks: all ranks must touch the same weights in the same order.
    ///
    /// # Errors
    /// Why the weight cannot be had.
    fn gather(&self, parameter: &Parameter) -> Result<()>;

    /// The weight is not needed whole any more by the one who has touched it: [`Parameter::with_whole`] and
    /// [`Parameter::update`] call it. With `is_changed` it was written to, and what it holds now counts.
    ///
    /// # Errors
    /// Why it cannot be kept.
    fn release(&self, parameter: &Parameter, is_changed: bool) -> Result<()>;
}

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
