//! Buffers of numbers.

use std::panic::resume_unwind;

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
