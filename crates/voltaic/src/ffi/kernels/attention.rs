//! Attention, head by head.

use std::ops::Range;

use voltaic_sys as sys;

use super::Shared;
use super::guard::guard_done;
use crate::ffi::amx_product::has_tiles;
use crate::ffi::scratch::{Scratch as ThreadScratch, WithScratch};
use crate::ffi::simd::{prefetch, run_vectorized};
use crate::ffi::strip_product::has_fast_bf16_products;
use crate::ffi::threads::parallel_for;
use crate::kernels::{
    AttentionHead, AttentionScratch, Bf16, Convert, Element, FactorOf, GradHead, Kernel, Rows,
};

/// Whether attention in bfloat16 multiplies such numbers, and not float32.
fn multiplies_bf16() -> bool {
    has_tiles() || has_fast_bf16_products()
}

thread_local! {
    static SCRATCH: ThreadScratch<AttentionScratch> = ThreadScratch::default();
}

/// One head of a tensor `[batch, head, row, dim]`.
struct HeadRows<T> {
    start: Shared<T>,
    stride: usize,
    len: usize,
    dim: usize,
}

impl<T: Element> HeadRows<T> {
    fn new(rows: &sys::vt_rows, head: [usize; 2], len: i64, dim: i64) -> Self {
        let [batch, head] = head.map(|index| index as i64);
        let offset = batch * rows.strides[0] + head * rows.strides[1];
        let start = Shared(Shared(rows.data.cast::<T>()).at(offset as isize));
        Self { start, stride: rows.strides[2] as usize, len: len as usize, dim: dim as usize }
    }

    /// # Safety
    /// The tensor must be there for `'a` and written by nobody.
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
    /// The tensor must be there, and these rows used by nobody else.
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
/// The tensors of `call` must be there for `'a` and their inputs written by nobody.
unsafe fn head_of<'a, T: Element>(call: &sys::vt_attention, head: [usize; 2]) -> AttentionHead<'a, T> {
    // SAFETY: as this function asks.
    let rows = |rows: &sys::vt_rows, len: i64| unsafe { HeadRows::new(rows, head, len, call.dim).rows() };
    AttentionHead {
        query: rows(&call.query, call.queries),
        key: rows(&call.key, call.keys),
        value: rows(&call.value, call.keys),
        queries: call.queries as usize,
        keys: call.keys as usize,
        scale: call.scale as f32,
        is_causal: call.is_causal != 0,
    }
}

/// Rows of the head behind `head`, to be asked for while that one is worked on; none behind the last.
fn next_rows<T: Element, const N: usize>(
    call: &sys::vt_attention,
    head: usize,
    tensors: [(&sys::vt_rows, i64); N],
) -> Option<[HeadRows<T>; N]> {
    let (next, heads) = (head + 1, call.heads as usize);
    let is_there = next < call.batches as usize * heads;
    let rows = |(rows, len)| HeadRows::new(rows, [next / heads, next % heads], len, call.dim);
    is_there.then(|| tensors.map(rows))
}

fn prefetch_rows<T: Element, const N: usize>(next: &Option<[HeadRows<T>; N]>, rows: &Range<usize>) {
    next.iter().flatten().for_each(|head| head.prefetch(rows));
}

pub(super) extern "C" fn attention(call: *const sys::vt_attention) -> i32 {
    guard_done("attention", || {
        // SAFETY: the shim passes a description that lives during the call.
        let call = unsafe { &*call };
        match call.dtype {
            sys::VT_FLOAT32 => attend::<f32, f32>(call),
            _ if multiplies_bf16() => attend::<Bf16, Bf16>(call),
            _ => attend::<Bf16, f32>(call),
        }
    })
}

fn attend<T: Element, C: FactorOf<T>>(call: &sys::vt_attention) {
    let (heads, queries, dim) = (call.heads as usize, call.queries as usize, call.dim as usize);
    let all = call.batches as usize * heads;
    // few heads are split, so that all threads have work
    let threads = tch::get_num_threads().max(1) as usize;
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
                // SAFETY: the shim holds the tensors during the call, and nobody writes to the inputs.
                let head = unsafe { head_of::<T>(call, at) };
                head.forward::<C>(first..(first + strip).min(queries), scratch, |first, rows, sums| {
                    prefetch_rows(&next, &(first..first + rows.len() / dim));
                    // SAFETY: the outputs are new tensors; these rows belong to this item alone.
                    unsafe {
                        out.write(first, rows);
                        log_sum_exp.write(first, sums);
                    }
                });
            });
        }
    });
}

pub(super) extern "C" fn attention_backward(call: *const sys::vt_attention) -> i32 {
    guard_done("attention_backward", || {
        // SAFETY: the shim passes a description that lives during the call.
        let call = unsafe { &*call };
        match call.dtype {
            sys::VT_FLOAT32 => attend_backward::<f32, f32>(call),
            _ if multiplies_bf16() => attend_backward::<Bf16, Bf16>(call),
            _ => attend_backward::<Bf16, f32>(call),
        }
    })
}

fn attend_backward<T: Element, C: FactorOf<T>>(call: &sys::vt_attention) {
    let (heads, dim) = (call.heads as usize, call.dim as usize);
    let all = call.batches as usize * heads;
    let call = &SharedCall(call);
    parallel_for(all, 1, |part| {
        for item in part {
            let call = call.get();
            let at = [item / heads, item % heads];
            let out = |rows: &sys::vt_rows, len| HeadRows::<T>::new(rows, at, len, call.dim);
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
                // SAFETY: the shim holds the tensors during the call, and nobody writes to the inputs.
                let (head, grad) = unsafe {
                    let log_sum_exp = HeadRows::new(&call.log_sum_exp, at, call.queries, 1).rows();
                    let grad_out = out(&call.grad_out, call.queries).rows();
                    let grad = GradHead { out: out(&call.out, call.queries).rows(), grad_out, log_sum_exp };
                    (head_of::<T>(call, at), grad)
                };
                let (keys, values) = head.backward::<C>(&grad, scratch, |first, rows| {
                    prefetch_rows(&next, &(first..first + rows.len() / dim));
                    // SAFETY: the gradients are new tensors; this head belongs to this item alone.
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
struct SharedCall<'a>(&'a sys::vt_attention);

// SAFETY: threads read the description; who writes to the tensors it names says why that is sound.
unsafe impl Sync for SharedCall<'_> {}

impl SharedCall<'_> {
    fn get(&self) -> &sys::vt_attention {
        self.0
    }
}
