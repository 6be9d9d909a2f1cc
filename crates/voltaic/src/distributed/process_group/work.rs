//! Operations in progress.

use std::fmt;
use std::sync::Arc;

use super::shared::{Call, Shared};
use crate::distributed::flight::record;
use crate::error::Result;
use crate::ffi::{self, Summing};

/// An operation in progress, as `torch.distributed.Work`. Its tensors must be left alone until [`Work::wait`] returns.
///
/// Any number may be in progress, of one group and of several. They may be waited for in any order, as long as all ranks
/// have started them in the same order. Dropping one also waits, at most as long as the group's time-out, and discards an
/// error.
#[must_use = "an operation is done when it has been waited for"]
pub struct Work<T = ()> {
    underway: Underway,
    call: Call,
    group: Arc<Shared>,
    finish: Box<dyn FnOnce() -> Result<T> + Send>,
    /// Dropped after `underway`, which waits.
    noted: Noted,
}

/// Notes the end of an operation: with the state given to [`Noted::end`], or as done when dropped.
#[derive(Debug)]
struct Noted(u64);

impl Noted {
    fn end(self, state: record::State) {
        record::end(self.0, state);
        std::mem::forget(self);
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        record::end(self.0, record::State::Done);
    }
}

/// By the back end, or by memory that ranks share.
#[derive(Debug)]
pub(super) enum Underway {
    Work(ffi::Work),
    Summing(Summing),
}

impl Work<()> {
    pub(super) fn new(underway: Underway, call: Call, group: Arc<Shared>) -> Self {
        let noted = Noted(call.number);
        Self { underway, call, group, finish: Box::new(|| Ok(())), noted } // allocates nothing
    }

    /// The same operation with what it gives.
    pub(super) fn then<T>(self, finish: impl FnOnce() -> Result<T> + Send + 'static) -> Work<T> {
        let Self { underway, call, group, noted, .. } = self;
        Work { underway, call, group, finish: Box::new(finish), noted }
    }
}

impl<T> Work<T> {
    /// Waits until the operation is done, at most as long as the group's time-out, and returns what it gives.
    ///
    /// # Errors
    /// [`DistributedError::Collective`](crate::error::DistributedError::Collective), which names the operation and the
    /// ranks that did not take part.
    pub fn wait(self) -> Result<T> {
        let Self { underway, call, group, finish, noted } = self;
        let done = match underway {
            Underway::Work(work) => {
                Summing::finish_before(call.ticket);
                work.wait()
            }
            Underway::Summing(summing) => summing.wait(),
        };
        noted.end(if done.is_ok() { record::State::Done } else { record::State::Failed });
        done.map_err(|error| group.failure(call, &error))?;
        finish()
    }
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("call", &self.call).finish_non_exhaustive()
    }
}
