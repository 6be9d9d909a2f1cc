//! Attention of one head, a block of queries after the other: the scores of a block stay in the cache between the
//! products, and keys that a causal block cannot see cost nothing. The backward pass computes the scores again, as
//! FlashAttention does (Dao et al., arXiv 2205.14135); the scores of a block are kept for all keys, so that softmax is
//! the plain one.

use std::ops::Range;

use super::element::{Bf16, Element};
use super::math::exp;
use super::{Kernel, sized};
use crate::ffi::{
    Bf16Strips, Matrix, MatrixMut, has_mkl_amx, multiply, multiply_bf16, multiply_by_mkl, run_vectorized,
};

/// The most queries of a block.
const MAX_BLOCK: usize = 64;

/// A number that products are made of; their sums are float32.
pub trait Factor: Element {
    /// Queries of a block. Fewer leave out more keys of a causal one, more make better use of what products prepare.
    const BLOCK: usize;

    /// A right factor that is ready for products.
    type Right<'a>: Copy;

    /// Makes a right factor ready, in `strips` if it has to be brought into another order.
    fn prepare<'a>(b: Matrix<'a, Self>, strips: &'a mut Vec<u32>) -> Self::Right<'a>;

    /// `out = a b`, or `out += a b`, with the first rows and columns of `b`, as many as `a` has columns and `out` has.
    fn multiply(out: MatrixMut, a: Matrix<Self>, b: Self::Right<'_>, adds: bool);

    /// `numbers` as factors: themselves, or in `copy`.
    fn from_numbers<'a>(numbers: &'a [f32], copy: &'a mut Vec<Bf16>) -> &'a [Self];
}

impl Factor for f32 {
    const BLOCK: usize = 32;

    type Right<'a> = Matrix<'a>;

    fn prepare<'a>(b: Matrix<'a, Self>, _strips: &'a mut Vec<u32>) -> Matrix<'a> {
        b
    }

    fn multiply(out: MatrixMut, a: Matrix<Self>, b: Matrix, adds: bool) {
        let b = b.part([a.shape()[1], out.shape()[1]]);
        multiply(out, a, b, adds);
    }

    fn from_numbers<'a>(numbers: &'a [f32], _copy: &'a mut Vec<Bf16>) -> &'a [Self] {
        numbers
    }
}

/// A right factor of bfloat16.
#[derive(Debug, Clone, Copy)]
pub enum Bf16Right<'a> {
    /// For the dot products of AVX-512.
    Strips(Bf16Strips<'a>),
    /// For the MKL.
    Matrix(Matrix<'a, Bf16>),
}

/// For processors with AMX, or with [`has_bf16_products`](crate::ffi::has_bf16_products).
impl Factor for Bf16 {
    const BLOCK: usize = 64;

    type Right<'a> = Bf16Right<'a>;

    fn prepare<'a>(b: Matrix<'a, Self>, strips: &'a mut Vec<u32>) -> Bf16Right<'a> {
        if has_mkl_amx() { Bf16Right::Matrix(b) } else { Bf16Right::Strips(Bf16Strips::new(b, strips)) }
    }

    fn multiply(out: MatrixMut, a: Matrix<Self>, b: Bf16Right<'_>, adds: bool) {
        match b {
            Bf16Right::Strips(b) => multiply_bf16(out, a, b, adds),
            Bf16Right::Matrix(b) => {
                let b = b.part([a.shape()[1], out.shape()[1]]);
                multiply_by_mkl(out, a, b, adds);
            }
        }
    }

    fn from_numbers<'a>(numbers: &'a [f32], copy: &'a mut Vec<Bf16>) -> &'a [Self] {
        let copy = sized(copy, numbers.len());
        run_vectorized(Convert { numbers, copy });
        copy
    }
}

/// Factors that rows of a tensor of `T` can be made into.
pub trait FactorOf<T: Element>: Factor {
    /// `rows` as factors: themselves, or in `copy`.
    fn from_rows<'a>(rows: Rows<'a, T>, copy: &'a mut Vec<f32>) -> Rows<'a, Self>;
}

impl<T: Factor> FactorOf<T> for T {
    fn from_rows<'a>(rows: Rows<'a, T>, _copy: &'a mut Vec<f32>) -> Rows<'a, Self> {
        rows
    }
}

impl FactorOf<Bf16> for f32 {
    fn from_rows<'a>(rows: Rows<'a, Bf16>, copy: &'a mut Vec<f32>) -> Rows<'a, Self> {
        copy.resize(rows.data.len().div_ceil(rows.stride) * rows.dim, 0.0);
        for (row, copy) in rows.data.chunks(rows.stride).zip(copy.chunks_exact_mut(rows.dim)) {
            run_vectorized(Convert { numbers: &row[..rows.dim], copy });
        }
        Rows::new(copy, rows.dim, rows.dim)
    }
}

/// Numbers in another format.
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

/// Rows of `dim` numbers at equal distances.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    data: &'a [T],
    stride: usize,
    dim: usize,
}

impl<'a, T: Element> Rows<'a, T> {
    /// Rows that start every `stride` numbers of `data`.
    pub fn new(data: &'a [T], stride: usize, dim: usize) -> Self {
        Self { data, stride, dim }
    }

    #[inline(always)]
    fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.stride..i * self.stride + self.dim]
    }
}

impl<'a, C: Factor> Rows<'a, C> {
    fn matrix(&self, rows: Range<usize>) -> Matrix<'a, C> {
        Matrix::new(&self.data[rows.start * self.stride..], [rows.len(), self.dim], [self.stride, 1])
    }

    fn transposed(&self, rows: Range<usize>) -> Matrix<'a, C> {
        Matrix::new(&self.data[rows.start * self.stride..], [self.dim, rows.len()], [1, self.stride])
    }
}

/// Queries, keys and values of a head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionHead<'a, T> {
    /// `[queries, dim]`
    pub query: Rows<'a, T>,
    /// `[keys, dim]`
    pub key: Rows<'a, T>,
    /// `[keys, dim]`
    pub value: Rows<'a, T>,
    /// Number of queries.
    pub queries: usize,
    /// Number of keys.
    pub keys: usize,
    /// What scores are multiplied with.
    pub scale: f32,
    /// Whether query `i` sees keys `0..=i` only.
    pub is_causal: bool,
}

/// What a thread needs for its work, to be used again.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    grad: Vec<f32>,
    scores: Vec<f32>,
    grad_scores: Vec<f32>,
    weights: Vec<Bf16>,
    weight_grads: Vec<Bf16>,
    /// Of right factors: those of all keys, then those of a block.
    strips: [Vec<u32>; 5],
    block: Vec<f32>,
    grad_key: Vec<f32>,
    grad_value: Vec<f32>,
}

impl<T: Element> AttentionHead<'_, T> {
    /// Keys that some query before `last` sees.
    #[inline(always)]
    fn visible(&self, last: usize) -> usize {
        if self.is_causal { last.min(self.keys) } else { self.keys }
    }

    /// Computes the rows `queries` of the output by products of `C`; `write(i, row, log_sum_exp)` gets them in order.
    pub fn forward<C: FactorOf<T>>(
        &self,
        queries: Range<usize>,
        scratch: &mut AttentionScratch,
        mut write: impl FnMut(usize, &[f32], f32),
    ) {
        let query = C::from_rows(self.query, &mut scratch.query);
        let key = C::from_rows(self.key, &mut scratch.key);
        let value = C::from_rows(self.value, &mut scratch.value);
        let dim = self.query.dim;
        let [key_strips, value_strips, ..] = &mut scratch.strips;
        let all = 0..self.visible(queries.end);
        let turned_keys = C::prepare(key.transposed(all.clone()), key_strips);
        let values = C::prepare(value.matrix(all), value_strips);
        for first in queries.clone().step_by(C::BLOCK) {
            let block = first..(first + C::BLOCK).min(queries.end);
            let keys = self.visible(block.end);
            let scores = sized(&mut scratch.scores, block.len() * keys);
            let out = sized(&mut scratch.block, block.len() * dim);
            C::multiply(
                MatrixMut::dense(scores, [block.len(), keys]),
                query.matrix(block.clone()),
                turned_keys,
                false,
            );
            let mut sums = [(0.0, 0.0); MAX_BLOCK];
            run_vectorized(Softmax { head: self, block: block.clone(), scores, sums: &mut sums });
            C::multiply(
                MatrixMut::dense(out, [block.len(), dim]),
                Matrix::dense(C::from_numbers(scores, &mut scratch.weights), [block.len(), keys]),
                values,
                false,
            );
            for ((i, row), (max, sum)) in block.zip(out.chunks_exact_mut(dim)).zip(sums) {
                let factor = 1.0 / sum;
                row.iter_mut().for_each(|number| *number *= factor);
                write(i, row, max + f32::ln(sum));
            }
        }
    }
}

/// What the backward pass needs besides.
#[derive(Debug, Clone, Copy)]
pub struct GradHead<'a, T> {
    /// Output of the forward pass, `[queries, dim]`.
    pub out: Rows<'a, T>,
    /// Its gradient.
    pub grad_out: Rows<'a, T>,
    /// By query, at equal distances.
    pub log_sum_exp: Rows<'a, f32>,
}

impl<T: Element> AttentionHead<'_, T> {
    /// Computes gradients by products of `C`: `write_query(i, row)` gets those of the queries in order. Returns those of
    /// keys and values, `[keys, dim]`.
    pub fn backward<'s, C: FactorOf<T>>(
        &self,
        grad: &GradHead<'_, T>,
        scratch: &'s mut AttentionScratch,
        mut write_query: impl FnMut(usize, &[f32]),
    ) -> (&'s [f32], &'s [f32]) {
        let query = C::from_rows(self.query, &mut scratch.query);
        let key = C::from_rows(self.key, &mut scratch.key);
        let value = C::from_rows(self.value, &mut scratch.value);
        let grad_out = C::from_rows(grad.grad_out, &mut scratch.grad);
        let dim = self.query.dim;
        let grad_key = sized(&mut scratch.grad_key, self.keys * dim);
        let grad_value = sized(&mut scratch.grad_value, self.keys * dim);
        grad_key.fill(0.0);
        grad_value.fill(0.0);
        let [turned_key_strips, turned_value_strips, key_strips, query_strips, grad_strips] =
            &mut scratch.strips;
        let all = 0..self.visible(self.queries);
        let turned_keys = C::prepare(key.transposed(all.clone()), turned_key_strips);
        let turned_values = C::prepare(value.transposed(all.clone()), turned_value_strips);
        let all_keys = C::prepare(key.matrix(all), key_strips);
        for first in (0..self.queries).step_by(C::BLOCK) {
            let block = first..(first + C::BLOCK).min(self.queries);
            let keys = self.visible(block.end);
            let shape = [block.len(), keys];
            let scores = sized(&mut scratch.scores, block.len() * keys);
            let grad_scores = sized(&mut scratch.grad_scores, block.len() * keys);
            let grad_query = sized(&mut scratch.block, block.len() * dim);
            let block_query = query.matrix(block.clone());
            let block_grad = grad_out.matrix(block.clone());
            C::multiply(MatrixMut::dense(scores, shape), block_query, turned_keys, false);
            C::multiply(MatrixMut::dense(grad_scores, shape), block_grad, turned_values, false);
            run_vectorized(SoftmaxBackward { head: self, grad, block: block.clone(), scores, grad_scores });
            let weights = Matrix::dense(C::from_numbers(scores, &mut scratch.weights), shape);
            let grads = Matrix::dense(C::from_numbers(grad_scores, &mut scratch.weight_grads), shape);
            let seen = keys * dim;
            let shape = [keys, dim];
            let block_grad = C::prepare(block_grad, grad_strips);
            let grad_value = MatrixMut::dense(&mut grad_value[..seen], shape);
            C::multiply(grad_value, weights.transposed(), block_grad, true);
            let block_query = C::prepare(block_query, query_strips);
            let grad_key = MatrixMut::dense(&mut grad_key[..seen], shape);
            C::multiply(grad_key, grads.transposed(), block_query, true);
            C::multiply(MatrixMut::dense(grad_query, [block.len(), dim]), grads, all_keys, false);
            for (i, row) in block.zip(grad_query.chunks_exact(dim)) {
                write_query(i, row);
            }
        }
        (grad_key, grad_value)
    }
}

const LANES: usize = 16;

/// Folds a row lane by lane, so that it needs no order of the compiler's liking.
#[inline(always)]
fn fold(row: &[f32], start: f32, f: impl Fn(f32, f32) -> f32, join: impl Fn(f32, f32) -> f32) -> f32 {
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
    lanes.into_iter().fold(start, join)
}

/// Turns scores into weights that are still to be divided by their sum; those from `visible` on are 0. Returns the
/// largest score and the sum.
#[inline(always)]
fn softmax(row: &mut [f32], visible: usize, scale: f32) -> (f32, f32) {
    let end = whole_lanes(row, visible);
    // a NaN may be lost here: its own weight is NaN, and so is the sum
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let max = fold(&row[..visible], f32::NEG_INFINITY, |max, x| larger(max, x * scale), larger);
    for x in &mut row[..end] {
        *x = exp(x.mul_add(scale, -max));
    }
    row[visible..].fill(0.0);
    (max, fold(&row[..end], 0.0, |sum, x| sum + x, |a, b| a + b))
}

/// Numbers from the start of a row that are worked on to have the first `visible`: compilers are slow at what is left
/// over.
#[inline(always)]
fn whole_lanes(row: &[f32], visible: usize) -> usize {
    visible.next_multiple_of(LANES).min(row.len())
}

/// Turns the scores of a block into weights.
struct Softmax<'a, 'h, T> {
    head: &'a AttentionHead<'h, T>,
    block: Range<usize>,
    scores: &'a mut [f32],
    /// By query, the largest score and what the weights are to be divided by.
    sums: &'a mut [(f32, f32)],
}

impl<T: Element> Kernel for Softmax<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let keys = self.scores.len() / self.block.len();
        for ((i, row), sum) in self.block.zip(self.scores.chunks_exact_mut(keys)).zip(self.sums) {
            *sum = softmax(row, self.head.visible(i + 1), self.head.scale);
        }
    }
}

/// Turns the scores of a block into weights, and gradients of the weights into those of the scores.
struct SoftmaxBackward<'a, 'h, 'g, T> {
    head: &'a AttentionHead<'h, T>,
    grad: &'a GradHead<'g, T>,
    block: Range<usize>,
    scores: &'a mut [f32],
    grad_scores: &'a mut [f32],
}

impl<T: Element> Kernel for SoftmaxBackward<'_, '_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (head, grad) = (self.head, self.grad);
        let keys = self.scores.len() / self.block.len();
        let rows = self.scores.chunks_exact_mut(keys).zip(self.grad_scores.chunks_exact_mut(keys));
        for (i, (weights, grads)) in self.block.zip(rows) {
            let delta = dot(grad.out.row(i), grad.grad_out.row(i));
            let log_sum_exp = grad.log_sum_exp.row(i)[0];
            softmax_backward(weights, grads, head.visible(i + 1), head.scale, log_sum_exp, delta);
        }
    }
}

/// Turns scores into weights, and gradients of the weights into those of the scores.
#[inline(always)]
fn softmax_backward(
    weights: &mut [f32],
    grads: &mut [f32],
    visible: usize,
    scale: f32,
    log_sum_exp: f32,
    delta: f32,
) {
    let end = whole_lanes(weights, visible);
    for (weight, grad) in weights[..end].iter_mut().zip(&mut grads[..end]) {
        *weight = exp(weight.mul_add(scale, -log_sum_exp));
        *grad = *weight * (*grad - delta) * scale;
    }
    weights[visible..].fill(0.0);
    grads[visible..].fill(0.0);
}

#[inline(always)]
fn dot<T: Element>(a: &[T], b: &[T]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = a.to_f32().mul_add(b.to_f32(), *lane);
        }
    }
    lanes.into_iter().sum()
}
