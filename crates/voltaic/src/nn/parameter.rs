//! Parameters: handles to the trained tensors of a module.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use crate::error::Result;
use crate::ffi;

/// A trainable tensor of a module.
///
/// A handle: clones and tied weights share one libtorch tensor, and moving it to another device or dtype keeps its
/// identity, so that an optimizer that holds it goes on working. Layers reach their weights only through this type.
#[derive(Debug)]
pub struct Parameter {
    tensor: Tensor,
    id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl Parameter {
    /// A parameter with the values of `tensor`, detached from any graph, requiring grad.
    pub fn new(tensor: Tensor) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { tensor: tensor.detach().set_requires_grad(true), id }
    }

    /// Tells parameters apart within this process: clones of a handle (tied weights) have the same id.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The weights. Shares storage and gradient with every clone of this handle.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Replaces device, dtype or values, keeping the handle's identity. A gradient of the old kind is dropped.
    ///
    /// # Errors
    /// If libtorch cannot swap the data (an incompatible kind of tensor).
    pub fn set_data(&self, data: &Tensor) -> Result<()> {
        ffi::clear_grads([&self.tensor])?;
        self.tensor.shallow_clone().f_set_data(data)?;
        Ok(())
    }
}

impl Clone for Parameter {
    /// Another handle to the same tensor (a tied weight), not a copy of the values.
    fn clone(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), id: self.id }
    }
}

impl Deref for Parameter {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        self.tensor()
    }
}
