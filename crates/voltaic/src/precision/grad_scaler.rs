//! Dynamic scaling of the loss, so that float16 gradients neither vanish nor overflow.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ffi;

/// Scales the loss up, gradients down, and skips steps with gradients that are not finite.
///
/// The scale doubles after 2000 steps in a row without such gradients, as long as float32 can hold it, and halves at each
/// step with them.
///
/// Source: `torch.amp.GradScaler`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GradScaler {
    scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u64,
    /// Steps in a row without gradients that are not finite.
    growth_tracker: u64,
    /// Steps that were left out so far.
    #[serde(default)]
    num_skipped_steps: u64,
    /// Whether all gradients were finite since the scale was adapted, if there were any.
    #[serde(skip)]
    all_finite: Option<bool>,
}

impl Default for GradScaler {
    /// PyTorch's settings: 65536, 2.0, 0.5, 2000.
    fn default() -> Self {
        Self::new(65536.0, 2.0, 0.5, 2000)
    }
}

impl GradScaler {
    /// A scaler that begins with `init_scale`.
    pub fn new(init_scale: f64, growth_factor: f64, backoff_factor: f64, growth_interval: u64) -> Self {
        Self {
            scale: init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            growth_tracker: 0,
            num_skipped_steps: 0,
            all_finite: None,
        }
    }

    /// The current factor.
    pub fn get_scale(&self) -> f64 {
        self.scale
    }

    /// Steps that were left out so far because gradients were not finite.
    pub fn num_skipped_steps(&self) -> u64 {
        self.num_skipped_steps
    }

    /// The loss times the scale, in float32: a float16 loss would overflow.
    ///
    /// # Errors
    /// libtorch's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.f_to_kind(Kind::Float)?.f_mul_scalar(self.scale)?)
    }

    /// Divides gradients by the scale, in place, and says whether all of them are finite.
    ///
    /// # Sync
    /// Reads one number back.
    ///
    /// # Errors
    /// libtorch's.
    pub fn unscale<'a>(&self, params: impl IntoIterator<Item = &'a Tensor>) -> Result<bool> {
        unscale_grads(params, 1.0 / self.scale)
    }

    /// Adapts the scale after a step, or after one that was left out because gradients were not finite.
    pub fn update(&mut self, all_finite: bool) {
        self.record(all_finite);
        self.adapt();
    }

    /// Notes what [`GradScaler::unscale`] found for one of several optimizers.
    pub(crate) fn record(&mut self, all_finite: bool) {
        self.num_skipped_steps += u64::from(!all_finite);
        self.all_finite = Some(self.all_finite.unwrap_or(true) && all_finite);
    }

    /// Adapts the scale by what was noted. Losses that were scaled before must have had their steps.
    pub(crate) fn adapt(&mut self) {
        match self.all_finite.take() {
            None => return,
            Some(false) => {
                self.scale *= self.backoff_factor;
                self.growth_tracker = 0;
                return;
            }
            Some(true) => self.growth_tracker += 1,
        }
        if self.growth_tracker == self.growth_interval {
            let scale = self.scale * self.growth_factor;
            if scale <= f64::from(f32::MAX) {
                self.scale = scale;
            }
            self.growth_tracker = 0;
        }
    }
}

/// Multiplies the gradients of parameters by `inverse`, in place, and says whether all of them are finite. Those of 16 bits of parameters
/// in float32 become float32, unless `inverse` is 1.
pub(crate) fn unscale_grads<'a>(params: impl IntoIterator<Item = &'a Tensor>, inverse: f64) -> Result<bool> {
    let params: Vec<&Tensor> = params.into_iter().collect();
    if inverse != 1.0 {
        ffi::TensorList::new(params.iter().copied())?.widen_grads()?;
    }
    let grads = params.into_iter().map(Tensor::grad).filter(|grad| grad.defined() && grad.numel() > 0);
    let mut grads: Vec<Tensor> = grads.collect();
    let mut are_finite = true;
    while let Some(first) = grads.first() {
        let like = (first.kind(), first.device()); // some may be offloaded
        let alike: Vec<Tensor> = grads.extract_if(.., |grad| (grad.kind(), grad.device()) == like).collect();
        are_finite &= unscale_alike(&alike, inverse)?;
    }
    Ok(are_finite)
}

fn unscale_alike(grads: &[Tensor], inverse: f64) -> Result<bool> {
    let Some(first) = grads.first() else { return Ok(true) };
    let list = ffi::TensorList::new(grads)?;
    if inverse != 1.0 {
        let inverse = Tensor::from(inverse).f_to_kind(Kind::Float)?.f_to_device(first.device())?;
        ffi::foreach_mul_tensor(&list, &inverse)?;
    }
    let largest = ffi::foreach_norm(&list, f64::INFINITY)?;
    Ok(largest.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0) // sync point
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_grad(values: &[f32]) -> Tensor {
        let parameter =
            Tensor::zeros([values.len() as i64], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        ffi::set_grad(&parameter, &Tensor::from_slice(values)).unwrap();
        parameter
    }

    #[test]
    fn gradients_are_unscaled_and_checked() {
        let scaler = GradScaler::new(4.0, 2.0, 0.5, 2);
        let (a, b) = (with_grad(&[4.0, -8.0]), with_grad(&[2.0]));
        assert!(scaler.unscale([&a, &b]).unwrap());
        assert_eq!(Vec::<f32>::try_from(a.grad()).unwrap(), [1.0, -2.0]);
        assert_eq!(Vec::<f32>::try_from(b.grad()).unwrap(), [0.5]);
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(!scaler.unscale([&a, &with_grad(&[1.0, bad])]).unwrap(), "{bad}");
        }
        let without = Tensor::zeros([1], (Kind::Float, tch::Device::Cpu));
        assert!(scaler.unscale([&without]).unwrap(), "nothing to scale");
        assert!(scaler.unscale([&a, &with_grad(&[])]).unwrap(), "no element");
    }

    #[test]
    fn the_scale_follows_pytorch() {
        let mut scaler = GradScaler::new(1024.0, 2.0, 0.5, 2);
        let scales: Vec<f64> = [true, true, true, false, true, true, true]
            .into_iter()
            .map(|all_finite| {
                scaler.update(all_finite);
                scaler.get_scale()
            })
            .collect();
        assert_eq!(scales, [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]);
        assert_eq!(scaler.num_skipped_steps(), 1);
        let mut largest = GradScaler::new(f64::from(f32::MAX) / 1.5, 2.0, 0.5, 1);
        let scale = largest.get_scale();
        largest.update(true);
        assert_eq!(largest.get_scale(), scale, "twice of it is infinite in float32");
        let saved = serde_json::to_string(&scaler).unwrap();
        assert_eq!(serde_json::from_str::<GradScaler>(&saved).unwrap(), scaler);
    }
}
