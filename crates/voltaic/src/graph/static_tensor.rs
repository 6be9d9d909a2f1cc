//! A tensor at a fixed place, as a graph reads and writes it.

use std::cell::RefCell;

use tch::{Kind, Tensor};

use super::places::describe;
use crate::device::Device;
use crate::error::{GraphError, Problem, Result};

/// A tensor that a graph reads, and that is filled before each replay, or one that it writes: the placeholders beside an
/// [`HpuGraph`](super::HpuGraph). A step can change it by `&self`, and it may be a field of a `#[derive(Module)]` struct,
/// where it is neither trained nor saved nor moved.
///
/// ```
/// use voltaic::graph::StaticTensor;
/// use voltaic::{Device, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// let static_input = StaticTensor::rand([4, 3], Device::Cpu)?;
/// static_input.copy_(&Tensor::ones([4, 3], (voltaic::Kind::Float, tch::Device::Cpu)))?;
/// assert!(static_input.copy_(&Tensor::ones([1, 3], (voltaic::Kind::Float, tch::Device::Cpu))).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StaticTensor {
    tensor: RefCell<Tensor>,
}

impl Default for StaticTensor {
    /// One that is not there yet, to be [`set`](Self::set) in the capture.
    fn default() -> Self {
        Self::new(Tensor::new())
    }
}

impl StaticTensor {
    /// This tensor.
    pub fn new(tensor: Tensor) -> Self {
        Self { tensor: RefCell::new(tensor) }
    }

    /// float32 from 0 to 1: `torch.rand(shape, device=device)`. The device must have been set up: an HPU is by
    /// `Trainer::builder().build()`.
    ///
    /// # Errors
    /// If there is no such device, or no room.
    pub fn rand(shape: impl AsRef<[i64]>, device: Device) -> Result<Self> {
        Ok(Self::new(Tensor::f_rand(shape.as_ref(), (Kind::Float, device.tch()))?))
    }

    /// int64 from 0 to `high - 1`: `torch.randint(high, shape, device=device)`.
    ///
    /// # Errors
    /// As [`StaticTensor::rand`].
    pub fn randint(high: i64, shape: impl AsRef<[i64]>, device: Device) -> Result<Self> {
        Ok(Self::new(Tensor::f_randint(high, shape.as_ref(), (Kind::Int64, device.tch()))?))
    }

    /// A handle of the tensor; undefined if none was set.
    pub fn get(&self) -> Tensor {
        self.tensor.borrow().shallow_clone()
    }

    /// Puts another tensor in its place, without its history: one that a captured step makes, and that each replay writes
    /// again.
    ///
    /// # Errors
    /// If libtorch fails to make a handle of it.
    pub fn set(&self, tensor: &Tensor) -> Result<()> {
        drop(self.tensor.replace(tensor.f_detach()?));
        Ok(())
    }

    /// Writes the values of `from` to where the tensor lies. Dtypes and devices may differ; a shape may not, and is not
    /// broadcast: the last batch of an epoch may be shorter.
    ///
    /// # Errors
    /// [`GraphError::Arguments`] if the shapes differ, or the tensor was not set.
    pub fn copy_(&self, from: &Tensor) -> Result<()> {
        let mut tensor = self.get();
        if !tensor.defined() || tensor.size() != from.size() {
            let mine = if tensor.defined() { describe(&tensor) } else { "not there yet".to_owned() };
            let what = format!("{} for a static tensor that is {mine}", describe(from));
            let remedy =
                "give batches of one shape (drop_last), or run this one without the graph".to_owned();
            return Err(GraphError::Arguments { problem: Problem::new(what, remedy) }.into());
        }
        let _no_grad = tch::no_grad_guard();
        tensor.f_copy_(from)?;
        Ok(())
    }
}

/// A field of a module that holds none of its weights.
macro_rules! no_weights {
    ($type:ty) => {
        impl crate::nn::Field for $type {
            fn members<'a>(&'a self, _: &str, _: &mut dyn FnMut(&str, crate::nn::Member<'a>)) {}

            fn children_mut<'a>(
                &'a mut self,
                _: &str,
                _: &mut dyn FnMut(&str, &'a mut dyn crate::nn::Module),
            ) {
            }
        }
    };
}
pub(super) use no_weights;

no_weights!(StaticTensor);
