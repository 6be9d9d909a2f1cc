//! The kernels of [`kernels`](crate::kernels) in libtorch's dispatcher.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tch::{Kind, Tensor};
use voltaic_sys as sys;

use super::amx::withhold_undescribed_amx;
use super::bf16_product::has_bf16_products;
use super::check;
use super::matrix::Product;
use super::rng::{rng_state, set_rng_state};
use super::simd::{has_vectors, is_intel, run_vectorized};
use super::switch::read_switch;
use super::threads::parallel_for;
use crate::device::Device;
use crate::error::Result;
use crate::kernels::{
    AttentionHead, AttentionScratch, Bernoulli, Bf16, Element, FactorOf, Gelu, GeluBackward, GradHead,
    MaxPool2d, MaxPool2dBackward, Mt19937, RowPairs, Rows,
};

/// `0`: libtorch's kernels. `1`: voltaic's, also products on Intel's processors. Unset: voltaic's if the program is
/// optimized.
const SWITCH: &str = "VOLTAIC_CPU_KERNELS";

/// Numbers that are worth a thread, as for libtorch.
const GRAIN: usize = 32_768;
/// Rows or columns of a product that are worth a thread.
const MIN_STRIP: usize = 64;

/// Whether [`install_kernels`] has put them in.
static INSTALLED: Mutex<bool> = Mutex::new(false);
static HAS_ATTENTION: AtomicBool = AtomicBool::new(false);

/// Whether attention without mask and dropout is voltaic's.
pub fn has_attention_kernel() -> bool {
    HAS_ATTENTION.load(Ordering::Relaxed)
}

/// Puts voltaic's kernels for the CPU in the place of libtorch's, for the rest of the process: attention, gradients of
/// some convolutions' weights, GELU, max-pooling of 2 x 2, random masks unless libtorch draws them by the MKL, and products of
/// float32 matrices but on Intel's processors, where the MKL is at its best. Later calls change nothing.
///
/// Results differ from libtorch's in the last bits of products, attention, weights' gradients and GELU; max-pooling and
/// masks are equal.
///
/// Keeps oneDNN from AMX, too, on virtual machines that offer it without a description, where its operators in bfloat16
/// would end the process; to be called before the first of them, as trainers and accelerators do.
///
/// Returns whether they are in use: they are not in a program compiled without optimization, unless the environment says
/// `VOLTAIC_CPU_KERNELS=1`, which asks for the products on Intel's processors, too; nor with `VOLTAIC_CPU_KERNELS=0`; nor on x86-64 without AVX2.
///
/// # Errors
/// [`SwitchError`](crate::error::SwitchError) if `VOLTAIC_CPU_KERNELS` is neither `0` nor `1`.
pub fn install_kernels() -> Result<bool> {
    withhold_undescribed_amx();
    let switch = read_switch(SWITCH, "kernels")?;
    let is_wanted = switch.unwrap_or(!cfg!(debug_assertions));
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed || !is_wanted || !has_vectors() {
        return Ok(*installed);
    }
    let table = sys::vt_kernels {
        product: (!is_intel() || switch == Some(true)).then_some(product as _),
        gelu: Some(gelu),
        gelu_backward: Some(gelu_backward),
        max_pool2d: Some(max_pool2d),
        max_pool2d_backward: Some(max_pool2d_backward),
        bernoulli: draws_by_mt19937()?.then_some(bernoulli as _),
        attention: Some(attention),
        attention_backward: Some(attention_backward),
        convolves_by_taps: Some(convolves_by_taps),
    };
    // SAFETY: the shim copies the table, whose functions keep what voltaic.h asks of them.
    check("install_kernels", unsafe { sys::vt_install_kernels(&table) })?;
    *installed = true;
    HAS_ATTENTION.store(true, Ordering::Relaxed);
    Ok(true)
}

/// An address that threads share; each uses another part of what is there.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: whoever makes slices of it says why no two threads write to the same numbers.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<T> {}

impl<T> Shared<T> {
    /// The address of another number.
    fn at(self, offset: isize) -> *mut T {
        self.0.wrapping_offset(offset)
    }

    /// # Safety
    /// The numbers must be there for `'a`, initialised unless they are only written, and used by nobody else.
    unsafe fn slice_mut<'a>(self, range: Range<usize>) -> &'a mut [T] {
        // SAFETY: as this function asks.
        unsafe { slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }

    /// # Safety
    /// The numbers must be there for `'a`, initialised, and written by nobody.
    unsafe fn slice<'a>(self, range: Range<usize>) -> &'a [T] {
        // SAFETY: as this function asks.
        unsafe { slice::from_raw_parts(self.0.add(range.start), range.len()) }
    }
}

/// Calls one of two instances of a generic function, by the dtype of a tensor.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        if $dtype == sys::VT_FLOAT32 { $function::<f32>($($argument),*) } else { $function::<Bf16>($($argument),*) }
    };
}

// ---- products ----

extern "C" fn product(call: *const sys::vt_product) -> i32 {
    // SAFETY: the shim passes a description that lives during the call.
    let call = unsafe { &*call };
    if !is_faster_here(call) {
        return 0;
    }
    let [batches, rows, columns, depth] =
        [call.batches, call.rows, call.columns, call.depth].map(|length| length as usize);
    let (out, a, b) = (Shared(call.out), Shared(call.a.cast_mut()), Shared(call.b.cast_mut()));
    let [to_out, to_a, to_b] = [call.out_strides, call.a_strides, call.b_strides]
        .map(|strides| strides.map(|stride| stride as isize));
    let adds = call.adds != 0;
    let run = |batch: usize, rows: Range<usize>, columns: Range<usize>| {
        let (batch, row, column) = (batch as isize, rows.start as isize, columns.start as isize);
        let part = Product {
            shape: [rows.len(), columns.len(), depth],
            out: out.at(batch * to_out[0] + row * to_out[1] + column * to_out[2]),
            a: a.at(batch * to_a[0] + row * to_a[1]),
            b: b.at(batch * to_b[0] + column * to_b[2]),
            strides: [to_out, to_a, to_b].map(|[_, down, right]| [down, right]),
            adds,
        };
        // SAFETY: the addresses, sizes and strides are those of tensors that the shim holds; `out` shares no memory
        // with the others, and each part of it is written by one thread.
        unsafe { part.run() };
    };
    if batches > 1 {
        parallel_for(batches, 1, |part| part.for_each(|batch| run(batch, 0..rows, 0..columns)));
    } else if rows >= columns {
        parallel_for(rows, MIN_STRIP, |part| run(0, part, 0..columns));
    } else {
        parallel_for(columns, MIN_STRIP, |part| run(0, 0..rows, part));
    }
    1
}

/// gemm is slower than libtorch where it has to turn long columns of `b` for few rows.
fn is_faster_here(call: &sys::vt_product) -> bool {
    let is_turned = call.b_strides[1] == 1 && call.b_strides[2] != 1;
    !(is_turned && (call.depth >= 1024 || call.depth > 256 && call.rows < 128))
}

// ---- weights of convolutions ----

extern "C" fn convolves_by_taps(call: *const sys::vt_convolution) -> i32 {
    // SAFETY: the shim passes a description that lives during the call.
    let call = unsafe { &*call };
    let has_products = call.dtype == sys::VT_FLOAT32 || has_bf16_products();
    i32::from(has_products && is_faster_by_taps(call))
}

/// oneDNN is slow at the weights of many channels on small images; the taps at their border leave out work, too.
/// Measured with kernels of 3 x 3 and strides of 1 and 2: below these bounds 1.04 to 12 times as fast.
fn is_faster_by_taps(call: &sys::vt_convolution) -> bool {
    let (pixels, channels) = (call.out_size[0] * call.out_size[1], call.in_channels * call.out_channels);
    call.kernel == [3, 3] && (pixels <= 16 && channels >= 256 * 256 || pixels <= 64 && channels >= 512 * 512)
}

// ---- element by element ----

extern "C" fn gelu(dtype: i32, is_tanh: i32, input: *const c_void, output: *mut c_void, len: i64) {
    fn run<T: Element>(input: *const c_void, output: *mut c_void, len: usize, is_tanh: bool) {
        let (input, output) = (Shared(input.cast_mut().cast::<T>()), Shared(output.cast::<T>()));
        parallel_for(len, GRAIN, |part| {
            // SAFETY: the shim passes dense tensors of `len` numbers that share no memory; parts do not overlap.
            let (input, output) = unsafe { (input.slice(part.clone()), output.slice_mut(part)) };
            run_vectorized(Gelu { input, output, is_tanh });
        });
    }
    by_dtype!(dtype, run(input, output, len as usize, is_tanh != 0));
}

extern "C" fn gelu_backward(
    dtype: i32,
    is_tanh: i32,
    grad: *const c_void,
    input: *const c_void,
    output: *mut c_void,
    len: i64,
) {
    fn run<T: Element>(addresses: [*mut c_void; 3], len: usize, is_tanh: bool) {
        let [grad, input, output] = addresses.map(|address| Shared(address.cast::<T>()));
        parallel_for(len, GRAIN, |part| {
            // SAFETY: as in `gelu`.
            let (grad, input, output) =
                unsafe { (grad.slice(part.clone()), input.slice(part.clone()), output.slice_mut(part)) };
            run_vectorized(GeluBackward { grad, input, output, is_tanh });
        });
    }
    by_dtype!(dtype, run([grad.cast_mut(), input.cast_mut(), output], len as usize, is_tanh != 0));
}

extern "C" fn max_pool2d(
    call: *const sys::vt_max_pool,
    input: *const c_void,
    output: *mut c_void,
    indices: *mut i64,
) {
    fn run<T: Element>(call: &sys::vt_max_pool, [input, output]: [*mut c_void; 2], indices: *mut i64) {
        let (input, output) = (Shared(input.cast::<T>()), Shared(output.cast::<T>()));
        let indices = Shared(indices);
        for_row_pairs(call, |pairs, whole, pooled| {
            // SAFETY: the shim passes dense tensors of such sizes that share no memory; parts do not overlap.
            let (input, output, indices) =
                unsafe { (input.slice(whole), output.slice_mut(pooled.clone()), indices.slice_mut(pooled)) };
            run_vectorized(MaxPool2d { pairs, input, output, indices });
        });
    }
    // SAFETY: the shim passes a description that lives during the call.
    let call = unsafe { &*call };
    by_dtype!(call.dtype, run(call, [input.cast_mut(), output], indices));
}

extern "C" fn max_pool2d_backward(
    call: *const sys::vt_max_pool,
    grad: *const c_void,
    indices: *const i64,
    output: *mut c_void,
) {
    fn run<T: Element>(call: &sys::vt_max_pool, [grad, output]: [*mut c_void; 2], indices: *const i64) {
        let (grad, output) = (Shared(grad.cast::<T>()), Shared(output.cast::<T>()));
        let indices = Shared(indices.cast_mut());
        for_row_pairs(call, |pairs, whole, pooled| {
            // SAFETY: as in `max_pool2d`.
            let (grad, indices, output) =
                unsafe { (grad.slice(pooled.clone()), indices.slice(pooled), output.slice_mut(whole)) };
            run_vectorized(MaxPool2dBackward { pairs, grad, indices, output });
        });
    }
    // SAFETY: as in `max_pool2d`.
    let call = unsafe { &*call };
    by_dtype!(call.dtype, run(call, [grad.cast_mut(), output], indices));
}

/// Calls `body` for parts of all pairs of rows on libtorch's threads, with where the numbers of a part lie in the whole
/// tensor and in the pooled one.
fn for_row_pairs(call: &sys::vt_max_pool, body: impl Fn(RowPairs, Range<usize>, Range<usize>) + Sync) {
    let [images, height, width, channels] =
        [call.images, call.height, call.width, call.channels].map(|length| length as usize);
    let all = RowPairs { start: 0, height, width, channels };
    let pooled = all.row_len() / 2;
    parallel_for(images * height / 2, (GRAIN / pooled / 4).max(1), |part| {
        let [whole, pooled] = [4 * pooled, pooled].map(|len| part.start * len..part.end * len);
        body(RowPairs { start: part.start, ..all }, whole, pooled);
    });
}

/// Whether libtorch's masks follow from its generator's numbers, as voltaic's do: on Intel's processors it may draw them
/// by the MKL. To be asked before the kernels are in.
fn draws_by_mt19937() -> Result<bool> {
    let (device_type, index) = Device::Cpu.numbers();
    let state = rng_state(device_type, index)?;
    let empty = || Tensor::f_empty([64], (Kind::Double, tch::Device::Cpu));
    let mask = empty()?.f_bernoulli_float_(0.5)?;
    set_rng_state(device_type, index, &state)?;
    let numbers = empty()?.f_uniform_(0.0, 1.0)?;
    set_rng_state(device_type, index, &state)?;
    Ok(mask.f_equal(&numbers.f_lt(0.5)?.f_to_kind(Kind::Double)?)?)
}

extern "C" fn bernoulli(dtype: i32, state: *mut sys::vt_mt19937, p: f64, output: *mut c_void, len: i64) {
    fn run<T: Element>(generator: &mut Mt19937, p: f64, output: *mut c_void, len: usize) {
        // SAFETY: the shim passes a dense tensor of `len` numbers.
        let output = unsafe { Shared(output.cast::<T>()).slice_mut(0..len) };
        run_vectorized(Bernoulli { generator, p, output });
    }
    // SAFETY: the shim passes a state of 624 words, which is its own during the call.
    let (state, words) = unsafe { (&mut *state, &mut *(*state).words.cast::<[u32; 624]>()) };
    let mut generator = Mt19937 { words, next: &mut state.next, left: &mut state.left };
    by_dtype!(dtype, run(&mut generator, p, output, len as usize));
}

// ---- attention ----

/// Intel's processors do fewer dot products of bfloat16 in a cycle than of float32.
fn has_fast_bf16_products() -> bool {
    has_bf16_products() && !is_intel()
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = RefCell::default();
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
        Rows::new(unsafe { self.start.slice(0..len) }, self.stride, self.dim)
    }

    /// # Safety
    /// The tensor must be there, and row `i` used by nobody else.
    unsafe fn write(&self, i: usize, row: &[f32]) {
        // SAFETY: as this function asks.
        let out = unsafe { self.start.slice_mut(i * self.stride..i * self.stride + self.dim) };
        out.iter_mut().zip(row).for_each(|(out, number)| *out = T::from_f32(*number));
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

extern "C" fn attention(call: *const sys::vt_attention) {
    fn run<T: Element, C: FactorOf<T>>(call: &sys::vt_attention) {
        let (heads, queries) = (call.heads as usize, call.queries as usize);
        let all = call.batches as usize * heads;
        // few heads are split, so that all threads have work
        let threads = tch::get_num_threads().max(1) as usize;
        let strip = queries.div_ceil(threads.div_ceil(all)).next_multiple_of(64);
        let strips = queries.div_ceil(strip);
        let call = &SharedCall(call);
        parallel_for(all * strips, 1, |part| {
            for item in part {
                let call = call.get();
                let head = [item / strips / heads, item / strips % heads];
                let first = item % strips * strip;
                let out = HeadRows::<T>::new(&call.out, head, call.queries, call.dim);
                let log_sum_exp = HeadRows::<f32>::new(&call.log_sum_exp, head, call.queries, 1);
                SCRATCH.with_borrow_mut(|scratch| {
                    // SAFETY: the shim holds the tensors during the call, and nobody writes to the inputs.
                    let head = unsafe { head_of::<T>(call, head) };
                    head.forward::<C>(first..(first + strip).min(queries), scratch, |i, row, sum| {
                        // SAFETY: the outputs are new tensors; this row belongs to this item alone.
                        unsafe {
                            out.write(i, row);
                            log_sum_exp.write(i, &[sum]);
                        }
                    });
                });
            }
        });
    }
    // SAFETY: the shim passes a description that lives during the call.
    let call = unsafe { &*call };
    match call.dtype {
        sys::VT_FLOAT32 => run::<f32, f32>(call),
        _ if has_fast_bf16_products() => run::<Bf16, Bf16>(call),
        _ => run::<Bf16, f32>(call),
    }
}

extern "C" fn attention_backward(call: *const sys::vt_attention) {
    fn run<T: Element, C: FactorOf<T>>(call: &sys::vt_attention) {
        let heads = call.heads as usize;
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
                SCRATCH.with_borrow_mut(|scratch| {
                    // SAFETY: the shim holds the tensors during the call, and nobody writes to the inputs.
                    let (head, grad) = unsafe {
                        let log_sum_exp = HeadRows::new(&call.log_sum_exp, at, call.queries, 1).rows();
                        let grad_out = out(&call.grad_out, call.queries).rows();
                        let grad =
                            GradHead { out: out(&call.out, call.queries).rows(), grad_out, log_sum_exp };
                        (head_of::<T>(call, at), grad)
                    };
                    let (keys, values) = head.backward::<C>(&grad, scratch, |i, row| {
                        // SAFETY: the gradients are new tensors; this head belongs to this item alone.
                        unsafe { grad_query.write(i, row) };
                    });
                    let dim = call.dim as usize;
                    for (i, (key, value)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate()
                    {
                        // SAFETY: as above.
                        unsafe {
                            grad_key.write(i, key);
                            grad_value.write(i, value);
                        }
                    }
                });
            }
        });
    }
    // SAFETY: the shim passes a description that lives during the call.
    let call = unsafe { &*call };
    match call.dtype {
        sys::VT_FLOAT32 => run::<f32, f32>(call),
        _ if has_fast_bf16_products() => run::<Bf16, Bf16>(call),
        _ => run::<Bf16, f32>(call),
    }
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
