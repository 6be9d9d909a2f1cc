//! The loops of attention between its products.

use std::ops::Range;

use crate::attention::head::{AttentionHead, GradHead};
use crate::attention::rows::Rows;
use crate::element::Element;
use crate::kernel::{Kernel, LANES, dot, fold, join_lanes};
use crate::math::exp;

/// Numbers from the start of a row that are worked on to have the first `visible`: compilers are slow at what is left
/// over.
#[inline(always)]
fn whole_lanes(row: &[f32], visible: usize) -> usize {
    visible.next_multiple_of(LANES).min(row.len())
}

/// The products of a query with the first keys, as many as there are scores.
pub(crate) struct Scores<'a, Q, T> {
    pub query: &'a [Q],
    pub key: Rows<'a, T>,
    pub scores: &'a mut [f32],
}

impl<Q: Element, T: Element> Kernel for Scores<'_, Q, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, score) in self.scores.iter_mut().enumerate() {
            let mut lanes = [0.0; LANES];
            let (query, key) = (self.query.chunks_exact(LANES), self.key.row(i).chunks_exact(LANES));
            let rest = query.remainder().iter().zip(key.remainder());
            let rest: f32 = rest.map(|(a, b)| a.to_f32() * b.to_f32()).sum();
            for (query, key) in query.zip(key) {
                for (lane, (a, b)) in lanes.iter_mut().zip(query.iter().zip(key)) {
                    *lane = a.to_f32().mul_add(b.to_f32(), *lane);
                }
            }
            *score = join_lanes(lanes, |a, b| a + b) + rest;
        }
    }
}

/// Adds the sum of the first values by their weights.
pub(crate) struct WeightedSum<'a, T> {
    pub weights: &'a [f32],
    pub value: Rows<'a, T>,
    pub out: &'a mut [f32],
}

impl<T: Element> Kernel for WeightedSum<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // four rows at a time, in the order of one after the other
        let (fours, rest) = self.weights.as_chunks::<4>();
        for (i, [a, b, c, d]) in fours.iter().enumerate() {
            let row = |more| self.value.row(4 * i + more);
            let rows = row(0).iter().zip(row(1)).zip(row(2).iter().zip(row(3)));
            for (sum, ((in_a, in_b), (in_c, in_d))) in self.out.iter_mut().zip(rows) {
                let two = in_b.to_f32().mul_add(*b, in_a.to_f32().mul_add(*a, *sum));
                *sum = in_d.to_f32().mul_add(*d, in_c.to_f32().mul_add(*c, two));
            }
        }
        for (i, weight) in rest.iter().enumerate() {
            for (sum, value) in self.out.iter_mut().zip(self.value.row(4 * fours.len() + i)) {
                *sum = value.to_f32().mul_add(*weight, *sum);
            }
        }
    }
}

/// Turns the scores of a block into weights that are still to be divided by their sums.
pub(crate) struct Softmax<'a, 'h, T, C> {
    pub head: &'a AttentionHead<'h, T>,
    pub block: Range<usize>,
    /// By query, of all keys that the block sees.
    pub scores: &'a mut [f32],
    pub weights: &'a mut [C],
    /// By query, the largest score and what the weights are to be divided by.
    pub sums: &'a mut [(f32, f32)],
}

impl<T: Element, C: Element> Kernel for Softmax<'_, '_, T, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let keys = self.scores.len() / self.block.len();
        let rows = self.scores.chunks_exact_mut(keys).zip(self.weights.chunks_exact_mut(keys));
        for ((i, (scores, weights)), sum) in self.block.zip(rows).zip(self.sums) {
            *sum = softmax(scores, weights, self.head.visible(i + 1), self.head.scale);
        }
    }
}

/// [`Softmax`] of the first scores of one query. Gives what the weights are to be divided by.
pub(crate) struct OneRow<'a> {
    pub scores: &'a mut [f32],
    pub weights: &'a mut [f32],
    pub visible: usize,
    pub scale: f32,
}

impl Kernel for OneRow<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        softmax(self.scores, self.weights, self.visible, self.scale).1
    }
}

/// Turns scores into weights that are still to be divided by their sum; those from `visible` on are 0. Returns the
/// largest score and the sum; 0 and 1 if all scores are -infinity.
#[inline(always)]
fn softmax<C: Element>(scores: &mut [f32], weights: &mut [C], visible: usize, scale: f32) -> (f32, f32) {
    let end = whole_lanes(scores, visible);
    // a NaN may be lost here: its own weight is NaN, and so is the sum
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let max = fold(&scores[..visible], f32::NEG_INFINITY, |max, x| larger(max, x * scale), larger);
    // where no key counts all weights are 0, as in libtorch
    let max = if max == f32::NEG_INFINITY { 0.0 } else { max };
    for (x, weight) in scores[..end].iter_mut().zip(&mut weights[..end]) {
        *x = exp(x.mul_add(scale, -max));
        *weight = C::from_f32(*x);
    }
    scores[visible..end].fill(0.0);
    weights[visible..].fill(C::default());
    let sum = fold(&scores[..end], 0.0, |sum, x| sum + x, |a, b| a + b);
    (max, if sum == 0.0 { 1.0 } else { sum })
}

/// Divides rows by the sums of their weights.
pub(crate) struct DivideRows<'a> {
    pub rows: &'a mut [f32],
    pub dim: usize,
    /// As [`Softmax`] gives them.
    pub sums: &'a [(f32, f32)],
}

impl Kernel for DivideRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (row, (_, sum)) in self.rows.chunks_exact_mut(self.dim).zip(self.sums) {
            let factor = 1.0 / sum;
            row.iter_mut().for_each(|number| *number *= factor);
        }
    }
}

/// Sums that gradients of scores need: by query of a block, its output times the gradient of that.
pub(crate) struct Deltas<'a, 'g, T> {
    pub grad: &'a GradHead<'g, T>,
    pub block: Range<usize>,
    pub deltas: &'a mut [f32],
}

impl<T: Element> Kernel for Deltas<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, delta) in self.block.zip(self.deltas) {
            *delta = dot(self.grad.out.row(i), self.grad.grad_out.row(i));
        }
    }
}

/// Turns the scores of a block of queries and some keys into weights, and gradients of the weights into those of the
/// scores.
pub(crate) struct SoftmaxBackward<'a, 'h, 'g, T, C> {
    pub head: &'a AttentionHead<'h, T>,
    pub grad: &'a GradHead<'g, T>,
    pub block: Range<usize>,
    pub keys: Range<usize>,
    pub scores: &'a [f32],
    pub grad_weights: &'a [f32],
    pub weights: &'a mut [C],
    pub grad_scores: &'a mut [C],
    pub deltas: &'a [f32],
}

impl<T: Element, C: Element> Kernel for SoftmaxBackward<'_, '_, '_, T, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let keys = self.keys.len();
        let inputs = self.scores.chunks_exact(keys).zip(self.grad_weights.chunks_exact(keys));
        let outputs = self.weights.chunks_exact_mut(keys).zip(self.grad_scores.chunks_exact_mut(keys));
        for (((i, inputs), outputs), delta) in self.block.zip(inputs).zip(outputs).zip(self.deltas) {
            let visible = self.head.visible(i + 1).saturating_sub(self.keys.start).min(keys);
            let log_sum_exp = self.grad.log_sum_exp.row(i)[0];
            softmax_backward(inputs, outputs, visible, self.head.scale, log_sum_exp, *delta);
        }
    }
}

#[inline(always)]
fn softmax_backward<C: Element>(
    (scores, grad_weights): (&[f32], &[f32]),
    (weights, grad_scores): (&mut [C], &mut [C]),
    visible: usize,
    scale: f32,
    log_sum_exp: f32,
    delta: f32,
) {
    let end = whole_lanes(scores, visible);
    let inputs = scores[..end].iter().zip(&grad_weights[..end]);
    let outputs = weights[..end].iter_mut().zip(&mut grad_scores[..end]);
    for ((score, grad_weight), (weight, grad_score)) in inputs.zip(outputs) {
        let w = exp(score.mul_add(scale, -log_sum_exp));
        *weight = C::from_f32(w);
        *grad_score = C::from_f32(w * (grad_weight - delta) * scale);
    }
    weights[visible..].fill(C::default());
    grad_scores[visible..].fill(C::default());
}
