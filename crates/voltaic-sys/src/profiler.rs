//! Raw declarations of `csrc/profiler/abi.h`.

use std::ffi::{c_char, c_void};

use crate::vt_error;

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct vt_profile_options {
    pub record_shapes: i32,
    pub profile_memory: i32,
    pub with_flops: i32,
    pub with_cuda: i32,
    pub all_threads: i32,
}

#[repr(C)]
pub struct vt_profile_event {
    pub name: *const c_char,
    pub shapes: *const c_char,
    pub start_ns: i64,
    pub duration_ns: i64,
    pub thread: u64,
    pub flops: i64,
    pub bytes: i64,
    pub scope: i32,
    pub device_type: i32,
    pub device_index: i32,
    pub is_async: i32,
}

unsafe extern "C" {
    pub fn vt_profile_prepare(options: vt_profile_options) -> *mut vt_error;
    pub fn vt_profile_start(options: vt_profile_options) -> *mut vt_error;
    pub fn vt_profile_stop(
        path: *const c_char,
        visit: Option<extern "C" fn(data: *mut c_void, event: *const vt_profile_event)>,
        data: *mut c_void,
    ) -> *mut vt_error;
    pub fn vt_profile_range_begin(name: *const c_char, range: *mut *mut c_void) -> *mut vt_error;
    pub fn vt_profile_range_end(range: *mut c_void);
}
