//! Facts about tensors that tch does not tell.

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::check;

/// Device type and index of a tensor, numbered as in c10.
pub fn device_numbers(tensor: &Tensor) -> Result<(i32, i32), TorchError> {
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

/// A tensor that several threads may read at the same time.
///
/// Nothing hands out a way to change it: the tensor inside is reached only through [`SharedTensor::get`], and
/// the data that it held when it was wrapped must not be changed through another handle.
#[derive(Debug)]
pub struct SharedTensor(Tensor);

// SAFETY: libtorch's reference counts are atomic and its read-only operators (index_select, narrow, copy from)
// take no lock and write nothing to their inputs. A tensor without autograd history has no lazily written state;
// `new` detaches, which gives the wrapper a TensorImpl of its own.
unsafe impl Sync for SharedTensor {}

impl SharedTensor {
    /// Wraps a tensor for reading. Later in-place changes of `tensor` would be seen, and are a data race.
    pub fn new(tensor: &Tensor) -> Self {
        Self(tensor.detach())
    }

    /// The tensor, to be read only.
    pub fn get(&self) -> &Tensor {
        &self.0
    }
}
