//! Operators on numbers alone, in bfloat16: libtorch's convert them more slowly than memory brings them.

use super::Kernel;
use super::element::{Bf16, Element};

/// An operator on one number of each input.
pub trait Pointwise<const N: usize>: Copy + Sync {
    /// Its result.
    fn apply(inputs: [Bf16; N]) -> Bf16;
}

/// `max(x, 0)`; NaN stays.
#[derive(Debug, Clone, Copy)]
pub struct Relu;

impl Pointwise<1> for Relu {
    #[inline(always)]
    fn apply([x]: [Bf16; 1]) -> Bf16 {
        if x.to_f32() <= 0.0 { Bf16(0) } else { x }
    }
}

/// The gradient of [`Relu`], of its own gradient and result.
#[derive(Debug, Clone, Copy)]
pub struct ReluBackward;

impl Pointwise<2> for ReluBackward {
    #[inline(always)]
    fn apply([grad, result]: [Bf16; 2]) -> Bf16 {
        if result.to_f32() <= 0.0 { Bf16(0) } else { grad }
    }
}

/// `a + b`
#[derive(Debug, Clone, Copy)]
pub struct Add;

impl Pointwise<2> for Add {
    #[inline(always)]
    fn apply([a, b]: [Bf16; 2]) -> Bf16 {
        Bf16::from_f32(a.to_f32() + b.to_f32())
    }
}

/// Writes the results for whole slices.
pub struct Map<'a, F, const N: usize> {
    /// The operator.
    pub operator: F,
    /// All as long as the output.
    pub inputs: [&'a [Bf16]; N],
    /// The results.
    pub output: &'a mut [Bf16],
}

impl<F: Pointwise<N>, const N: usize> Kernel for Map<'_, F, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let inputs = self.inputs.map(|input| &input[..self.output.len()]);
        for (i, out) in self.output.iter_mut().enumerate() {
            *out = F::apply(inputs.map(|input| input[i]));
        }
    }
}

/// Writes the results over the first input.
pub struct MapOnto<'a, F, const OTHERS: usize> {
    /// The operator.
    pub operator: F,
    /// The first input, and the results.
    pub output: &'a mut [Bf16],
    /// The other inputs, as long as the first.
    pub others: [&'a [Bf16]; OTHERS],
}

impl<F: Pointwise<1>> Kernel for MapOnto<'_, F, 0> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.output.iter_mut().for_each(|x| *x = F::apply([*x]));
    }
}

impl<F: Pointwise<2>> Kernel for MapOnto<'_, F, 1> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [other] = self.others;
        self.output.iter_mut().zip(other).for_each(|(a, b)| *a = F::apply([*a, *b]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: Bf16 = Bf16(0x7fc0);

    #[test]
    fn relu_keeps_what_is_positive_and_nan() {
        let numbers = [1.5, -1.5, 0.0, -0.0].map(Bf16::from_f32);
        assert_eq!(numbers.map(|x| Relu::apply([x])), [numbers[0], Bf16(0), Bf16(0), Bf16(0)]);
        assert_eq!(Relu::apply([NAN]), NAN);
    }

    #[test]
    fn gradients_pass_where_the_result_is_above_0() {
        let [grad, one, zero] = [-2.0, 1.0, 0.0].map(Bf16::from_f32);
        assert_eq!([one, zero, NAN].map(|result| ReluBackward::apply([grad, result])), [grad, zero, grad]);
    }

    #[test]
    fn sums_are_rounded_once() {
        let [a, b, c] = [256.0, 1.0, 3.0].map(Bf16::from_f32);
        assert_eq!(Add::apply([a, b]).to_f32(), 256.0); // a tie, to even
        assert_eq!(Add::apply([a, c]).to_f32(), 260.0);
    }
}
