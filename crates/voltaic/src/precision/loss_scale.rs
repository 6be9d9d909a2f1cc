//! The scale of a run's loss, PyTorch's or DeepSpeed's.

use tch::{Kind, Tensor};

use super::grad_scaler::GradScaler;
use super::loss_scaler::LossScaler;
use crate::error::Result;

/// What scales the loss of a run.
#[derive(Debug, Clone)]
pub(crate) enum LossScale {
    /// With `16-mixed`.
    Grad(GradScaler),
    /// With weights in 16 bits that a strategy keeps in float32, too.
    Strategy {
        scaler: LossScaler,
        /// Whether all gradients since the scale was adapted were finite, if there were any.
        all_finite: Option<bool>,
    },
}

impl LossScale {
    /// The current factor.
    pub fn get_scale(&self) -> f64 {
        match self {
            Self::Grad(scaler) => scaler.get_scale(),
            Self::Strategy { scaler, .. } => scaler.get_scale(),
        }
    }

    /// Steps that were left out so far.
    pub fn skipped_steps(&self) -> u64 {
        match self {
            Self::Grad(scaler) => scaler.num_skipped_steps(),
            Self::Strategy { scaler, .. } => scaler.skipped_steps(),
        }
    }

    /// The loss times the scale, in float32: a float16 loss would overflow.
    ///
    /// # Errors
    /// libtorch's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        let scale = self.get_scale();
        if scale == 1.0 {
            return Ok(loss.shallow_clone());
        }
        Ok(loss.f_to_kind(Kind::Float)?.f_mul_scalar(scale)?)
    }

    /// Notes whether the gradients of an optimizer were finite.
    pub fn record(&mut self, finite: bool) {
        match self {
            Self::Grad(scaler) => scaler.record(finite),
            Self::Strategy { all_finite, .. } => *all_finite = Some(all_finite.unwrap_or(true) && finite),
        }
    }

    /// Adapts the scale by what was noted. Losses that were scaled before must have had their steps.
    ///
    /// # Errors
    /// As [`LossScaler::update`].
    pub fn adapt(&mut self) -> Result<()> {
        match self {
            Self::Grad(scaler) => scaler.adapt(),
            Self::Strategy { scaler, all_finite } => {
                if let Some(finite) = all_finite.take() {
                    scaler.update(!finite)?;
                }
            }
        }
        Ok(())
    }

    /// Whether schedules wait, too, when a step is left out: DeepSpeed's do, PyTorch's do not.
    pub fn holds_schedules(&self) -> bool {
        matches!(self, Self::Strategy { .. })
    }

    /// Restores what a checkpoint has, if it is of the same kind.
    pub fn restore(&mut self, saved_grad: Option<GradScaler>, saved: Option<LossScaler>) {
        match (self, saved_grad, saved) {
            (Self::Grad(own), Some(saved), _) => *own = saved,
            (Self::Strategy { scaler, .. }, _, Some(saved))
                if std::mem::discriminant(scaler) == std::mem::discriminant(&saved) =>
            {
                *scaler = saved;
            }
            _ => {}
        }
    }

    /// PyTorch's scaler, if it is that.
    pub fn grad_scaler(&self) -> Option<&GradScaler> {
        match self {
            Self::Grad(scaler) => Some(scaler),
            Self::Strategy { .. } => None,
        }
    }

    /// The strategy's scaler, if it is that.
    pub fn loss_scaler(&self) -> Option<&LossScaler> {
        match self {
            Self::Grad(_) => None,
            Self::Strategy { scaler, .. } => Some(scaler),
        }
    }
}
