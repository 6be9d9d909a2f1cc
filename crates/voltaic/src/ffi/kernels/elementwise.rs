//! Operators element by element, and random masks.

use std::ffi::c_void;
use std::ops::Range;

use tch::{Kind, Tensor};
use voltaic_sys as sys;

use super::guard::guard_done;
use super::{Shared, by_dtype, stream};
use crate::device::Device;
use crate::error::Result;
use crate::ffi::rng::{rng_state, set_rng_state};
use crate::ffi::simd::run_vectorized;
use crate::kernels::{
    Add, Bernoulli, Bf16, Convert, Element, Gelu, GeluBackward, Map, MapOnto, Mt19937, Pointwise, Relu,
    ReluBackward,
};

pub(super) extern "C" fn gelu(
    dtype: i32,
    is_tanh: i32,
    input: *const c_void,
    output: *mut c_void,
    len: i64,
) -> i32 {
    guard_done("gelu", || {
        fn run<T: Element>(input: *const c_void, output: *mut c_void, len: usize, is_tanh: bool) {
            let (input, output) = (Shared(input.cast_mut().cast::<T>()), Shared(output.cast::<T>()));
            let prefetch = |soon| input.prefetch(soon);
            stream(len, prefetch, |part| {
                // SAFETY: the shim passes dense tensors of `len` numbers that share no memory; parts do not overlap.
                let (input, output) = unsafe { (input.slice(part.clone()), output.slice_mut(part)) };
                run_vectorized(Gelu { input, output, is_tanh });
            });
        }
        by_dtype!(dtype, run(input, output, len as usize, is_tanh != 0));
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
        fn run<T: Element>(addresses: [*mut c_void; 3], len: usize, is_tanh: bool) {
            let [grad, input, output] = addresses.map(|address| Shared(address.cast::<T>()));
            let prefetch = |soon: Range<usize>| {
                grad.prefetch(soon.clone());
                input.prefetch(soon);
            };
            stream(len, prefetch, |part| {
                // SAFETY: as in `gelu`.
                let (grad, input, output) =
                    unsafe { (grad.slice(part.clone()), input.slice(part.clone()), output.slice_mut(part)) };
                run_vectorized(GeluBackward { grad, input, output, is_tanh });
            });
        }
        by_dtype!(dtype, run([grad.cast_mut(), input.cast_mut(), output], len as usize, is_tanh != 0));
    })
}

pub(super) extern "C" fn relu_bf16(input: *const c_void, output: *mut c_void, len: i64) -> i32 {
    guard_done("relu_bf16", || {
        map::<_, Bf16, ()>(Relu, [input, input], output, len); // the second is of no size
    })
}

pub(super) extern "C" fn relu_backward_bf16(
    grad: *const c_void,
    result: *const c_void,
    output: *mut c_void,
    len: i64,
) -> i32 {
    guard_done("relu_backward_bf16", || {
        map::<_, Bf16, Bf16>(ReluBackward, [grad, result], output, len);
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
        fn run<T: Element>(inputs: [*const c_void; 2], output: *mut c_void, len: i64) {
            map::<_, T, Bf16>(Add, inputs, output, len);
        }
        by_dtype!(dtype, run([a, b], output, len));
    })
}

fn map<F: Pointwise<T, U>, T: Element, U: Copy + Send + Sync>(
    operator: F,
    [input, other]: [*const c_void; 2],
    output: *mut c_void,
    len: i64,
) {
    let (input, other) = (Shared(input.cast_mut().cast::<T>()), Shared(other.cast_mut().cast::<U>()));
    let output = Shared(output.cast::<T>());
    let prefetch = |soon: Range<usize>| {
        input.prefetch(soon.clone());
        other.prefetch(soon.clone());
        output.prefetch(soon);
    };
    stream(len as usize, prefetch, |part| {
        // SAFETY: the shim passes dense tensors of `len` numbers, of which the second shares no memory with the output;
        // parts do not overlap.
        let (other, output_part) = unsafe { (other.slice(part.clone()), output.slice_mut(part.clone())) };
        if input.0 == output.0 {
            run_vectorized(MapOnto { operator, output: output_part, other });
        } else {
            // SAFETY: as above; the first shares no memory with the output either.
            let input = unsafe { input.slice(part) };
            run_vectorized(Map { operator, input, other, output: output_part });
        }
    });
}

pub(super) extern "C" fn convert(dtype: i32, input: *const c_void, output: *mut c_void, len: i64) -> i32 {
    guard_done("convert", || {
        fn run<T: Element, U: Element>(input: *const c_void, output: *mut c_void, len: usize) {
            let (input, output) = (Shared(input.cast_mut().cast::<T>()), Shared(output.cast::<U>()));
            let prefetch = |soon: Range<usize>| {
                input.prefetch(soon.clone());
                output.prefetch(soon);
            };
            stream(len, prefetch, |part| {
                // SAFETY: the shim passes dense tensors of `len` numbers that share no memory; parts do not overlap.
                let (numbers, copy) = unsafe { (input.slice(part.clone()), output.slice_mut(part)) };
                run_vectorized(Convert { numbers, copy });
            });
        }
        if dtype == sys::VT_FLOAT32 {
            run::<f32, Bf16>(input, output, len as usize);
        } else {
            run::<Bf16, f32>(input, output, len as usize);
        }
    })
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
) -> i32 {
    guard_done("bernoulli", || {
        fn run<T: Element>(generator: &mut Mt19937, p: f64, output: *mut c_void, len: usize) {
            // SAFETY: the shim passes a dense tensor of `len` numbers.
            let output = unsafe { Shared(output.cast::<T>()).slice_mut(0..len) };
            run_vectorized(Bernoulli { generator, p, output });
        }
        // SAFETY: the shim passes a state of 624 words, which is its own during the call.
        let (state, words) = unsafe { (&mut *state, &mut *(*state).words.cast::<[u32; 624]>()) };
        let mut generator = Mt19937 { words, next: &mut state.next, left: &mut state.left };
        by_dtype!(dtype, run(&mut generator, p, output, len as usize));
    })
}
