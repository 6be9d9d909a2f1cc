//! Tensors that several threads read.

use tch::Tensor;

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
