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
    pub operators: i32,
    pub records: i32,
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
    pub system_thread: i64,
    pub id: u64,
}

pub const VT_RECORD_DEVICES: i32 = 1;
pub const VT_RECORD_MEMORY: i32 = 2;
pub const VT_RECORD_KERNELS: i32 = 4;
pub const VT_RECORD_RANGES: i32 = 8;

pub const VT_ROW_OPERATORS: i32 = 0;
pub const VT_ROW_COPIES: i32 = 1;
pub const VT_ROW_GRAPHS: i32 = 2;
pub const VT_ROW_COLLECTIVES: i32 = 3;
pub const VT_ROW_KERNELS: i32 = 4;
pub const VT_ROW_RANGES: i32 = 5;

#[repr(C)]
pub struct vt_activity {
    pub name: *const c_char,
    pub details: *const c_char,
    pub launched: i64,
    pub began: i64,
    pub ended: i64,
    pub row: i32,
    pub device: i32,
    pub thread: u64,
    pub system_thread: i64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct vt_memory_change {
    pub pool: i32,
    pub bytes: i64,
    pub address: u64,
    pub allocated: u64,
    pub reserved: u64,
    pub at: i64,
    pub thread: u64,
    pub system_thread: i64,
}

#[repr(C)]
pub struct vt_profile_visitor {
    pub data: *mut c_void,
    pub event: extern "C" fn(data: *mut c_void, event: *const vt_profile_event),
    pub activity: extern "C" fn(data: *mut c_void, activity: *const vt_activity),
    pub memory: extern "C" fn(data: *mut c_void, change: *const vt_memory_change),
}

unsafe extern "C" {
    pub fn vt_profile_prepare(options: vt_profile_options) -> *mut vt_error;
    pub fn vt_profile_start(options: vt_profile_options) -> *mut vt_error;
    pub fn vt_profile_stop(
        path: *const c_char,
        visitor: *const vt_profile_visitor,
        left_out: *mut u64,
    ) -> *mut vt_error;
    pub fn vt_profile_ticks() -> u64;
    pub fn vt_profile_add_activity(activity: *const vt_activity);
    pub fn vt_profile_add_memory(change: *const vt_memory_change);
    pub fn vt_profile_range_begin(name: *const c_char, range: *mut *mut c_void) -> *mut vt_error;
    pub fn vt_profile_range_end(range: *mut c_void);
}
