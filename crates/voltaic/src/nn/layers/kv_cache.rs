//! How a cache of generation keeps the keys or values of a layer.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::nn::compute::{Compute, ComputeMode};
use crate::nn::module::Module;

/// Keys or values of an attention layer on their way to the cache of generation: they can be measured and quantized for fp8 inference,
/// so that the cache has one byte for each number.
///
/// An attention layer has one for its keys and one for its values, and gives them to
/// [`KvCache::attend_by`](crate::generation::KvCache::attend_by). In passes without a cache it lets them [`measure`](Self::measure).
///
/// ```
/// use voltaic::nn::KvCacheLayer;
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// # let keys = Tensor::ones([1, 2, 5, 8], (Kind::Float, tch::Device::Cpu));
/// let k_cache = KvCacheLayer::new();
/// assert_eq!(k_cache.quantize(&keys)?, keys); // it was not quantized
/// # Ok(())
/// # }
/// ```
///
/// Source: the `KVCache` modules of optimum-habana's models.
#[derive(Module, Debug, Default)]
pub struct KvCacheLayer {
    /// In which numbers the cache keeps them.
    pub(in crate::nn) compute: ComputeMode,
}

impl KvCacheLayer {
    /// The module.
    pub fn new() -> Self {
        Self::default()
    }

    /// Measures keys or values of a pass without a cache, if the module is to be quantized; else it does nothing.
    ///
    /// # Errors
    /// libtorch's; within a graph, whose replays do not measure.
    pub fn measure(&self, states: &Tensor) -> Result<()> {
        match self.compute.get() {
            Compute::Measured(observer) => observer.inputs(&[states]),
            _ => Ok(()),
        }
    }

    /// Keys or values as the cache keeps them: as they are, or their float8 codes as uint8.
    ///
    /// # Errors
    /// If the module was to be quantized and was not measured; libtorch's.
    pub fn quantize(&self, states: &Tensor) -> Result<Tensor> {
        match self.compute.get() {
            Compute::Quantized(layer) => layer.codes_of(states),
            Compute::Unmeasured(layer) => Err(layer.error()),
            Compute::Measured(observer) => {
                observer.inputs(&[states])?;
                observer.output(states)?;
                Ok(states.shallow_clone())
            }
            Compute::Plain | Compute::Fp8(_) => Ok(states.shallow_clone()),
        }
    }

    /// Keys or values of what [`KvCacheLayer::quantize`] gave, in `dtype`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn dequantize(&self, kept: &Tensor, dtype: Kind) -> Result<Tensor> {
        match self.compute.get() {
            Compute::Quantized(layer) => layer.numbers_of(kept, dtype),
            _ => Ok(kept.shallow_clone()),
        }
    }

    /// What the bytes that [`KvCacheLayer::quantize`] gave are: their dtype, and the number that they are multiplied by. None if it gave
    /// the states as they are.
    pub(crate) fn format(&self, kept: &Tensor) -> Result<Option<(Kind, Tensor)>> {
        match self.compute.get() {
            Compute::Quantized(layer) => layer.format_of_codes(kept).map(Some),
            _ => Ok(None),
        }
    }
}
