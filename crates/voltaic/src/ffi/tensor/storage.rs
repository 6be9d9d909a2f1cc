//! Storage of tensors: shared with other threads, and released and restored.

use std::ptr;
use std::sync::OnceLock;

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::{TorchError, TorchErrorKind};
use crate::ffi::check::check;
use crate::ffi::graph::frozen::note_writes;
use crate::ffi::tensor::rng::take;

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

/// The memory of a tensor, and of all that share it, while a strategy frees and restores it. The tensors keep their
/// identity, size and gradient.
///
/// A tensor without its memory must not be read or written: some operators of libtorch do not look, and end the process.
/// [`Parameter`](crate::nn::Parameter) sees to that for weights.
#[derive(Debug)]
pub struct ReleasableStorage {
    tensor: Tensor,
    /// Bytes of the memory that was released.
    released: Option<usize>,
}

impl ReleasableStorage {
    /// Of a tensor.
    pub fn of(tensor: &Tensor) -> Self {
        Self { tensor: tensor.shallow_clone(), released: None }
    }

    /// Frees the memory.
    ///
    /// # Errors
    /// libtorch's, if the tensor has no memory of its own.
    pub fn release(&mut self) -> Result<(), TorchError> {
        if self.released.is_some() {
            return Ok(());
        }
        let mut bytes = 0;
        // SAFETY: the tensor lives as long as self; the out-pointer is valid. No code reads the memory meanwhile, as the
        // type's documentation asks.
        check("release storage", unsafe {
            sys::vt_storage_release(self.tensor.as_ptr().cast_mut(), &mut bytes)
        })?;
        self.released = Some(bytes);
        note_writes();
        Ok(())
    }

    /// Gives memory back, whose contents are not set. Returns whether there was none.
    ///
    /// # Errors
    /// If memory is short.
    pub fn restore(&mut self) -> Result<bool, TorchError> {
        let Some(bytes) = self.released else { return Ok(false) };
        // SAFETY: the tensor lives as long as self.
        check("restore storage", unsafe { sys::vt_storage_restore(self.tensor.as_ptr().cast_mut(), bytes) })?;
        self.released = None;
        note_writes();
        Ok(true)
    }

    /// Puts the memory of `bytes` in the place of that of the tensor, whose values are then those. The memory lives as long as one of
    /// the two uses it. `bytes` is contiguous, on the device of the tensor, and as many bytes as the tensor had.
    ///
    /// # Errors
    /// libtorch's, if it is not.
    pub fn lend(&mut self, bytes: &Tensor) -> Result<(), TorchError> {
        let needed = self.bytes()?;
        let given = crate::dtype::bytes_of(bytes);
        if given != needed {
            let what = format!("{given} bytes are lent to a tensor of {needed}");
            return Err(TorchError::new("lend storage", TorchErrorKind::Other, &what));
        }
        // SAFETY: both tensors are borrowed for the call; the memory is as long as the tensor needs, and the tensor holds a handle to it.
        check("lend storage", unsafe {
            sys::vt_storage_lend(self.tensor.as_ptr().cast_mut(), bytes.as_ptr().cast_mut())
        })?;
        self.released = None;
        note_writes();
        Ok(())
    }

    /// Bytes of the memory, whether it is released or not.
    ///
    /// # Errors
    /// libtorch's, if the tensor has no storage.
    pub fn bytes(&self) -> Result<usize, TorchError> {
        Ok(match self.released {
            Some(bytes) => bytes,
            None => describe_storage(&self.tensor)?.1,
        })
    }

    /// Copies values into the memory, which is given back first. Autograd takes it for the same values as before.
    ///
    /// # Errors
    /// libtorch's, if the sizes do not fit or memory is short.
    pub fn refill(&mut self, values: &Tensor) -> Result<(), TorchError> {
        self.restore()?;
        // SAFETY: both tensors are borrowed for the call, and there is memory.
        check("refill storage", unsafe {
            sys::vt_storage_refill(self.tensor.as_ptr().cast_mut(), values.as_ptr().cast_mut())
        })?;
        note_writes();
        Ok(())
    }

    /// Whether the memory is freed.
    pub fn is_released(&self) -> bool {
        self.released.is_some()
    }
}

/// An id of the storage of a tensor, valid while it lives, and its size in bytes: 0 if it was released.
pub(crate) fn describe_storage(tensor: &Tensor) -> Result<(usize, usize), TorchError> {
    let (mut id, mut bytes) = (0, 0);
    // SAFETY: the tensor is borrowed for the call; the out-pointers are valid.
    check("describe storage", unsafe {
        sys::vt_storage_describe(tensor.as_ptr().cast_mut(), &mut id, &mut bytes)
    })?;
    Ok((id, bytes))
}

/// A tensor in pinned host memory with the size and dtype of `like`; its values are not set.
///
/// # Errors
/// If there is no device that copies from pinned memory, or memory is short.
pub fn empty_pinned(like: &Tensor) -> Result<Tensor, TorchError> {
    let mut pinned = ptr::null_mut();
    // SAFETY: the tensor is borrowed for the call; the out-pointer is valid.
    check("pinned memory", unsafe { sys::vt_empty_pinned(like.as_ptr().cast_mut(), &mut pinned) })?;
    Ok(take(pinned))
}

/// Why memory of the host cannot be pinned here, if that is so; tried once.
pub fn cannot_pin() -> Option<&'static str> {
    static FAILURE: OnceLock<Option<String>> = OnceLock::new();
    let failure = || match Tensor::f_zeros([1], (tch::Kind::Float, tch::Device::Cpu)) {
        Ok(probe) => empty_pinned(&probe).err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    FAILURE.get_or_init(failure).as_deref()
}

/// Copies values between a device and host memory, without waiting for the device if that memory is pinned: what comes to the host is
/// there after [`synchronize`](crate::ffi::synchronize), and what leaves it must not be overwritten before.
///
/// # Errors
/// libtorch's, if the sizes differ.
pub fn copy_async(to: &Tensor, from: &Tensor) -> Result<(), TorchError> {
    // SAFETY: both tensors are borrowed for the call, and libtorch keeps pinned memory alive until the copy is done.
    check("copy", unsafe { sys::vt_copy_async(to.as_ptr().cast_mut(), from.as_ptr().cast_mut()) })
}

/// Sets how often autograd takes a tensor, and all that share its count, for changed in place
/// (`torch._C._autograd._unsafe_set_version_counter`): a backward pass refuses what was saved at another count.
///
/// # Errors
/// libtorch's, if the version is negative, or the tensor was made in inference mode.
pub fn set_version(tensor: &Tensor, version: i64) -> Result<(), TorchError> {
    // SAFETY: the tensor is borrowed for the call, and its count is atomic.
    check("set version", unsafe { sys::vt_set_version(tensor.as_ptr().cast_mut(), version) })?;
    note_writes(); // that it counts now may be what it counted before
    Ok(())
}
