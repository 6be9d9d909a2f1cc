//! The entries for float8, and the operators `voltaic::fp8_*` that call them.

use std::ffi::c_void;
use std::sync::OnceLock;

use voltaic_sys as sys;

use super::entries::{floats, floats_mut, format_of};
use super::guard::{failure, guard_done, guard_some};
use super::host::hand_in_host;
use crate::error::TorchError;
use crate::ffi::check::check;
use crate::kernels::{self, Bf16, Matrix, MatrixMut, slice_mut_of, slice_of};

/// Defines the operators on float8, once.
pub(in crate::ffi) fn define_float8() -> Result<(), TorchError> {
    static DEFINED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    DEFINED
        .get_or_init(|| {
            hand_in_host();
            let table = sys::vt_float8_kernels { failure, cast, largest, widen, new_scale, rows, product };
            // SAFETY: the shim copies the table, whose functions keep what csrc/kernels/abi.h asks of them.
            check("install_float8", unsafe { sys::vt_install_float8(&table) })
        })
        .clone()
}

extern "C" fn cast(
    dtype: i32,
    input: *const c_void,
    len: i64,
    format: i32,
    scale: f32,
    seed: *const u64,
    output: *mut c_void,
    amax: *mut f32,
) -> i32 {
    guard_done("to_float8", || {
        let len = len as usize;
        // SAFETY: the shim passes dense tensors that live during the call, the output a new one; the seed is null or a number.
        unsafe {
            let seed = seed.as_ref().copied();
            let (input, output) = (floats(dtype, input, len), slice_mut_of(output.cast(), len));
            *amax = kernels::to_float8(input, output, format_of(format), scale, seed);
        }
    })
}

extern "C" fn largest(dtype: i32, input: *const c_void, len: i64, amax: *mut f32) -> i32 {
    guard_done("largest_magnitude", || {
        // SAFETY: as above.
        unsafe { *amax = kernels::largest_magnitude(floats(dtype, input, len as usize)) }
    })
}

extern "C" fn widen(
    format: i32,
    input: *const c_void,
    len: i64,
    scale: f32,
    dtype: i32,
    output: *mut c_void,
) -> i32 {
    guard_done("from_float8", || {
        let len = len as usize;
        // SAFETY: as above.
        let (input, output) = unsafe { (slice_of(input.cast(), len), floats_mut(dtype, output, len)) };
        kernels::from_float8(input, output, format_of(format), scale);
    })
}

extern "C" fn new_scale(amax: f32, before: f32, format: i32, margin: i32, scale: *mut f32) -> i32 {
    guard_done("new_scale", || {
        let new = kernels::new_scale(amax, before, format_of(format).max(), margin);
        // SAFETY: the shim passes the address of a number.
        unsafe { *scale = new }
    })
}

extern "C" fn rows(
    input: *const f32,
    rows: i64,
    codes: *const c_void,
    columns: i64,
    depth: i64,
    format: i32,
    output: *mut f32,
    is_known: *mut i32,
) -> i32 {
    guard_done("multiply_by_float8", || {
        let [rows, columns, depth] = [rows, columns, depth].map(|size| size as usize);
        let multiplies = kernels::multiplies_float8(rows);
        // SAFETY: the shim passes dense tensors of these sizes that live during the call, the output a new one.
        unsafe {
            *is_known = multiplies.into();
            if multiplies && !input.is_null() {
                let (input, codes) = (slice_of(input, rows * depth), slice_of(codes.cast(), columns * depth));
                let output = slice_mut_of(output, rows * columns);
                kernels::multiply_by_float8(input, codes, format_of(format), depth, output);
            }
        }
    })
}

extern "C" fn product(call: *const sys::vt_product) -> i32 {
    guard_some("multiply_bf16", || {
        // SAFETY: the shim passes null or a description of tensors that live during the call.
        let call = unsafe { call.as_ref() };
        if let (Some(call), true) = (call, kernels::multiplies_bf16()) {
            // SAFETY: factors that are there, and a dense output of its own.
            unsafe { multiply(call) };
        }
        kernels::multiplies_bf16()
    })
}

/// # Safety
/// The factors must be there, in bfloat16, and a dense output in float32 that shares no memory with them; all have numbers.
unsafe fn multiply(call: &sys::vt_product) {
    let [rows, columns, depth] = [call.rows, call.columns, call.depth].map(|size| size as usize);
    let factor = |data: *const c_void, [batch, down, right]: [i64; 3], at: i64, shape: [usize; 2]| {
        let strides = [down, right].map(|stride| stride as usize);
        let len = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 1;
        let data = data.cast::<Bf16>().wrapping_offset((at * batch) as isize);
        // SAFETY: from the first number of a factor that is there to its last.
        Matrix::new(unsafe { slice_of(data, len) }, shape, strides)
    };
    for batch in 0..call.batches {
        let out = call.out.cast::<f32>().wrapping_offset((batch * call.out_strides[0]) as isize);
        // SAFETY: as this function asks.
        let out = MatrixMut::dense(unsafe { slice_mut_of(out, rows * columns) }, [rows, columns]);
        let a = factor(call.a, call.a_strides, batch, [rows, depth]);
        let b = factor(call.b, call.b_strides, batch, [depth, columns]);
        kernels::multiply_bf16(out, a, b, call.adds != 0);
    }
}
