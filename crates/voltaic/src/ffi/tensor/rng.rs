//! libtorch's random number generators.

use std::ptr;

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::check;

/// Takes ownership of a tensor that a shim function wrote to its out-pointer.
pub(in crate::ffi) fn take(tensor: sys::vt_tensor) -> Tensor {
    // SAFETY: callers pass a pointer that a successful shim call has just written: a heap-allocated at::Tensor
    // without another owner, which is what tch frees with at_free.
    unsafe { Tensor::from_ptr(tensor) }
}

/// Seeds the default generators of all devices, as `torch.manual_seed`.
pub fn manual_seed(seed: u64) -> Result<(), TorchError> {
    // SAFETY: takes a plain integer; libtorch locks its generators.
    check("manual_seed", unsafe { sys::vt_manual_seed(seed) })
}

/// State of a device's default generator: a CPU `uint8` tensor, as `torch.get_rng_state`.
pub fn rng_state(device_type: i32, device_index: i32) -> Result<Tensor, TorchError> {
    let mut state = ptr::null_mut();
    // SAFETY: the out-pointer is valid for the call.
    check("get_rng_state", unsafe { sys::vt_rng_get_state(device_type, device_index, &mut state) })?;
    Ok(take(state))
}

/// Puts a device's default generator into a state from [`rng_state`].
pub fn set_rng_state(device_type: i32, device_index: i32, state: &Tensor) -> Result<(), TorchError> {
    // SAFETY: the tensor is borrowed for the call.
    let error = unsafe { sys::vt_rng_set_state(device_type, device_index, state.as_ptr().cast_mut()) };
    check("set_rng_state", error)
}

/// A random permutation of `0..len`, the same as `torch.randperm(len, generator=Generator().manual_seed(seed))`.
pub fn randperm(len: usize, seed: u64) -> Result<Vec<usize>, TorchError> {
    let mut permutation = ptr::null_mut();
    // SAFETY: the out-pointer is valid for the call.
    check("randperm", unsafe { sys::vt_randperm(len as i64, seed, &mut permutation) })?;
    let permutation = take(permutation);
    let mut indices = vec![0_i64; len];
    permutation.copy_data(&mut indices, len);
    Ok(indices.into_iter().map(|index| index as usize).collect())
}
