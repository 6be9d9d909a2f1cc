//! Operators on numbers alone, with bfloat16 among them: libtorch's convert it more slowly than memory brings it.

use crate::element::{Bf16, Element};
use crate::kernel::Kernel;

/// An operator on a number of `T` and, unless `U` is `()`, one of `U`.
pub trait Pointwise<T, U>: Copy + Sync {
    /// Its result.
    fn apply(x: T, other: U) -> T;
}

/// `max(x, 0)`; NaN stays, and so does -0.
#[derive(Debug, Clone, Copy)]
pub struct Relu;

/// The bits of `-0` and `-infinity`, between which those of negative numbers lie.
const NEGATIVE: [u16; 2] = [0x8000, 0xff80];

impl Pointwise<Bf16, ()> for Relu {
    #[inline(always)]
    fn apply(x: Bf16, (): ()) -> Bf16 {
        let [zero, infinity] = NEGATIVE;
        let is_negative = x.0.wrapping_sub(zero + 1) < infinity - zero;
        if is_negative { Bf16(0) } else { one_nan(x) }
    }
}

/// The number, or the one NaN that libtorch, which computes in float32, writes for all.
#[inline(always)]
fn one_nan(x: Bf16) -> Bf16 {
    let is_nan = x.0 & 0x7fff > 0x7f80;
    if is_nan { Bf16::NAN } else { x }
}

/// The gradient of [`Relu`], of its own gradient and result.
#[derive(Debug, Clone, Copy)]
pub struct ReluBackward;

impl Pointwise<Bf16, Bf16> for ReluBackward {
    #[inline(always)]
    fn apply(grad: Bf16, result: Bf16) -> Bf16 {
        if result.to_f32() <= 0.0 { Bf16(0) } else { grad }
    }
}

/// `x + other`
#[derive(Debug, Clone, Copy)]
pub struct Add;

impl<T: Element> Pointwise<T, Bf16> for Add {
    #[inline(always)]
    fn apply(x: T, other: Bf16) -> T {
        T::from_f32(x.to_f32() + other.to_f32())
    }
}

/// Writes the results for whole slices.
pub struct Map<'a, F, T, U> {
    /// The operator.
    pub operator: F,
    /// As long as the output.
    pub input: &'a [T],
    /// As long as the output.
    pub other: &'a [U],
    /// The results.
    pub output: &'a mut [T],
}

impl<T: Copy, U: Copy, F: Pointwise<T, U>> Kernel for Map<'_, F, T, U> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // zipped, since a loop with an index may end early to the compiler, which then leaves a rest to be done one by one
        for ((out, x), other) in self.output.iter_mut().zip(self.input).zip(self.other) {
            *out = F::apply(*x, *other);
        }
    }
}

/// Writes the results over the first input.
pub struct MapOnto<'a, F, T, U> {
    /// The operator.
    pub operator: F,
    /// The first input, and the results.
    pub output: &'a mut [T],
    /// As long.
    pub other: &'a [U],
}

impl<T: Copy, U: Copy, F: Pointwise<T, U>> Kernel for MapOnto<'_, F, T, U> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.output.iter_mut().zip(self.other).for_each(|(x, other)| *x = F::apply(*x, *other));
    }
}

/// Writes numbers in another format.
pub struct Convert<'a, T, U> {
    /// What is converted.
    pub numbers: &'a [T],
    /// As long.
    pub copy: &'a mut [U],
}

impl<T: Element, U: Element> Kernel for Convert<'_, T, U> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (copy, number) in self.copy.iter_mut().zip(self.numbers) {
            *copy = U::from_f32(number.to_f32());
        }
    }
}

/// Whether all numbers are finite.
pub struct AllFinite<'a> {
    /// The numbers.
    pub numbers: &'a [f32],
}

impl Kernel for AllFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let largest = self.numbers.iter().fold(0, |largest, number| number.abs().to_bits().max(largest));
        largest < f32::INFINITY.to_bits()
    }
}

/// Sums of several slices, number by number, in float32 and in their order.
pub struct AddUp<'a, T> {
    /// All as long as the output; at least one.
    pub parts: &'a [&'a [T]],
    /// The sums.
    pub out: &'a mut [T],
}

impl<T: Element> Kernel for AddUp<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        /// Sums that the first cache holds.
        const BLOCK: usize = 1024;
        let Self { parts, out } = self;
        let (first, others) = parts.split_first().expect("at least one");
        let mut sums = [0.0; BLOCK];
        for (out, start) in out.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
            let sums = &mut sums[..out.len()];
            sums.iter_mut().zip(&first[start..]).for_each(|(sum, number)| *sum = number.to_f32());
            for part in others {
                sums.iter_mut().zip(&part[start..]).for_each(|(sum, number)| *sum += number.to_f32());
            }
            out.iter_mut().zip(&*sums).for_each(|(out, sum)| *out = T::from_f32(*sum));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relu_keeps_what_is_positive_and_nan() {
        let numbers = [1.5, -1.5, 0.0, -0.0].map(Bf16::from_f32);
        assert_eq!(numbers.map(|x| Relu::apply(x, ())), [numbers[0], Bf16(0), Bf16(0), Bf16(0x8000)]);
        assert_eq!([0x7fc0, 0x7f81, 0xffc0].map(|nan| Relu::apply(Bf16(nan), ())), [Bf16::NAN; 3]);
    }

    #[test]
    fn bits_tell_what_float32_tells() {
        for bits in 0..=u16::MAX {
            let (x, one) = (Bf16(bits), Bf16::from_f32(1.0));
            let value = x.to_f32();
            let expected = if value < 0.0 { Bf16(0) } else { Bf16::from_f32(value) };
            assert_eq!(Relu::apply(x, ()), expected, "{bits:#x}");
            assert_eq!(ReluBackward::apply(one, x), if value <= 0.0 { Bf16(0) } else { one }, "{bits:#x}");
            assert_eq!(ReluBackward::apply(x, one), x, "{bits:#x}");
        }
    }

    #[test]
    fn gradients_pass_where_the_result_is_above_0() {
        let [grad, one, zero] = [-2.0, 1.0, 0.0].map(Bf16::from_f32);
        assert_eq!(
            [one, zero, Bf16::NAN].map(|result| ReluBackward::apply(grad, result)),
            [grad, zero, grad]
        );
    }

    #[test]
    fn one_number_that_is_not_finite_is_found() {
        let mut numbers = vec![f32::MAX; 100];
        assert!(AllFinite { numbers: &numbers }.run() && AllFinite { numbers: &[] }.run());
        for number in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
            numbers[67] = number;
            assert!(!AllFinite { numbers: &numbers }.run(), "{number}");
        }
    }

    #[test]
    fn sums_are_rounded_once() {
        let [a, b, c] = [256.0, 1.0, 3.0].map(Bf16::from_f32);
        assert_eq!(Add::apply(a, b).to_f32(), 256.0); // a tie, to even
        assert_eq!(Add::apply(a, c).to_f32(), 260.0);
        assert_eq!(Add::apply(256.0f32, b), 257.0);
    }
}
