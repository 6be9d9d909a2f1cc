//! The entries for float8, and the operators `voltaic::fp8_*` that call them.

use std::ffi::c_void;
use std::sync::OnceLock;

use voltaic_sys as sys;

use super::entries::{floats, floats_mut};
use super::guard::{failure, guard_done};
use super::host::hand_in_host;
use crate::error::TorchError;
use crate::ffi::check::check;
use crate::kernels::{self, Float8Format, slice_mut_of, slice_of};

/// Defines the operators on float8, once.
pub(in crate::ffi) fn define_float8() -> Result<(), TorchError> {
    static DEFINED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    DEFINED
        .get_or_init(|| {
            hand_in_host();
            let table = sys::vt_float8_kernels { failure, cast, largest, widen, new_scale, rows };
            // SAFETY: the shim copies the table, whose functions keep what csrc/kernels/abi.h asks of them.
            check("install_float8", unsafe { sys::vt_install_float8(&table) })
        })
        .clone()
}

fn format_of(format: i32) -> Float8Format {
    if format == sys::VT_E4M3 { Float8Format::E4m3 } else { Float8Format::E5m2 }
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

extern "C" fn widen(format: i32, input: *const c_void, len: i64, dtype: i32, output: *mut c_void) -> i32 {
    guard_done("from_float8", || {
        let len = len as usize;
        // SAFETY: as above.
        let (input, output) = unsafe { (slice_of(input.cast(), len), floats_mut(dtype, output, len)) };
        kernels::from_float8(input, output, format_of(format));
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
            if multiplies {
                let (input, codes) = (slice_of(input, rows * depth), slice_of(codes.cast(), columns * depth));
                let output = slice_mut_of(output, rows * columns);
                kernels::multiply_by_float8(input, codes, format_of(format), depth, output);
            }
        }
    })
}
