//! Back ends of devices: loading their libraries, and what any of them can be asked.

use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use voltaic_sys as sys;

use crate::device::Device;
use crate::error::TorchError;
use crate::ffi::check::check;

/// Loads a shared library for the rest of the process, its symbols visible to libraries that are loaded later.
///
/// # Errors
/// The loader's message, which names what is missing.
pub fn load_library(path: &Path) -> Result<(), String> {
    // SAFETY: running a library's initialisers is the purpose; the caller names libtorch's own libraries or a device
    // vendor's, which are made to be loaded into a process with libtorch.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library); // its registrations point into it
            Ok(())
        }
        Err(error) => Err(loader_message(&error)),
    }
}

/// What the system's loader said, which libloading keeps below its own message.
pub(in crate::ffi) fn loader_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Sets a variable of the environment for libraries that are loaded later.
///
/// To be called before other threads run that read the environment, as setting up an accelerator is.
pub fn set_environment(name: &str, value: &str) {
    // SAFETY: accelerators are set up before voltaic starts threads; Rust's own readers of the environment take the
    // same lock as this call.
    unsafe { std::env::set_var(name, value) };
}

/// Whether a back end for this kind of device is in libtorch's registries.
pub fn backend_is_loaded(device: Device) -> bool {
    // SAFETY: reads a registry.
    unsafe { sys::vt_backend_is_loaded(device.numbers().0) != 0 }
}

/// Devices that the back end of this kind of device sees; 0 if there is none.
///
/// # Errors
/// The back end's error.
pub fn backend_device_count(device: Device) -> Result<usize, TorchError> {
    let mut devices = 0;
    // SAFETY: the out-pointer is a valid i32 on this stack.
    check("device_count", unsafe { sys::vt_backend_device_count(device.numbers().0, &mut devices) })?;
    Ok(usize::try_from(devices).unwrap_or(0))
}

/// Waits until a device has done its work.
///
/// # Errors
/// The back end's error, also of work that failed; libtorch's if there is no back end.
pub fn synchronize(device: Device) -> Result<(), TorchError> {
    let (device_type, index) = device.numbers();
    // SAFETY: plain numbers; the shim looks the back end up.
    check("synchronize", unsafe { sys::vt_backend_synchronize(device_type, index) })
}

/// Whether libtorch can reach the default generator of a device, to seed it or to save its state.
///
/// # Errors
/// libtorch's, if it does not support this kind of device.
pub fn has_generator(device: Device) -> Result<bool, TorchError> {
    let mut has_generators = 0;
    let device_type = device.numbers().0;
    // SAFETY: the out-pointer is a valid i32 on this stack.
    check("generators", unsafe { sys::vt_backend_has_generators(device_type, &mut has_generators) })?;
    Ok(has_generators != 0)
}

/// What a back end's own allocator measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackendMemory {
    /// Bytes of the device.
    pub total: u64,
    /// Bytes that no process uses.
    pub free: u64,
    /// Bytes this process has in use.
    pub in_use: u64,
    /// Highest value of `in_use` since the last reset.
    pub max_in_use: u64,
    /// Allocations so far.
    pub num_allocs: u64,
    /// Frees so far.
    pub num_frees: u64,
}

/// What the allocator of a device measures; none if it does not, or is not set up yet.
///
/// # Errors
/// libtorch's, if there is no such device.
pub fn backend_memory(device: Device) -> Result<Option<BackendMemory>, TorchError> {
    let (device_type, index) = device.numbers();
    let (mut stats, mut is_measured) = (sys::vt_backend_memory_stats::default(), 0);
    // SAFETY: both out-pointers are valid and on this stack.
    check("memory_stats", unsafe {
        sys::vt_backend_memory(device_type, index, &mut stats, &mut is_measured)
    })?;
    let sys::vt_backend_memory_stats { total, free, in_use, max_in_use, num_allocs, num_frees } = stats;
    Ok((is_measured != 0).then_some(BackendMemory { total, free, in_use, max_in_use, num_allocs, num_frees }))
}

/// Starts the highest value of bytes in use again from the current one.
///
/// # Errors
/// libtorch's, if there is no such device.
pub fn reset_backend_peak(device: Device) -> Result<(), TorchError> {
    let (device_type, index) = device.numbers();
    // SAFETY: plain numbers; the shim looks the allocator up.
    check("reset_peak_memory_stats", unsafe { sys::vt_backend_reset_peak_memory(device_type, index) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let message = load_library(Path::new("/nowhere/libnothing.so")).unwrap_err();
        assert!(message.contains("/nowhere/libnothing.so"), "{message}");
    }

    #[test]
    fn a_machine_without_gpu_has_no_cuda_back_end() {
        if !backend_is_loaded(Device::Cuda(0)) {
            assert_eq!(backend_device_count(Device::Cuda(0)).unwrap(), 0);
            assert_eq!(backend_memory(Device::Cuda(0)).unwrap(), None);
            assert!(synchronize(Device::Cuda(0)).is_err());
        }
    }
}
