//! Which device a tensor lives on.

use tch::Tensor;
use voltaic_sys as sys;

use crate::device::Device;
use crate::error::{DeviceError, Result, TorchError};
use crate::ffi::check::check;

impl Device {
    /// The device a tensor lives on.
    ///
    /// # Errors
    /// [`DeviceError::Unknown`] if it is a kind of device that voltaic does not support, such as `meta`.
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let (device_type, index) = device_numbers(tensor)?;
        let index = usize::try_from(index).unwrap_or(0);
        match device_type {
            sys::VT_CPU => Ok(Self::Cpu),
            sys::VT_CUDA => Ok(Self::Cuda(index)),
            sys::VT_HPU => Ok(Self::Hpu(index)),
            other => Err(DeviceError::Unknown { text: format!("device type {other}") }.into()),
        }
    }
}

/// Device type and index of a tensor, numbered as in c10.
fn device_numbers(tensor: &Tensor) -> Result<(i32, i32), TorchError> {
    let (mut device_type, mut index) = (0, 0);
    // SAFETY: the tensor is borrowed for the call; the out-pointers are valid i32s on this stack.
    let error = unsafe { sys::vt_tensor_device(tensor.as_ptr().cast_mut(), &mut device_type, &mut index) };
    check("device", error)?;
    Ok((device_type, index))
}

/// Whether this program was linked so that tch can name an HPU (see `voltaic-build`).
pub fn tch_names_hpu() -> bool {
    // SAFETY: a pure function without arguments.
    unsafe { sys::vt_tch_names_hpu() != 0 }
}
