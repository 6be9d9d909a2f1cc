//! Buffers: tensors of a module that are not trained.

use std::ops::Deref;

use tch::Tensor;

use crate::error::Result;

/// A tensor of a module that is not trained but belongs to its state, such as a running mean.
#[derive(Debug)]
pub struct Buffer {
    tensor: Tensor,
    persistent: bool,
}

impl Buffer {
    /// A buffer that is saved in the state dict.
    pub fn new(tensor: Tensor) -> Self {
        Self { tensor: tensor.detach(), persistent: true }
    }

    /// A buffer that moves with the module but is not saved.
    pub fn non_persistent(tensor: Tensor) -> Self {
        Self { tensor: tensor.detach(), persistent: false }
    }

    /// The values.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Whether the state dict holds it.
    pub fn is_persistent(&self) -> bool {
        self.persistent
    }

    /// Replaces device, dtype or values, keeping the handle's identity.
    ///
    /// # Errors
    /// If libtorch cannot swap the data.
    pub fn set_data(&self, data: &Tensor) -> Result<()> {
        self.tensor.shallow_clone().f_set_data(data)?;
        Ok(())
    }
}

impl Deref for Buffer {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        self.tensor()
    }
}
