//! The GELU of Hendrycks and Gimpel (arXiv 1606.08415), by the error function or by tanh, as `torch.nn.functional.gelu`.

use crate::element::Element;
use crate::kernel::Kernel;
use crate::math::{normal_tail, sigmoid};

/// `sqrt(2 / pi)`, doubled: tanh(u) is 2 sigmoid(2 u) - 1.
const SLOPE: f32 = 2.0 * 0.797_884_6;
/// Of the cube.
const CUBIC: f32 = 0.044_715 * SLOPE;

/// `x` times the normal distribution at `x`, or its approximation by tanh.
pub struct Gelu<'a, T> {
    /// `x`
    pub input: &'a [T],
    /// As long as the input.
    pub output: &'a mut [T],
    /// Whether tanh is to approximate it.
    pub is_tanh: bool,
}

impl<T: Element> Kernel for Gelu<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.is_tanh {
            self.apply(|x| x * sigmoid(CUBIC.mul_add(x * x, SLOPE) * x).0);
        } else {
            self.apply(|x| {
                let a = x.abs();
                let (tail, _) = normal_tail(a);
                // -infinity times nothing is not a number, as in libtorch; infinity stays
                let end = if a > f32::MAX { f32::MAX } else { a };
                let (a, ramp) = if x < 0.0 { (a, -0.0) } else { (end, x) };
                (-tail).mul_add(a, ramp)
            });
        }
    }
}

impl<T: Element> Gelu<'_, T> {
    #[inline(always)]
    fn apply(self, f: impl Fn(f32) -> f32) {
        for (x, y) in self.input.iter().zip(self.output) {
            *y = T::from_f32(f(x.to_f32()));
        }
    }
}

/// `grad` times the derivative of [`Gelu`] at `input`.
pub struct GeluBackward<'a, T> {
    /// Gradient of the output.
    pub grad: &'a [T],
    /// As in the forward pass.
    pub input: &'a [T],
    /// Gradient of the input.
    pub output: &'a mut [T],
    /// As in the forward pass.
    pub is_tanh: bool,
}

impl<T: Element> Kernel for GeluBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.is_tanh {
            self.apply(|x| {
                let (s, rest) = sigmoid(CUBIC.mul_add(x * x, SLOPE) * x);
                let inner = (3.0 * CUBIC).mul_add(x * x, SLOPE);
                (x * s * rest).mul_add(inner, s)
            });
        } else {
            self.apply(|x| {
                let a = x.abs();
                let (tail, density) = normal_tail(a);
                let below = (-a).mul_add(density, tail);
                if x < 0.0 { below } else { 1.0 - below }
            });
        }
    }
}

impl<T: Element> GeluBackward<'_, T> {
    #[inline(always)]
    fn apply(self, derivative: impl Fn(f32) -> f32) {
        for ((g, x), y) in self.grad.iter().zip(self.input).zip(self.output) {
            *y = T::from_f32(g.to_f32() * derivative(x.to_f32()));
        }
    }
}
