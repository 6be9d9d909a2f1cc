//! Attention of all heads of a tensor, on all threads.

use std::ffi::c_void;
use std::ops::Range;

use crate::attention::factor::FactorOf;
use crate::attention::head::{AttentionHead, GradHead};
use crate::attention::passes::AttentionScratch;
use crate::attention::rows::Rows;
use crate::choice::multiplies_bf16;
use crate::element::{Bf16, Element};
use crate::elementwise::pointwise::Convert;
use crate::kernel::Kernel;
use crate::processor::{prefetch, run_vectorized};
use crate::scratch::{Scratch, WithScratch};
use crate::threads::{num_threads, parallel_for};
use crate::views::{Dtype, Shared};

/// A tensor `[batch, head, row, dim]` whose rows are in one piece.
#[derive(Debug, Clone, Copy)]
pub struct HeadTensor {
    /// Its first number.
    pub data: *mut c_void,
    /// From batch to batch, head to head and row to row, in numbers.
    pub strides: [isize; 3],
}

/// Attention of several heads; the forward pass leaves the gradients alone.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Of all tensors but `log_sum_exp`, which is float32.
    pub dtype: Dtype,
    /// Whether query `i` sees keys `0..=i` only.
    pub is_causal: bool,
    /// What scores are multiplied with.
    pub scale: f32,
    /// How many batches.
    pub batches: usize,
    /// Heads of a batch.
    pub heads: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head.
    pub keys: usize,
    /// Numbers of a row.
    pub dim: usize,
    /// Input.
    pub query: HeadTensor,
    /// Input.
    pub key: HeadTensor,
    /// Input.
    pub value: HeadTensor,
    /// Written by the forward pass, read by the backward pass.
    pub out: HeadTensor,
    /// Gradient of `out`.
    pub grad_out: HeadTensor,
    /// Written by the backward pass.
    pub grad_query: HeadTensor,
    /// Written by the backward pass.
    pub grad_key: HeadTensor,
    /// Written by the backward pass.
    pub grad_value: HeadTensor,
    /// Of the scores of each query: written by the forward pass, read by the backward pass.
    pub log_sum_exp: HeadTensor,
}

thread_local! {
    static SCRATCH: Scratch<AttentionScratch> = Scratch::default();
}

/// One head of a tensor `[batch, head, row, dim]`.
struct HeadRows<T> {
    start: Shared<T>,
    stride: usize,
    len: usize,
    dim: usize,
}

impl<T: Element> HeadRows<T> {
    fn new(tensor: &HeadTensor, head: [usize; 2], len: usize, dim: usize) -> Self {
        let [batch, head] = head.map(|index| index as isize);
        let offset = batch * tensor.strides[0] + head * tensor.strides[1];
        let start = Shared(Shared(tensor.data.cast::<T>()).at(offset));
        Self { start, stride: tensor.strides[2] as usize, len, dim }
    }

    /// # Safety
    /// The tensor must be there for `'a` and written by nothing.
    unsafe fn rows<'a>(&self) -> Rows<'a, T> {
        let len = (self.len - 1) * self.stride + self.dim;
        // SAFETY: from the first number of the first row to the last of the last.
        Rows::new(unsafe { self.start.slice(0..len) }, [self.len, self.dim], self.stride)
    }

    /// Asks for rows that are to be in the cache soon.
    fn prefetch(&self, rows: &Range<usize>) {
        for i in rows.start..rows.end.min(self.len) {
            prefetch(self.start.at((i * self.stride) as isize), self.dim);
        }
    }

    /// Writes rows of the head from `first` on.
    ///
    /// # Safety
    /// The tensor must be there, and these rows used by nothing else.
    unsafe fn write(&self, first: usize, rows: &[f32]) {
        let output = Shared(self.start.at((first * self.stride) as isize));
        // SAFETY: as this function asks.
        run_vectorized(WriteRows { rows, dim: self.dim, output, stride: self.stride });
    }
}

/// Rows into a tensor in which those of other heads are between them.
struct WriteRows<'a, T> {
    rows: &'a [f32],
    dim: usize,
    output: Shared<T>,
    stride: usize,
}

impl<T: Element> Kernel for WriteRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, row) in self.rows.chunks_exact(self.dim).enumerate() {
            // SAFETY: as `HeadRows::write` asks.
            let copy = unsafe { self.output.slice_mut(i * self.stride..i * self.stride + self.dim) };
            Convert { numbers: row, copy }.run();
        }
    }
}

/// # Safety
/// The tensors of `call` must be there for `'a` and their inputs written by nothing.
unsafe fn head_of<'a, T: Element>(call: &Attention, head: [usize; 2]) -> AttentionHead<'a, T> {
    // SAFETY: as this function asks.
    let rows = |rows: &HeadTensor, len| unsafe { HeadRows::new(rows, head, len, call.dim).rows() };
    AttentionHead {
        query: rows(&call.query, call.queries),
        key: rows(&call.key, call.keys),
        value: rows(&call.value, call.keys),
        queries: call.queries,
        keys: call.keys,
        scale: call.scale,
        is_causal: call.is_causal,
    }
}

/// Rows of the head behind `head`, to be asked for while that one is worked on; none behind the last.
fn next_rows<T: Element, const N: usize>(
    call: &Attention,
    head: usize,
    tensors: [(&HeadTensor, usize); N],
) -> Option<[HeadRows<T>; N]> {
    let (next, heads) = (head + 1, call.heads);
    let is_there = next < call.batches * heads;
    let rows = |(rows, len)| HeadRows::new(rows, [next / heads, next % heads], len, call.dim);
    is_there.then(|| tensors.map(rows))
}

fn prefetch_rows<T: Element, const N: usize>(next: &Option<[HeadRows<T>; N]>, rows: &Range<usize>) {
    next.iter().flatten().for_each(|head| head.prefetch(rows));
}

/// Attention, by the numbers that the processor multiplies fastest.
///
/// # Safety
/// The tensors must be there, with such sizes and strides, and the inputs written by nothing; those that are written must share no
/// memory with others, nor rows with other rows.
pub unsafe fn attention(call: &Attention) {
    // SAFETY: as this function asks.
    unsafe {
        match (call.dtype, multiplies_bf16()) {
            (Dtype::Float32, _) => attend::<f32, f32>(call),
            (Dtype::Bfloat16, true) => attend::<Bf16, Bf16>(call),
            (Dtype::Bfloat16, false) => attend::<Bf16, f32>(call),
        }
    }
}

/// # Safety
/// As [`attention`].
unsafe fn attend<T: Element, C: FactorOf<T>>(call: &Attention) {
    let (heads, queries, dim) = (call.heads, call.queries, call.dim);
    let all = call.batches * heads;
    // few heads are split, so that all threads have work
    let threads = num_threads();
    let strip = queries.div_ceil(threads.div_ceil(all)).next_multiple_of(64);
    let strips = queries.div_ceil(strip);
    let call = &SharedCall(call);
    parallel_for(all * strips, 1, |part| {
        for item in part {
            let (call, head) = (call.get(), item / strips);
            let first = item % strips * strip;
            let at = [head / heads, head % heads];
            let out = HeadRows::<T>::new(&call.out, at, call.queries, call.dim);
            let log_sum_exp = HeadRows::<f32>::new(&call.log_sum_exp, at, call.queries, 1);
            let inputs = [(&call.query, call.queries), (&call.key, call.keys), (&call.value, call.keys)];
            let next = next_rows::<T, 3>(call, head, inputs);
            SCRATCH.with_borrow_mut(|scratch| {
                // SAFETY: the tensors are there during the call, and nothing writes to the inputs.
                let head = unsafe { head_of::<T>(call, at) };
                head.forward::<C>(first..(first + strip).min(queries), scratch, |first, rows, sums| {
                    prefetch_rows(&next, &(first..first + rows.len() / dim));
                    // SAFETY: the outputs share no memory with others; these rows belong to this item alone.
                    unsafe {
                        out.write(first, rows);
                        log_sum_exp.write(first, sums);
                    }
                });
            });
        }
    });
}

/// The gradients of [`attention`].
///
/// # Safety
/// The tensors must be there, with such sizes and strides, and the inputs written by nothing; those that are written must share no
/// memory with others, nor rows with other rows.
pub unsafe fn attention_backward(call: &Attention) {
    // SAFETY: as this function asks.
    unsafe {
        match (call.dtype, multiplies_bf16()) {
            (Dtype::Float32, _) => attend_backward::<f32, f32>(call),
            (Dtype::Bfloat16, true) => attend_backward::<Bf16, Bf16>(call),
            (Dtype::Bfloat16, false) => attend_backward::<Bf16, f32>(call),
        }
    }
}

/// # Safety
/// As [`attention_backward`].
unsafe fn attend_backward<T: Element, C: FactorOf<T>>(call: &Attention) {
    let (heads, dim) = (call.heads, call.dim);
    let all = call.batches * heads;
    let call = &SharedCall(call);
    parallel_for(all, 1, |part| {
        for item in part {
            let call = call.get();
            let at = [item / heads, item % heads];
            let out = |rows: &HeadTensor, len| HeadRows::<T>::new(rows, at, len, call.dim);
            let grad_query = out(&call.grad_query, call.queries);
            let grad_key = out(&call.grad_key, call.keys);
            let grad_value = out(&call.grad_value, call.keys);
            let inputs = [
                (&call.query, call.queries),
                (&call.key, call.keys),
                (&call.value, call.keys),
                (&call.out, call.queries),
                (&call.grad_out, call.queries),
            ];
            let next = next_rows::<T, 5>(call, item, inputs);
            SCRATCH.with_borrow_mut(|scratch| {
                // SAFETY: the tensors are there during the call, and nothing writes to the inputs.
                let (head, grad) = unsafe {
                    let log_sum_exp = HeadRows::new(&call.log_sum_exp, at, call.queries, 1).rows();
                    let grad_out = out(&call.grad_out, call.queries).rows();
                    let grad = GradHead { out: out(&call.out, call.queries).rows(), grad_out, log_sum_exp };
                    (head_of::<T>(call, at), grad)
                };
                let (keys, values) = head.backward::<C>(&grad, scratch, |first, rows| {
                    prefetch_rows(&next, &(first..first + rows.len() / dim));
                    // SAFETY: the gradients share no memory with others; this head belongs to this item alone.
                    unsafe { grad_query.write(first, rows) };
                });
                // SAFETY: as above.
                unsafe {
                    grad_key.write(0, keys);
                    grad_value.write(0, values);
                }
            });
        }
    });
}

/// A description that threads share.
struct SharedCall<'a>(&'a Attention);

// SAFETY: threads read the description; who writes to the tensors it names says why that is sound.
unsafe impl Sync for SharedCall<'_> {}

impl SharedCall<'_> {
    fn get(&self) -> &Attention {
        self.0
    }
}
