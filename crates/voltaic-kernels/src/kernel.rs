//! What a loop is.

use std::ops::Range;

/// A loop with its arguments, to be run by [`run_vectorized`](crate::run_vectorized).
pub trait Kernel {
    /// What it computes besides what it writes.
    type Output;
    /// Runs the loop. To be `#[inline(always)]`, as all that it calls: only what is inlined is compiled for the vectors
    /// of the processor.
    fn run(self) -> Self::Output;
}

/// Parts of a range, `len` long but for the last.
pub fn blocks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |first| first..first.saturating_add(len).min(end))
}
