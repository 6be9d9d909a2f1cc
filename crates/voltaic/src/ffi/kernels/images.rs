//! Max-pooling.

use std::ffi::c_void;
use std::ops::Range;

use voltaic_sys as sys;

use super::guard::guard_done;
use super::{GRAIN, Shared, by_dtype};
use crate::ffi::simd::run_vectorized;
use crate::ffi::threads::parallel_for;
use crate::kernels::{Bf16, Element, MaxPool2d, MaxPool2dBackward, RowPairs};

pub(super) extern "C" fn max_pool2d(
    call: *const sys::vt_max_pool,
    input: *const c_void,
    output: *mut c_void,
    indices: *mut i64,
) -> i32 {
    guard_done("max_pool2d", || {
        fn run<T: Element>(call: &sys::vt_max_pool, [input, output]: [*mut c_void; 2], indices: *mut i64) {
            let (input, output) = (Shared(input.cast::<T>()), Shared(output.cast::<T>()));
            let indices = Shared(indices);
            for_row_pairs(call, |pairs, whole, pooled| {
                // SAFETY: the shim passes dense tensors of such sizes that share no memory; parts do not overlap.
                let (input, output, indices) = unsafe {
                    (input.slice(whole), output.slice_mut(pooled.clone()), indices.slice_mut(pooled))
                };
                run_vectorized(MaxPool2d { pairs, input, output, indices });
            });
        }
        // SAFETY: the shim passes a description that lives during the call.
        let call = unsafe { &*call };
        by_dtype!(call.dtype, run(call, [input.cast_mut(), output], indices));
    })
}

pub(super) extern "C" fn max_pool2d_backward(
    call: *const sys::vt_max_pool,
    grad: *const c_void,
    indices: *const i64,
    output: *mut c_void,
) -> i32 {
    guard_done("max_pool2d_backward", || {
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
    })
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
