//! Numbers of the formats that steps of optimizers take.

use std::ops::Range;

use crate::element::{Bf16, Element, F16};

/// Numbers of a tensor that a step reads.
#[derive(Debug, Clone, Copy)]
pub enum Numbers<'a> {
    /// Of 32 bits.
    Float32(&'a [f32]),
    /// Of 16 bits.
    Bfloat16(&'a [Bf16]),
    /// Of 16 bits.
    Float16(&'a [F16]),
}

/// Numbers of a tensor that a step writes.
#[derive(Debug)]
pub enum NumbersMut<'a> {
    /// Of 32 bits.
    Float32(&'a mut [f32]),
    /// Of 16 bits.
    Bfloat16(&'a mut [Bf16]),
    /// Of 16 bits.
    Float16(&'a mut [F16]),
}

impl Default for NumbersMut<'_> {
    /// None.
    fn default() -> Self {
        Self::Float32(&mut [])
    }
}

/// The same with the numbers of each format.
macro_rules! in_each_format {
    ($floats:expr, $type:ident, $numbers:ident => $call:expr) => {
        match $floats {
            $type::Float32($numbers) => $call,
            $type::Bfloat16($numbers) => $call,
            $type::Float16($numbers) => $call,
        }
    };
}

/// Both parts of numbers, in their format.
macro_rules! split {
    ($floats:expr, $type:ident, $split_at:ident, $at:expr) => {
        match $floats {
            $type::Float32(numbers) => {
                let (first, others) = numbers.$split_at($at.min(numbers.len()));
                ($type::Float32(first), $type::Float32(others))
            }
            $type::Bfloat16(numbers) => {
                let (first, others) = numbers.$split_at($at.min(numbers.len()));
                ($type::Bfloat16(first), $type::Bfloat16(others))
            }
            $type::Float16(numbers) => {
                let (first, others) = numbers.$split_at($at.min(numbers.len()));
                ($type::Float16(first), $type::Float16(others))
            }
        }
    };
}

impl Numbers<'_> {
    pub(crate) fn len(&self) -> usize {
        in_each_format!(self, Numbers, numbers => numbers.len())
    }

    /// The first numbers, and the others; as many as there are.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        split!(self, Numbers, split_at, at)
    }

    /// Some of them in float32, themselves or in `scratch`.
    #[inline(always)]
    pub(crate) fn wide<'a>(&'a self, range: &Range<usize>, scratch: &'a mut [f32]) -> &'a [f32] {
        match self {
            Self::Float32(numbers) => &numbers[range.clone()],
            Self::Bfloat16(numbers) => widen(&numbers[range.clone()], scratch),
            Self::Float16(numbers) => widen(&numbers[range.clone()], scratch),
        }
    }
}

impl<'a> NumbersMut<'a> {
    pub(crate) fn len(&self) -> usize {
        in_each_format!(self, NumbersMut, numbers => numbers.len())
    }

    pub(crate) fn is_bfloat16_or_none(&self) -> bool {
        matches!(self, Self::Bfloat16(_)) || self.len() == 0
    }

    /// None if they have another format.
    pub(crate) fn into_bfloat16(self) -> &'a mut [Bf16] {
        if let Self::Bfloat16(numbers) = self { numbers } else { &mut [] }
    }

    /// How many of them a vector of libtorch's loops has.
    pub(crate) fn in_a_vector(&self) -> usize {
        if matches!(self, Self::Float32(_)) { 8 } else { 16 }
    }

    /// As [`Numbers::split_at`].
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        split!(self, NumbersMut, split_at_mut, at)
    }

    /// Some of them in float32 to be changed: themselves, or in `scratch`, from where [`NumbersMut::round`] brings them back. None if
    /// there are none at all.
    #[inline(always)]
    pub(crate) fn wide<'b>(&'b mut self, range: &Range<usize>, scratch: &'b mut [f32]) -> &'b mut [f32] {
        match self {
            none if none.len() == 0 => &mut [],
            Self::Float32(numbers) => &mut numbers[range.clone()],
            Self::Bfloat16(numbers) => widen(&numbers[range.clone()], scratch),
            Self::Float16(numbers) => widen(&numbers[range.clone()], scratch),
        }
    }

    /// Writes these, rounded to nearest even, if they have 16 bits and there are some.
    #[inline(always)]
    pub(crate) fn round(&mut self, range: &Range<usize>, wide: &[f32]) {
        match self {
            none if none.len() == 0 => {}
            Self::Float32(_) => {}
            Self::Bfloat16(numbers) => narrow(&mut numbers[range.clone()], wide),
            Self::Float16(numbers) => narrow(&mut numbers[range.clone()], wide),
        }
    }
}

#[inline(always)]
fn widen<'a, T: Element>(numbers: &[T], scratch: &'a mut [f32]) -> &'a mut [f32] {
    let wide = &mut scratch[..numbers.len()];
    wide.iter_mut().zip(numbers).for_each(|(wide, number)| *wide = number.to_f32());
    wide
}

#[inline(always)]
fn narrow<T: Element>(numbers: &mut [T], wide: &[f32]) {
    numbers.iter_mut().zip(wide).for_each(|(number, wide)| *number = T::from_f32(*wide));
}
