//! The emulated HPU back end of libtorch.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use voltaic_sys as sys;

use crate::error::Result;
use crate::ffi::check::check;
use crate::ffi::device::allocator::{install_device_pools, write_text};
use crate::ffi::kernels::install_kernels;

/// What an emulated HPU allows.
#[derive(Debug, Clone, Copy)]
pub struct HpuOptions {
    /// How many devices there are.
    pub num_devices: usize,
    /// Bit n is set if tensors may have the dtype that c10 numbers n.
    pub dtypes: u64,
    /// Why a dtype is refused.
    pub explain_dtype: fn(i32) -> String,
}

/// Most devices that can be emulated in one process.
pub const MAX_HPUS: usize = sys::VT_HPU_MAX_DEVICES;

static OPTIONS: OnceLock<HpuOptions> = OnceLock::new();

/// Registers the emulator as libtorch's back end for `hpu`, and the memory pools that it needs. Once per process.
///
/// To be called before threads that use libtorch start.
///
/// # Errors
/// libtorch's error if there is another HPU back end, or if libtorch has run a backward pass before this call.
pub fn init_hpu_emulator(options: HpuOptions) -> Result<()> {
    install_device_pools()?;
    install_kernels()?; // those of emulated devices are the CPU's
    let options = OPTIONS.get_or_init(|| options);
    let HpuOptions { num_devices, dtypes, .. } = *options;
    let raw = sys::vt_hpu_options { num_devices: num_devices as i32, dtypes, explain_dtype };
    // SAFETY: the options are read during the call; explain_dtype may run on any thread and does not unwind.
    check("hpu emulator", unsafe { sys::vt_hpu_emulator_init(&raw) })?;
    Ok(())
}

extern "C" fn explain_dtype(dtype: i32, text: *mut c_char, capacity: usize) {
    let message = OPTIONS.get().map(|options| (options.explain_dtype)(dtype)).unwrap_or_default();
    write_text(&message, text, capacity);
}

/// Makes an HPU back end that a library has registered usable: to be called once after loading the library.
///
/// # Errors
/// If the library registered none, or libtorch was used too early to notice one.
pub fn adopt_hpu_plugin() -> Result<()> {
    // SAFETY: reads and fills libtorch's registries; takes no arguments.
    Ok(check("hpu plugin", unsafe { sys::vt_hpu_adopt_plugin() })?)
}

/// How many results of operators on emulated HPUs were copied because their memory was not the device's. 0 unless an
/// operator's CPU kernel takes its memory elsewhere than from libtorch's allocator.
pub fn hpu_copied_outputs() -> u64 {
    // SAFETY: reads a counter.
    unsafe { sys::vt_hpu_copied_outputs() }
}

/// Calls each operator that has a CPU kernel with several made-up arguments, on the CPU and on `hpu:0`, and compares the
/// results byte by byte. Gives the operators that could be called, with how they first differed if they did. Seeds all
/// generators; the emulator must be set up.
///
/// # Errors
/// libtorch's error if the comparison itself fails.
pub fn compare_hpu_operators() -> Result<BTreeMap<String, Option<String>>> {
    let mut compared = BTreeMap::new();
    // SAFETY: `note` gets the map back as `data`, during the call and on this thread only, and does not unwind.
    let error = unsafe { sys::vt_hpu_compare_operators(note, (&raw mut compared).cast()) };
    check("compare_operators", error)?;
    Ok(compared)
}

extern "C" fn note(data: *mut c_void, op: *const c_char, difference: *const c_char) {
    // SAFETY: data is the map of `compare_hpu_operators`, to which there is no other reference while the shim runs.
    let compared = unsafe { &mut *data.cast::<BTreeMap<String, Option<String>>>() };
    // SAFETY: the shim gives a NUL-terminated string that lives for the call.
    let op = unsafe { CStr::from_ptr(op) }.to_string_lossy().into_owned();
    let entry = compared.entry(op).or_default();
    if !difference.is_null() && entry.is_none() {
        // SAFETY: as above.
        *entry = Some(unsafe { CStr::from_ptr(difference) }.to_string_lossy().into_owned());
    }
}
