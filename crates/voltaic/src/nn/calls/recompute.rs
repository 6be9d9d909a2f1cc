//! Code that runs again in backward, since what it has computed was dropped.

use std::cell::Cell;

use crate::error::{ModuleError, Problem, Result};
use crate::ffi;

thread_local! {
    static RECOMPUTATIONS: Cell<usize> = const { Cell::new(0) };
    static FORWARDS: Cell<usize> = const { Cell::new(0) };
}

/// Whether this thread runs code of a checkpointed segment, in its forward pass or again. Both passes must do the same, operator by
/// operator: graphs take no part in them.
pub(crate) fn is_in_segment() -> bool {
    FORWARDS.get() > 0 || is_recomputing()
}

/// The forward pass of a segment, until this is dropped.
pub(crate) struct InSegment(());

impl InSegment {
    pub(crate) fn begin() -> Self {
        FORWARDS.set(FORWARDS.get() + 1);
        Self(())
    }
}

impl Drop for InSegment {
    fn drop(&mut self) {
        FORWARDS.set(FORWARDS.get().saturating_sub(1));
    }
}

/// Whether this thread recomputes a checkpointed segment: the same code has run before, in the forward pass. What a module does
/// beside computing its outputs, such as counting its calls, is to be left out then.
pub fn is_recomputing() -> bool {
    RECOMPUTATIONS.get() > 0
}

/// One more recomputation has begun on this thread, or one has ended.
pub(super) fn count_recomputation(begins: bool) {
    let before = RECOMPUTATIONS.get();
    RECOMPUTATIONS.set(if begins { before + 1 } else { before.saturating_sub(1) });
}

/// Whether an operator may end the recomputation in progress, until this is dropped.
pub(super) struct MayEnd {
    before: bool,
}

impl Drop for MayEnd {
    fn drop(&mut self) {
        ffi::set_recompute_may_end(self.before);
    }
}

/// Before the code of a module. A recomputation that has made all that backward needs ends here, or within the code of one of the
/// crate's layers, where an error of an operator is a value; elsewhere it might be a panic.
///
/// # Errors
/// If the recomputation ends here; it is not shown.
pub(super) fn before_code(is_layer: bool) -> Result<Option<MayEnd>> {
    if !is_recomputing() {
        return Ok(None);
    }
    if ffi::recompute_is_complete() {
        let problem = Problem::new("the recomputation is complete", "let this error through");
        return Err(ModuleError::Hook { problem }.into());
    }
    Ok(Some(MayEnd { before: ffi::set_recompute_may_end(is_layer) }))
}
