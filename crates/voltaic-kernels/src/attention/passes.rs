//! Attention of one head, a block of queries after the other: what a block works on stays in the cache between the
//! products, and keys that a causal block cannot see cost nothing. The backward pass computes the scores again, as
//! FlashAttention does (Dao et al., arXiv 2205.14135), and takes some keys of a block at a time; the forward pass keeps the
//! scores of a block for all keys, so that softmax is the plain one.

use std::array;
use std::ops::Range;

use crate::attention::factor::{FactorOf, FactorScratch};
use crate::attention::head::{AttentionHead, GradHead};
use crate::attention::softmax::{Deltas, DivideRows, Scores, Softmax, SoftmaxBackward, WeightedSum};
use crate::element::Element;
use crate::held::held;
use crate::kernel::blocks;
use crate::memory::sized;
use crate::processor::run_vectorized;
use crate::product::matrix::{Matrix, MatrixMut};

/// The most queries of a block.
const MAX_BLOCK: usize = 64;

/// What a thread needs for its work, to be used again.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    /// Of query, key, value and gradient, if they are to be in another format.
    rows: [Vec<f32>; 4],
    scores: Vec<f32>,
    grad_weights: Vec<f32>,
    factors: FactorScratch,
    /// Of right factors: those of all keys, then those of a block.
    strips: [Vec<u32>; 5],
    block: Vec<f32>,
    grad_key: Vec<f32>,
    grad_value: Vec<f32>,
}
held!(AttentionScratch { rows, scores, grad_weights, factors, strips, block, grad_key, grad_value });

impl<T: Element> AttentionHead<'_, T> {
    /// Computes the rows `queries` of the output by products of `C`; `write(first, rows, log_sum_exps)` gets them in order,
    /// many at a time.
    pub fn forward<C: FactorOf<T>>(
        &self,
        queries: Range<usize>,
        scratch: &mut AttentionScratch,
        mut write: impl FnMut(usize, &[f32], &[f32]),
    ) {
        if queries.len() == 1 && self.visible(queries.end) > 0 {
            return self.forward_one(queries.start, scratch, write);
        }
        let unit = C::set_up();
        let [query, key, value, _] = &mut scratch.rows;
        let query = C::from_rows(self.query, query);
        let (key, value) = (C::from_rows(self.key, key), C::from_rows(self.value, value));
        let dim = self.query.dim;
        let [key_strips, value_strips, ..] = &mut scratch.strips;
        let all = 0..self.visible(queries.end);
        let turned_keys = C::prepare(key.transposed(all.clone()), key_strips);
        let values = C::prepare(value.matrix(all), value_strips);
        let [weights, _] = C::buffers(&mut scratch.factors);
        for block in blocks(queries, C::BLOCK) {
            let keys = self.visible(block.end);
            let shape = [block.len(), keys];
            let scores = sized(&mut scratch.scores, block.len() * keys);
            let weights = sized(weights, block.len() * keys);
            let out = sized(&mut scratch.block, block.len() * dim);
            let block_query = query.matrix(block.clone());
            let seen = (turned_keys, [0..dim, 0..keys]);
            C::multiply(&unit, MatrixMut::dense(scores, shape), block_query, seen, false);
            let mut sums = [(0.0, 0.0); MAX_BLOCK];
            run_vectorized(Softmax { head: self, block: block.clone(), scores, weights, sums: &mut sums });
            let seen = (values, [0..keys, 0..dim]);
            let block_weights = Matrix::dense(weights, shape);
            C::multiply(&unit, MatrixMut::dense(out, [block.len(), dim]), block_weights, seen, false);
            run_vectorized(DivideRows { rows: out, dim, sums: &sums });
            let log_sum_exps: [f32; MAX_BLOCK] = array::from_fn(|i| sums[i].0 + f32::ln(sums[i].1));
            write(block.start, out, &log_sum_exps[..block.len()]);
        }
    }

    /// The same of one query, as where a language model computes a token: keys and values are read once, where they lie.
    fn forward_one(
        &self,
        query: usize,
        scratch: &mut AttentionScratch,
        mut write: impl FnMut(usize, &[f32], &[f32]),
    ) {
        let (keys, dim) = (self.visible(query + 1), self.query.dim);
        let (scores, weights) = sized(&mut scratch.scores, 2 * keys).split_at_mut(keys);
        let out = sized(&mut scratch.block, dim);
        let block = query..query + 1;
        let mut sums = [(0.0, 0.0)];
        out.fill(0.0);
        run_vectorized(Scores { query: self.query.row(query), key: self.key, scores });
        run_vectorized(Softmax { head: self, block, scores, weights, sums: &mut sums });
        run_vectorized(WeightedSum { weights, value: self.value, out });
        run_vectorized(DivideRows { rows: out, dim, sums: &sums });
        let [(max, sum)] = sums;
        write(query, out, &[max + f32::ln(sum)]);
    }
}

impl<T: Element> AttentionHead<'_, T> {
    /// Computes gradients by products of `C`: `write_query(first, rows)` gets those of the queries in order, many at a time.
    /// Returns those of keys and values, `[keys, dim]`.
    pub fn backward<'s, C: FactorOf<T>>(
        &self,
        grad: &GradHead<'_, T>,
        scratch: &'s mut AttentionScratch,
        mut write_query: impl FnMut(usize, &[f32]),
    ) -> (&'s [f32], &'s [f32]) {
        let unit = C::set_up();
        let [query, key, value, grad_out] = &mut scratch.rows;
        let (query, grad_out) = (C::from_rows(self.query, query), C::from_rows(grad.grad_out, grad_out));
        let (key, value) = (C::from_rows(self.key, key), C::from_rows(self.value, value));
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
        let [weights, grad_scores] = C::buffers(&mut scratch.factors);
        for block in blocks(0..self.queries, C::BLOCK) {
            let grad_query = sized(&mut scratch.block, block.len() * dim);
            let (block_query, block_grad) = (query.matrix(block.clone()), grad_out.matrix(block.clone()));
            let queries = (C::prepare(block_query, query_strips), [0..block.len(), 0..dim]);
            let grads = (C::prepare(block_grad, grad_strips), [0..block.len(), 0..dim]);
            let mut deltas = [0.0; MAX_BLOCK];
            run_vectorized(Deltas { grad, block: block.clone(), deltas: &mut deltas });
            for keys in blocks(0..self.visible(block.end), C::max_keys()) {
                let (shape, len) = ([block.len(), keys.len()], block.len() * keys.len());
                let scores = sized(&mut scratch.scores, len);
                let grad_weights = sized(&mut scratch.grad_weights, len);
                let (weights, grad_scores) = (sized(weights, len), sized(grad_scores, len));
                let some_keys = (turned_keys, [0..dim, keys.clone()]);
                C::multiply(&unit, MatrixMut::dense(scores, shape), block_query, some_keys, false);
                let some_values = (turned_values, [0..dim, keys.clone()]);
                C::multiply(&unit, MatrixMut::dense(grad_weights, shape), block_grad, some_values, false);
                run_vectorized(SoftmaxBackward {
                    head: self,
                    grad,
                    block: block.clone(),
                    keys: keys.clone(),
                    scores,
                    grad_weights,
                    weights,
                    grad_scores,
                    deltas: &deltas,
                });
                let weights = Matrix::dense(weights, shape);
                let grad_scores = Matrix::dense(grad_scores, shape);
                let (numbers, shape) = (keys.start * dim..keys.end * dim, [keys.len(), dim]);
                let some_values = MatrixMut::dense(&mut grad_value[numbers.clone()], shape);
                C::multiply(&unit, some_values, weights.transposed(), grads.clone(), true);
                let some_keys = MatrixMut::dense(&mut grad_key[numbers], shape);
                C::multiply(&unit, some_keys, grad_scores.transposed(), queries.clone(), true);
                let (is_first, some_keys) = (keys.start == 0, (all_keys, [keys, 0..dim]));
                let block_grad = MatrixMut::dense(grad_query, [block.len(), dim]);
                C::multiply(&unit, block_grad, grad_scores, some_keys, !is_first);
            }
            write_query(block.start, grad_query);
        }
        (grad_key, grad_value)
    }
}
