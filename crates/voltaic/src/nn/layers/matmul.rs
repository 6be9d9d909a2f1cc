//! The product of two tensors as a module.

use tch::Tensor;

use crate::error::Result;
use crate::nn::calls::call::within_call_of;
use crate::nn::compute::{Compute, ComputeMode};
use crate::nn::module::Module;

/// The product of two tensors, as `torch.matmul`, as a module: it can be measured and quantized for fp8 inference, which functions cannot.
///
/// ```
/// use voltaic::nn::Matmul;
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// # let (query, key) = (Tensor::ones([2, 5, 8], (Kind::Float, tch::Device::Cpu)), Tensor::ones([2, 8, 5], (Kind::Float, tch::Device::Cpu)));
/// let scores = Matmul::new().multiply(&query, &key)?;
/// assert_eq!(scores.size(), [2, 5, 5]);
/// # Ok(())
/// # }
/// ```
///
/// Source: the `Matmul` modules of optimum-habana's models.
#[derive(Module, Debug, Default)]
pub struct Matmul {
    /// In which numbers it computes.
    pub(in crate::nn) compute: ComputeMode,
}

impl Matmul {
    /// The module.
    pub fn new() -> Self {
        Self::default()
    }

    /// The product of `a` `[*, m, k]` and `b` `[*, k, n]`.
    ///
    /// # Errors
    /// If the shapes do not fit together.
    pub fn multiply(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let [output] = within_call_of(self, [a, b], |[a, b]| {
            Ok([match self.compute.get() {
                Compute::Quantized(layer) => layer.matmul(a, b)?,
                Compute::Measured(observer) => {
                    observer.inputs(&[a, b])?;
                    let output = a.f_matmul(b)?;
                    observer.output(&output)?;
                    output
                }
                Compute::Unmeasured(name) => return Err(name.error()),
                Compute::Plain | Compute::Fp8(_) => a.f_matmul(b)?,
            }])
        })?;
        Ok(output)
    }
}
