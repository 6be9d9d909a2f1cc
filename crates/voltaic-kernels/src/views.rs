//! Numbers of tensors, and memory that threads share.

use std::ffi::c_void;
use std::ops::Range;
use std::slice;

use crate::element::Bf16;
use crate::threads::parallel_for;

/// A number format of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    Float32,
    /// 16 bits.
    Bfloat16,
}

/// Numbers of a tensor, one after the other.
#[derive(Debug, Clone, Copy)]
pub enum Floats<'a> {
    /// Of 32 bits.
    Float32(&'a [f32]),
    /// Of 16 bits.
    Bfloat16(&'a [Bf16]),
}

/// Numbers of a tensor that a kernel writes, whatever they are before.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// Of 32 bits.
    Float32(&'a mut [f32]),
    /// Of 16 bits.
    Bfloat16(&'a mut [Bf16]),
}

impl Floats<'_> {
    /// So many numbers at an address.
    ///
    /// # Safety
    /// They must be there for the lifetime, written by nothing. The address may be null if there are none.
    pub unsafe fn of_address(dtype: Dtype, address: *const c_void, len: usize) -> Self {
        // SAFETY: as this function asks.
        unsafe {
            match dtype {
                Dtype::Float32 => Self::Float32(slice_of(address.cast(), len)),
                Dtype::Bfloat16 => Self::Bfloat16(slice_of(address.cast(), len)),
            }
        }
    }

    /// How many.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Float32(numbers) => numbers.len(),
            Self::Bfloat16(numbers) => numbers.len(),
        }
    }
}

impl FloatsMut<'_> {
    /// So many numbers at an address.
    ///
    /// # Safety
    /// They must be there for the lifetime, used by nothing else, and initialised unless they are only written. The address
    /// may be null if there are none.
    pub unsafe fn of_address(dtype: Dtype, address: *mut c_void, len: usize) -> Self {
        // SAFETY: as this function asks.
        unsafe {
            match dtype {
                Dtype::Float32 => Self::Float32(slice_mut_of(address.cast(), len)),
                Dtype::Bfloat16 => Self::Bfloat16(slice_mut_of(address.cast(), len)),
            }
        }
    }

    /// How many.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Float32(numbers) => numbers.len(),
            Self::Bfloat16(numbers) => numbers.len(),
        }
    }
}

/// Numbers at an address, which may be null if there are none.
///
/// # Safety
/// As for [`Floats::of_address`].
pub unsafe fn slice_of<'a, T>(address: *const T, len: usize) -> &'a [T] {
    // SAFETY: as this function asks.
    if len == 0 { &[] } else { unsafe { slice::from_raw_parts(address, len) } }
}

/// Numbers to write at an address, which may be null if there are none.
///
/// # Safety
/// As for [`FloatsMut::of_address`].
pub unsafe fn slice_mut_of<'a, T>(address: *mut T, len: usize) -> &'a mut [T] {
    // SAFETY: as this function asks.
    if len == 0 { &mut [] } else { unsafe { slice::from_raw_parts_mut(address, len) } }
}

/// Calls a generic function with the slices of tensors of one format: those that it reads, and those that it writes.
macro_rules! in_one_format {
    ([$($floats:ident)*] [$($floats_mut:ident)*] => $call:expr) => {
        match ($($floats,)* $($floats_mut,)*) {
            ($(Floats::Float32($floats),)* $(FloatsMut::Float32($floats_mut),)*) => $call,
            ($(Floats::Bfloat16($floats),)* $(FloatsMut::Bfloat16($floats_mut),)*) => $call,
            _ => unreachable!("tensors of one format"),
        }
    };
}
pub(crate) use in_one_format;

/// An address that threads share; each uses another part of what is there.
pub(crate) struct Shared<T>(pub *mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: whoever makes slices of it says why no two threads write to the same numbers.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<T> {}

impl<T> Shared<T> {
    /// The address of another number.
    pub(crate) fn at(self, offset: isize) -> *mut T {
        self.0.wrapping_offset(offset)
    }

    /// # Safety
    /// The numbers must be there for `'a`, initialised unless they are only written, and used by nothing else.
    pub(crate) unsafe fn slice_mut<'a>(self, range: Range<usize>) -> &'a mut [T] {
        // SAFETY: as this function asks.
        unsafe { slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }

    /// # Safety
    /// The numbers must be there for `'a`, initialised, and written by nothing.
    pub(crate) unsafe fn slice<'a>(self, range: Range<usize>) -> &'a [T] {
        // SAFETY: as this function asks.
        unsafe { slice::from_raw_parts(self.0.add(range.start), range.len()) }
    }
}

/// Calls `body` for parts of `numbers` on the host's threads: with a range of units, of `unit` numbers each, and those.
/// `grain` units or fewer are one part.
pub(crate) fn for_units<T: Send>(
    numbers: &mut [T],
    unit: usize,
    grain: usize,
    body: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let units = numbers.len() / unit;
    let all = Shared(numbers.as_mut_ptr());
    parallel_for(units, grain, |units| {
        // SAFETY: they lie in `numbers`, which are borrowed mutably; parts do not overlap.
        let part = unsafe { all.slice_mut(units.start * unit..units.end * unit) };
        body(units, part);
    });
}

/// As [`for_units`], with as many units of others.
pub(crate) fn for_units_of_both<T: Send, U: Send>(
    (numbers, others): (&mut [T], &mut [U]),
    unit: usize,
    grain: usize,
    body: impl Fn(Range<usize>, &mut [T], &mut [U]) + Sync,
) {
    assert_eq!(numbers.len(), others.len());
    let others = Shared(others.as_mut_ptr());
    for_units(numbers, unit, grain, |units, part| {
        // SAFETY: as above.
        let others = unsafe { others.slice_mut(units.start * unit..units.end * unit) };
        body(units, part, others);
    });
}
