//! Operators element by element, and random masks.

use std::ffi::c_void;

use tch::{Kind, Tensor};
use voltaic_sys as sys;

use super::{GRAIN, Shared, by_dtype};
use crate::device::Device;
use crate::error::Result;
use crate::ffi::rng::{rng_state, set_rng_state};
use crate::ffi::simd::run_vectorized;
use crate::ffi::threads::parallel_for;
use crate::kernels::{
    Add, Bernoulli, Bf16, Element, Gelu, GeluBackward, Map, MapOnto, Mt19937, Pointwise, Relu, ReluBackward,
};

pub(super) extern "C" fn gelu(dtype: i32, is_tanh: i32, input: *const c_void, output: *mut c_void, len: i64) {
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

pub(super) extern "C" fn gelu_backward(
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

pub(super) extern "C" fn relu_bf16(input: *const c_void, output: *mut c_void, len: i64) {
    let (input, output) = (Shared(input.cast_mut().cast::<Bf16>()), Shared(output.cast::<Bf16>()));
    parallel_for(len as usize, GRAIN, |part| {
        if input.0 == output.0 {
            // SAFETY: the shim passes a dense tensor of `len` numbers; parts do not overlap.
            let output = unsafe { output.slice_mut(part) };
            run_vectorized(MapOnto { operator: Relu, output, others: [] });
        } else {
            // SAFETY: the shim passes dense tensors of `len` numbers that share no memory; parts do not overlap.
            let (input, output) = unsafe { (input.slice(part.clone()), output.slice_mut(part)) };
            run_vectorized(Map { operator: Relu, inputs: [input], output });
        }
    });
}

pub(super) extern "C" fn relu_backward_bf16(
    grad: *const c_void,
    result: *const c_void,
    output: *mut c_void,
    len: i64,
) {
    pairwise(ReluBackward, [grad, result], output, len as usize);
}

pub(super) extern "C" fn add_bf16(a: *const c_void, b: *const c_void, output: *mut c_void, len: i64) {
    pairwise(Add, [a, b], output, len as usize);
}

fn pairwise<F: Pointwise<2>>(operator: F, inputs: [*const c_void; 2], output: *mut c_void, len: usize) {
    let [first, second] = inputs.map(|input| Shared(input.cast_mut().cast::<Bf16>()));
    let output = Shared(output.cast::<Bf16>());
    parallel_for(len, GRAIN, |part| {
        if first.0 == output.0 {
            // SAFETY: the shim passes dense tensors of `len` numbers, and the second shares no memory with the output;
            // parts do not overlap.
            let (output, other) = unsafe { (output.slice_mut(part.clone()), second.slice(part)) };
            run_vectorized(MapOnto { operator, output, others: [other] });
        } else {
            // SAFETY: as in `relu_bf16`.
            let (inputs, output) =
                unsafe { ([first.slice(part.clone()), second.slice(part.clone())], output.slice_mut(part)) };
            run_vectorized(Map { operator, inputs, output });
        }
    });
}

/// Whether libtorch's masks follow from its generator's numbers, as voltaic's do: on Intel's processors it may draw them
/// by the MKL. To be asked before the kernels are in.
pub(super) fn draws_by_mt19937() -> Result<bool> {
    let (device_type, index) = Device::Cpu.numbers();
    let state = rng_state(device_type, index)?;
    let empty = || Tensor::f_empty([64], (Kind::Double, tch::Device::Cpu));
    let mask = empty()?.f_bernoulli_float_(0.5)?;
    set_rng_state(device_type, index, &state)?;
    let numbers = empty()?.f_uniform_(0.0, 1.0)?;
    set_rng_state(device_type, index, &state)?;
    Ok(mask.f_equal(&numbers.f_lt(0.5)?.f_to_kind(Kind::Double)?)?)
}

pub(super) extern "C" fn bernoulli(
    dtype: i32,
    state: *mut sys::vt_mt19937,
    p: f64,
    output: *mut c_void,
    len: i64,
) {
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
