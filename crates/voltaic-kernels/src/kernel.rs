//! What a loop is.

use std::ops::Range;

use crate::element::Element;

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

/// Numbers that a row is worked on at a time.
pub(crate) const LANES: usize = 16;

/// Folds a row lane by lane, so that it needs no order of the compiler's liking.
#[inline(always)]
pub(crate) fn fold(
    row: &[f32],
    start: f32,
    f: impl Fn(f32, f32) -> f32,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; LANES];
    let parts = row.chunks_exact(LANES);
    let rest = parts.remainder();
    for part in parts {
        for (lane, number) in lanes.iter_mut().zip(part) {
            *lane = f(*lane, *number);
        }
    }
    for number in rest {
        lanes[0] = f(lanes[0], *number);
    }
    join_lanes(lanes, join)
}

/// Half of the lanes with the other half, again and again: few additions have to wait for another one.
#[inline(always)]
pub(crate) fn join_lanes(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [LANES / 2, LANES / 4, LANES / 8, LANES / 16] {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

/// The sum of products, lane by lane.
#[inline(always)]
pub(crate) fn dot<T: Element>(a: &[T], b: &[T]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_parts, b_parts) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_parts.remainder().iter().zip(b_parts.remainder());
    for (a, b) in a_parts.zip(b_parts) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = a.to_f32().mul_add(b.to_f32(), *lane);
        }
    }
    for (a, b) in rest {
        lanes[0] = a.to_f32().mul_add(b.to_f32(), lanes[0]);
    }
    join_lanes(lanes, |a, b| a + b)
}
