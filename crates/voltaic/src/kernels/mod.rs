//! Kernels for the CPU that take the place of libtorch's where those leave time on the table: attention over blocks of
//! queries, batch norm and max-pooling with the channels last, GELU, ReLU, sums, random masks, and what is around the
//! products of others. Plain loops over slices, which the compiler turns into vector instructions
//! ([`ffi::run_vectorized`](crate::ffi::run_vectorized)); [`ffi::install_kernels`](crate::ffi::install_kernels) puts them
//! in libtorch's dispatcher.

mod attention;
mod batch_norm;
mod element;
mod elementwise;
mod gelu;
mod held;
mod math;
mod max_pool;
mod mt19937;
mod patches;
mod round;
mod turn;

use std::ops::Range;
use std::panic::resume_unwind;

pub use attention::{AttentionHead, AttentionScratch, Factor, FactorOf, FactorScratch, GradHead, Rows};
pub use batch_norm::{BatchNormBackward, GradSums, Moments, Normalize};
pub use element::{Bf16, Element};
pub use elementwise::{Add, AddUp, AllFinite, Convert, Map, MapOnto, Pointwise, Relu, ReluBackward};
pub use gelu::{Gelu, GeluBackward};
pub use held::Held;
pub(crate) use held::held;
pub use max_pool::{MaxPool2d, MaxPool2dBackward, RowPairs};
pub use mt19937::{Bernoulli, Mt19937};
pub use patches::{Axis, Patches};
pub use round::{Addend, RoundRows};
pub use turn::Turn;

/// A loop with its arguments, to be run by [`ffi::run_vectorized`](crate::ffi::run_vectorized).
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

/// Bytes of a line of the cache, and of the widest vector.
pub const LINE: usize = 64;

/// Numbers that are 0.
///
/// # Panics
/// With [`OutOfMemory`].
pub fn zeros(len: usize) -> Vec<f32> {
    let mut numbers = Vec::new();
    grow(&mut numbers, len);
    numbers
}

/// `Vec::resize` would end the process where there is no memory.
#[cold]
fn grow<T: Copy + Default>(numbers: &mut Vec<T>, len: usize) {
    if numbers.try_reserve_exact(len - numbers.len()).is_err() {
        resume_unwind(Box::new(OutOfMemory { bytes: len.saturating_mul(size_of::<T>()) }));
    }
    numbers.resize(len, T::default());
}

/// What a kernel unwinds with if there is no memory for what it works in: a panic that says nothing by itself.
#[derive(Debug, Clone, Copy)]
pub struct OutOfMemory {
    /// What was asked for.
    pub bytes: usize,
}

/// The first `len` numbers from the start of a line of the cache, whatever they are.
///
/// # Panics
/// With [`OutOfMemory`].
pub fn sized<T: Copy + Default>(numbers: &mut Vec<T>, len: usize) -> &mut [T] {
    let room = len.saturating_add(LINE / size_of::<T>());
    if numbers.len() < room {
        grow(numbers, room);
    }
    let start = numbers.as_ptr().align_offset(LINE);
    &mut numbers[start..start + len]
}
