//! The numbers Rust uses agree with the libtorch that is linked.

use std::ffi::{CStr, CString};

#[test]
fn dtype_numbers_agree_with_tch() {
    let names = [
        ("uint8", 0),
        ("int8", 1),
        ("int16", 2),
        ("int32", 3),
        ("int64", 4),
        ("float16", 5),
        ("float32", 6),
        ("float64", 7),
        ("bool", 11),
        ("bfloat16", 15),
        ("float8_e5m2", 23),
        ("float8_e4m3fn", 24),
        ("no_such_dtype", -1),
    ];
    for (name, number) in names {
        let c_name = CString::new(name).expect("no NUL in the table");
        // SAFETY: c_name is a NUL-terminated string that outlives the call.
        assert_eq!(unsafe { voltaic_sys::vt_dtype_number(c_name.as_ptr()) }, number, "{name}");
    }
}

#[test]
fn libtorch_is_the_version_the_shim_was_written_for() {
    // SAFETY: the function returns a NUL-terminated string in static storage.
    let version = unsafe { CStr::from_ptr(voltaic_sys::vt_libtorch_version()) };
    assert_eq!(version.to_str().expect("ASCII"), "2.11.0");
}

#[test]
fn block_headers_are_laid_out_as_in_cpp() {
    use std::mem::{offset_of, size_of};
    use voltaic_sys::{VT_BLOCK_HEADER_BYTES, vt_block_header};
    assert_eq!((offset_of!(vt_block_header, twin), offset_of!(vt_block_header, pool)), (0, 8));
    assert!(size_of::<vt_block_header>() <= VT_BLOCK_HEADER_BYTES);
}

#[test]
fn without_the_linker_flags_tch_names_no_hpu() {
    // SAFETY: a pure function without arguments. The tests of this crate are linked as programs without voltaic-build.
    assert_eq!(unsafe { voltaic_sys::vt_tch_names_hpu() }, 0);
}
