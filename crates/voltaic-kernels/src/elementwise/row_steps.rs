//! Steps of a chain that look at a row as a whole.

use crate::kernel::{dot, fold};
use crate::math::exp;

#[inline(always)]
fn sum(row: &[f32]) -> f32 {
    fold(row, 0.0, |sum, x| sum + x, |a, b| a + b)
}

#[inline(always)]
pub(super) fn mean(a: &[f32], out: &mut [f32]) {
    out.fill(sum(a) / a.len() as f32);
}

/// `1 / sqrt(variance + eps)`, given the mean.
#[inline(always)]
pub(super) fn rstd(a: &[f32], means: &[f32], eps: f32, out: &mut [f32]) {
    let mean = means[0];
    let squares = fold(a, 0.0, |sum, x| (x - mean).mul_add(x - mean, sum), |a, b| a + b);
    out.fill(1.0 / (squares / a.len() as f32 + eps).sqrt());
}

/// The gradient of what is to be normalized, still to be divided by the deviation.
#[inline(always)]
pub(super) fn norm_backward(grad: &[f32], normal: &[f32], out: &mut [f32]) {
    let factor = 1.0 / grad.len() as f32;
    let (mean, slope) = (sum(grad) * factor, dot(grad, normal) * factor);
    for ((out, grad), normal) in out.iter_mut().zip(grad).zip(normal) {
        *out = (-slope).mul_add(*normal, grad - mean);
    }
}

/// The largest number; a NaN may be lost, and is in the sum then.
#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    fold(row, f32::NEG_INFINITY, larger, larger)
}

#[inline(always)]
fn exponentials(a: &[f32], max: f32, out: &mut [f32]) -> f32 {
    for (out, a) in out.iter_mut().zip(a) {
        *out = exp(a - max);
    }
    sum(out)
}

#[inline(always)]
pub(super) fn softmax(a: &[f32], out: &mut [f32]) {
    let sum = exponentials(a, largest(a), out);
    for out in out {
        *out /= sum;
    }
}

#[inline(always)]
pub(super) fn log_softmax(a: &[f32], out: &mut [f32]) {
    let max = largest(a);
    let log = exponentials(a, max, out).ln();
    for (out, a) in out.iter_mut().zip(a) {
        *out = a - max - log;
    }
}

#[inline(always)]
pub(super) fn softmax_backward(grad: &[f32], result: &[f32], out: &mut [f32]) {
    let sum = dot(grad, result);
    for ((out, grad), result) in out.iter_mut().zip(grad).zip(result) {
        *out = (grad - sum) * result;
    }
}

#[inline(always)]
pub(super) fn log_softmax_backward(grad: &[f32], result: &[f32], out: &mut [f32]) {
    let sum = sum(grad);
    for ((out, grad), result) in out.iter_mut().zip(grad).zip(result) {
        *out = (-sum).mul_add(exp(*result), *grad);
    }
}

/// The gradient of a loss that is minus the number of the class, which is the first of `classes`.
#[inline(always)]
pub(super) fn nll_backward(classes: &[f32], grads: &[f32], ignored: f32, out: &mut [f32]) {
    let class = classes[0];
    out.fill(0.0);
    // a negative number would be that of the first class
    if class != ignored
        && class >= 0.0
        && let Some(out) = out.get_mut(class as usize)
    {
        *out = -grads[0];
    }
}
