//! Dropout.

use tch::Tensor;

use crate::error::Result;
use crate::nn::calls::call::within_call;
use crate::nn::check::probability;
use crate::nn::module::{Forward, Module};

/// Sets elements to zero at random in training mode, as `torch.nn.Dropout`
/// ([Hinton et al., 2012](https://arxiv.org/abs/1207.0580)).
///
/// Each element is kept with probability `1 - p` and then divided by it. In evaluation mode the output is the input.
///
/// ```
/// use voltaic::nn::{Dropout, Forward, ModuleExt};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let mut dropout = Dropout::new(0.5)?;
/// # let hidden = Tensor::ones([4, 256], (Kind::Float, tch::Device::Cpu));
/// let dropped = dropout.forward(&hidden)?;
/// dropout.eval();
/// assert_eq!(dropout.forward(&hidden)?, hidden);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Dropout {
    p: f64,
    #[module(training)]
    training: bool,
}

impl Dropout {
    /// A layer that drops each element with probability `p`.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if `p` is not between 0 and 1.
    pub fn new(p: f64) -> Result<Self> {
        probability("Dropout", p)?;
        Ok(Self { p, training: true })
    }

    /// Probability with which an element is dropped in training mode.
    pub fn p(&self) -> f64 {
        self.p
    }

    /// Probability with which an element is dropped now: `p` in training mode, else 0.
    ///
    /// For attention, which drops within its kernel: see
    /// [`scaled_dot_product_attention`](crate::nn::functional::scaled_dot_product_attention).
    pub fn active_p(&self) -> f64 {
        if self.training { self.p } else { 0.0 }
    }
}

impl Forward for Dropout {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(input.f_dropout(self.p, self.training)?))
    }
}
