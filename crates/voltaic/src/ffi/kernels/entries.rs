//! What C++ calls: each function makes plain Rust of what it is passed, and calls a kernel.

use std::ffi::c_void;
use std::ptr;

use voltaic_sys as sys;

use super::guard::{guard, guard_chosen, guard_done, guard_some};
use crate::kernels::{
    self, Attention, BatchNorm, BatchNormGrads, BatchedProduct, Bf16, CacheFormat, CachedAttention,
    CachedRows, Chain, ChainInput, ChainOp, ChainOutput, ChainStep, Convolution, ConvolutionKernel, Dtype,
    FactorKernel, Float8Format, Floats, FloatsMut, HeadTensor, Mt19937, Part, ProductKernel, RowPairs,
    slice_mut_of, slice_of,
};

fn dtype_of(dtype: i32) -> Dtype {
    if dtype == sys::VT_FLOAT32 { Dtype::Float32 } else { Dtype::Bfloat16 }
}

pub(super) fn format_of(format: i32) -> Float8Format {
    if format == sys::VT_E4M3 { Float8Format::E4m3 } else { Float8Format::E5m2 }
}

fn sizes<const N: usize>(sizes: [i64; N]) -> [usize; N] {
    sizes.map(|size| size as usize)
}

fn strides(strides: [i64; 3]) -> [isize; 3] {
    strides.map(|stride| stride as isize)
}

/// # Safety
/// As for [`Floats::of_address`].
pub(super) unsafe fn floats<'a>(dtype: i32, address: *const c_void, len: usize) -> Floats<'a> {
    // SAFETY: as this function asks.
    unsafe { Floats::of_address(dtype_of(dtype), address, len) }
}

/// # Safety
/// As for [`FloatsMut::of_address`].
pub(super) unsafe fn floats_mut<'a>(dtype: i32, address: *mut c_void, len: usize) -> FloatsMut<'a> {
    // SAFETY: as this function asks.
    unsafe { FloatsMut::of_address(dtype_of(dtype), address, len) }
}

/// # Safety
/// As for [`slice_of`]; null for none.
unsafe fn vector<'a>(address: *const f32, len: usize) -> Option<&'a [f32]> {
    // SAFETY: as this function asks.
    (!address.is_null()).then(|| unsafe { slice_of(address, len) })
}

/// # Safety
/// As for [`slice_mut_of`]; null for none.
unsafe fn vector_mut<'a>(address: *mut f32, len: usize) -> Option<&'a mut [f32]> {
    // SAFETY: as this function asks.
    (!address.is_null()).then(|| unsafe { slice_mut_of(address, len) })
}

// ---- products ----

pub(super) extern "C" fn product(call: *const sys::vt_product) -> i32 {
    // SAFETY: the shim passes a description of tensors, all of which live during the call.
    guard_chosen("product", || unsafe { multiply(call, Dtype::Float32) })
}

pub(super) extern "C" fn product_bf16(call: *const sys::vt_product) -> i32 {
    // SAFETY: as above.
    guard_chosen("product_bf16", || unsafe { multiply(call, Dtype::Bfloat16) })
}

/// # Safety
/// The description must be one of tensors of this dtype that are there; `out` shares no memory with the factors.
unsafe fn multiply(call: *const sys::vt_product, dtype: Dtype) -> Option<ProductKernel> {
    // SAFETY: as this function asks.
    unsafe {
        let call = &*call;
        kernels::multiply_batches(&BatchedProduct {
            dtype,
            shape: sizes([call.batches, call.rows, call.columns, call.depth]),
            out: call.out,
            a: call.a,
            b: call.b,
            out_strides: strides(call.out_strides),
            a_strides: strides(call.a_strides),
            b_strides: strides(call.b_strides),
            adds: call.adds != 0,
        })
    }
}

// ---- chains of operators ----

pub(super) extern "C" fn chain(call: *const sys::vt_chain_call) -> i32 {
    // SAFETY: the shim passes tensors that live during the call and lie as `Chain::run` asks, which the pass that made the chain checks.
    guard_done("chain", || unsafe { run_chain(&*call) })
}

/// # Safety
/// The arrays must be there, and inputs and outputs as [`Chain::run`] asks.
unsafe fn run_chain(call: &sys::vt_chain_call) {
    // SAFETY: as this function asks.
    let (given, reads, writes) = unsafe {
        (
            slice_of(call.steps, call.num_steps),
            slice_of(call.inputs, call.num_inputs),
            slice_of(call.outputs, call.num_outputs),
        )
    };
    // arrays, so that a replay takes no memory
    let mut steps = [ChainStep { op: ChainOp::Add, a: 0, b: 0, number: 0.0 }; Chain::REGISTERS];
    let mut inputs = [ChainInput { data: ptr::null(), dtype: Dtype::Float32, period: 1 }; Chain::REGISTERS];
    let output = ChainOutput { data: ptr::null_mut(), dtype: Dtype::Float32, register: 0, period: 0 };
    let mut outputs = [output; Chain::REGISTERS];
    for (step, from) in steps[..given.len()].iter_mut().zip(given) {
        let op = ChainOp::of_number(from.op).expect("the pass names operators by their numbers");
        *step = ChainStep { op, a: from.a as usize, b: from.b as usize, number: from.number };
    }
    for (input, from) in inputs[..reads.len()].iter_mut().zip(reads) {
        *input = ChainInput { data: from.data, dtype: dtype_of(from.dtype), period: from.period as usize };
    }
    for (output, from) in outputs[..writes.len()].iter_mut().zip(writes) {
        let (register, period) = (from.from as usize, from.period as usize);
        *output = ChainOutput { data: from.data, dtype: dtype_of(from.dtype), register, period };
    }
    let chain = Chain {
        steps: &steps[..given.len()],
        inputs: &inputs[..reads.len()],
        outputs: &outputs[..writes.len()],
        len: call.len as usize,
        row: call.row as usize,
    };
    // SAFETY: as this function asks.
    unsafe { chain.run() };
}

// ---- element by element; the shim passes dense tensors of `len` numbers that share no memory ----

pub(super) extern "C" fn gelu(
    dtype: i32,
    is_tanh: i32,
    input: *const c_void,
    output: *mut c_void,
    len: i64,
) -> i32 {
    guard_done("gelu", || {
        let len = len as usize;
        // SAFETY: as said above, here and in the functions below.
        let (input, output) = unsafe { (floats(dtype, input, len), floats_mut(dtype, output, len)) };
        kernels::gelu(input, output, is_tanh != 0);
    })
}

pub(super) extern "C" fn gelu_backward(
    dtype: i32,
    is_tanh: i32,
    grad: *const c_void,
    input: *const c_void,
    output: *mut c_void,
    len: i64,
) -> i32 {
    guard_done("gelu_backward", || {
        let len = len as usize;
        // SAFETY: as above.
        let (grad, input) = unsafe { (floats(dtype, grad, len), floats(dtype, input, len)) };
        // SAFETY: as above.
        kernels::gelu_backward(grad, input, unsafe { floats_mut(dtype, output, len) }, is_tanh != 0);
    })
}

pub(super) extern "C" fn relu_bf16(input: *const c_void, output: *mut c_void, len: i64) -> i32 {
    guard_done("relu_bf16", || {
        let len = len as usize;
        // SAFETY: as above, but for an input that is the output.
        let input = (input != output).then(|| unsafe { slice_of::<Bf16>(input.cast(), len) });
        // SAFETY: as above.
        kernels::relu(input, unsafe { slice_mut_of(output.cast(), len) });
    })
}

pub(super) extern "C" fn relu_backward_bf16(
    grad: *const c_void,
    result: *const c_void,
    output: *mut c_void,
    len: i64,
) -> i32 {
    guard_done("relu_backward_bf16", || {
        let len = len as usize;
        // SAFETY: as above, but for a gradient that is the output.
        let grad = (grad != output).then(|| unsafe { slice_of::<Bf16>(grad.cast(), len) });
        // SAFETY: as above.
        let (result, output) = unsafe { (slice_of(result.cast(), len), slice_mut_of(output.cast(), len)) };
        kernels::relu_backward(grad, result, output);
    })
}

pub(super) extern "C" fn add_bf16(
    dtype: i32,
    a: *const c_void,
    b: *const c_void,
    output: *mut c_void,
    len: i64,
) -> i32 {
    guard_done("add_bf16", || {
        let len = len as usize;
        // SAFETY: as above, but for a first input that is the output.
        let a = (a != output).then(|| unsafe { floats(dtype, a, len) });
        // SAFETY: as above; `b` is of bfloat16.
        let (b, output) = unsafe { (slice_of(b.cast(), len), floats_mut(dtype, output, len)) };
        kernels::add(a, b, output);
    })
}

pub(super) extern "C" fn convert(dtype: i32, input: *const c_void, output: *mut c_void, len: i64) -> i32 {
    guard_done("convert", || {
        let (len, other) = (len as usize, sys::VT_FLOAT32 + sys::VT_BFLOAT16 - dtype);
        // SAFETY: as above; the output is of the other dtype.
        let (input, output) = unsafe { (floats(dtype, input, len), floats_mut(other, output, len)) };
        kernels::convert(input, output);
    })
}

pub(super) extern "C" fn bernoulli(
    dtype: i32,
    state: *mut sys::vt_mt19937,
    p: f64,
    output: *mut c_void,
    len: i64,
) -> i32 {
    guard_done("bernoulli", || {
        // SAFETY: the shim passes a state of 624 words, which is its own during the call.
        let (state, words) = unsafe { (&mut *state, &mut *(*state).words.cast::<[u32; 624]>()) };
        let mut generator = Mt19937 { words, next: &mut state.next, left: &mut state.left };
        // SAFETY: as above.
        kernels::bernoulli(&mut generator, p, unsafe { floats_mut(dtype, output, len as usize) });
    })
}

// ---- images; the shim passes dense tensors with the channels last, of the sizes described, that share no memory ----

/// All images, and the numbers of their windows.
fn pool_of(call: &sys::vt_max_pool) -> (RowPairs, usize) {
    let [images, height, width, channels] = sizes([call.images, call.height, call.width, call.channels]);
    (RowPairs { start: 0, height, width, channels }, images * height * width * channels / 4)
}

pub(super) extern "C" fn max_pool2d(
    call: *const sys::vt_max_pool,
    input: *const c_void,
    output: *mut c_void,
    indices: *mut i64,
) -> i32 {
    guard_done("max_pool2d", || {
        // SAFETY: the shim passes a description that lives during the call.
        let call = unsafe { &*call };
        let (images, len) = pool_of(call);
        // SAFETY: as said above.
        let (input, output, indices) = unsafe {
            let (input, output) = (floats(call.dtype, input, 4 * len), floats_mut(call.dtype, output, len));
            (input, output, slice_mut_of(indices, len))
        };
        kernels::max_pool2d(images, input, output, indices);
    })
}

pub(super) extern "C" fn max_pool2d_backward(
    call: *const sys::vt_max_pool,
    grad: *const c_void,
    indices: *const i64,
    output: *mut c_void,
) -> i32 {
    guard_done("max_pool2d_backward", || {
        // SAFETY: as above.
        let call = unsafe { &*call };
        let (images, len) = pool_of(call);
        // SAFETY: as above.
        let (grad, indices, output) = unsafe {
            let (grad, output) = (floats(call.dtype, grad, len), floats_mut(call.dtype, output, 4 * len));
            (grad, slice_of(indices, len), output)
        };
        kernels::max_pool2d_backward(images, grad, indices, output);
    })
}

pub(super) extern "C" fn batch_norm(norm: *const sys::vt_batch_norm, output: *mut c_void) -> i32 {
    guard_some("batch_norm", || {
        // SAFETY: as above; vectors are of a number for each channel.
        unsafe {
            let norm = &*norm;
            let [pixels, channels] = sizes([norm.pixels, norm.channels]);
            let (input, output) = (
                floats(norm.dtype, norm.input, pixels * channels),
                floats_mut(norm.dtype, output, pixels * channels),
            );
            let norm = BatchNorm {
                momentum: norm.momentum,
                eps: norm.eps,
                weight: vector(norm.weight, channels),
                bias: vector(norm.bias, channels),
                running_mean: vector_mut(norm.running_mean, channels),
                running_var: vector_mut(norm.running_var, channels),
                mean: slice_mut_of(norm.mean, channels),
                invstd: slice_mut_of(norm.invstd, channels),
            };
            kernels::batch_norm(norm, input, output)
        }
    })
}

pub(super) extern "C" fn batch_norm_backward(
    norm: *const sys::vt_batch_norm,
    grad: *const c_void,
    output: *mut c_void,
    grad_weight: *mut f32,
    grad_bias: *mut f32,
) -> i32 {
    guard_done("batch_norm_backward", || {
        // SAFETY: as above; the output is null if it is not needed.
        unsafe {
            let norm = &*norm;
            let [pixels, channels] = sizes([norm.pixels, norm.channels]);
            let len = pixels * channels;
            let (grad, input) = (floats(norm.dtype, grad, len), floats(norm.dtype, norm.input, len));
            let output = (!output.is_null()).then(|| floats_mut(norm.dtype, output, len));
            let norm = BatchNormGrads {
                weight: vector(norm.weight, channels),
                mean: slice_of(norm.mean, channels),
                invstd: slice_of(norm.invstd, channels),
                grad_weight: slice_mut_of(grad_weight, channels),
                grad_bias: slice_mut_of(grad_bias, channels),
            };
            kernels::batch_norm_backward(norm, grad, input, output);
        }
    })
}

fn convolution_of(call: &sys::vt_convolution) -> Convolution {
    Convolution {
        dtype: dtype_of(call.dtype),
        are_channels_last: call.is_channels_last != 0,
        images: call.images as usize,
        in_channels: call.in_channels as usize,
        out_channels: call.out_channels as usize,
        in_size: sizes(call.in_size),
        out_size: sizes(call.out_size),
        kernel: sizes(call.kernel),
        stride: sizes(call.stride),
        padding: sizes(call.padding),
    }
}

pub(super) extern "C" fn convolves(call: *const sys::vt_convolution) -> i32 {
    guard("convolves", || {
        // SAFETY: as above.
        let sizes = convolution_of(unsafe { &*call });
        let parts = [
            (Part::Output, sys::VT_OUTPUT),
            (Part::InputGrad, sys::VT_INPUT_GRAD),
            (Part::WeightGrad, sys::VT_WEIGHT_GRAD),
        ];
        let computed = |(part, flag)| kernels::convolution_kernel(&sizes, part, false).map_or(0, |_| flag);
        parts.into_iter().map(computed).sum()
    })
}

pub(super) extern "C" fn convolves_by_taps(call: *const sys::vt_convolution) -> i32 {
    guard("convolves_by_taps", || {
        // SAFETY: as above.
        let sizes = convolution_of(unsafe { &*call });
        let kernel = kernels::convolution_kernel(&sizes, Part::WeightGrad, true);
        i32::from(kernel == Some(ConvolutionKernel::Taps))
    })
}

pub(super) extern "C" fn convolution(
    call: *const sys::vt_convolution,
    input: *const c_void,
    weight: *const c_void,
    bias: *const c_void,
    output: *mut c_void,
) -> i32 {
    guard_chosen("convolution", || {
        // SAFETY: as above; the bias may be null.
        unsafe {
            let (dtype, sizes) = ((*call).dtype, convolution_of(&*call));
            let input = floats(dtype, input, sizes.in_len());
            let weight = floats(dtype, weight, sizes.weight_len());
            let bias = (!bias.is_null()).then(|| floats(dtype, bias, sizes.out_channels));
            kernels::convolution(&sizes, input, weight, bias, floats_mut(dtype, output, sizes.out_len()))
        }
    })
}

pub(super) extern "C" fn convolution_input_grad(
    call: *const sys::vt_convolution,
    grad: *const c_void,
    weight: *const c_void,
    output: *mut c_void,
) -> i32 {
    guard_chosen("convolution_input_grad", || {
        // SAFETY: as above.
        unsafe {
            let (dtype, sizes) = ((*call).dtype, convolution_of(&*call));
            let grad = floats(dtype, grad, sizes.out_len());
            let weight = floats(dtype, weight, sizes.weight_len());
            kernels::convolution_input_grad(&sizes, grad, weight, floats_mut(dtype, output, sizes.in_len()))
        }
    })
}

pub(super) extern "C" fn convolution_weight_grad(
    call: *const sys::vt_convolution,
    grad: *const c_void,
    input: *const c_void,
    output: *mut c_void,
) -> i32 {
    guard_chosen("convolution_weight_grad", || {
        // SAFETY: as above.
        unsafe {
            let (dtype, sizes) = ((*call).dtype, convolution_of(&*call));
            let grad = floats(dtype, grad, sizes.out_len());
            let input = floats(dtype, input, sizes.in_len());
            let output = floats_mut(dtype, output, sizes.weight_len());
            kernels::convolution_weight_grad(&sizes, grad, input, output)
        }
    })
}

// ---- attention ----

fn attention_of(call: &sys::vt_attention) -> Attention {
    let tensor = |rows: sys::vt_rows| HeadTensor { data: rows.data, strides: strides(rows.strides) };
    let [batches, heads, queries, keys, dim] =
        sizes([call.batches, call.heads, call.queries, call.keys, call.dim]);
    Attention {
        dtype: dtype_of(call.dtype),
        is_causal: call.is_causal != 0,
        scale: call.scale as f32,
        batches,
        heads,
        queries,
        keys,
        dim,
        query: tensor(call.query),
        key: tensor(call.key),
        value: tensor(call.value),
        out: tensor(call.out),
        grad_out: tensor(call.grad_out),
        grad_query: tensor(call.grad_query),
        grad_key: tensor(call.grad_key),
        grad_value: tensor(call.grad_value),
        log_sum_exp: tensor(call.log_sum_exp),
    }
}

pub(super) extern "C" fn attention(call: *const sys::vt_attention) -> i32 {
    // SAFETY: the shim passes a description of tensors, all of which live during the call; the outputs are new.
    guard_chosen("attention", || unsafe { attend(call, kernels::attention) })
}

pub(super) extern "C" fn attention_backward(call: *const sys::vt_attention) -> i32 {
    // SAFETY: as above.
    guard_chosen("attention_backward", || unsafe { attend(call, kernels::attention_backward) })
}

pub(super) extern "C" fn attend_cached(call: *const sys::vt_cached_attention) -> i32 {
    // SAFETY: the shim passes a description of tensors, all of which live during the call; the output is new.
    guard_done("attend_cached", || unsafe { attend_to_cache(&*call) })
}

/// # Safety
/// The description must be one of tensors that are there.
unsafe fn attend_to_cache(call: &sys::vt_cached_attention) {
    let rows = |rows: &sys::vt_cached_rows| CachedRows {
        new: rows.rows,
        strides: rows.strides.map(|stride| stride as isize),
        cache: rows.cache,
        format: match rows.bytes {
            4 => CacheFormat::Float32,
            2 => CacheFormat::Bfloat16,
            _ => CacheFormat::Float8(format_of(rows.format)),
        },
        dim: rows.dim as usize,
        scale: rows.scale,
    };
    // SAFETY: as this function asks.
    unsafe {
        kernels::attend_cached(&CachedAttention {
            dtype: dtype_of(call.dtype),
            scale: call.scale,
            heads: call.heads as usize,
            capacity: call.capacity as usize,
            slot: call.slot as usize,
            positions: slice_of(call.positions, call.batches as usize),
            query: call.query,
            strides: call.strides.map(|stride| stride as isize),
            out: call.out,
            keys: rows(&call.keys),
            values: rows(&call.values),
        });
    }
}

/// # Safety
/// The description must be one of tensors that are there.
unsafe fn attend(call: *const sys::vt_attention, run: unsafe fn(&Attention)) -> Option<FactorKernel> {
    // SAFETY: as this function asks.
    unsafe {
        let call = attention_of(&*call);
        run(&call);
        Some(kernels::factor_kernel(call.dtype))
    }
}
