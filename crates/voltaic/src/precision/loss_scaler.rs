//! DeepSpeed's scaling of the loss, which differs from PyTorch's ([`GradScaler`](super::GradScaler)) in when the scale changes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use crate::error::{ConfigError, Result};

/// How the loss is scaled with float16 weights: DeepSpeed's section `fp16`.
#[derive(Defaults, Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LossScalerConfig {
    /// A constant scale; 0 for one that changes.
    #[schemars(range(min = 0))]
    pub loss_scale: f64,
    /// The scale that changes begins with 2 to the power of this.
    #[default(16)]
    pub initial_scale_power: u32,
    /// Steps without an overflow after which it doubles.
    #[schemars(range(min = 1))]
    #[default(1000)]
    pub loss_scale_window: u64,
    /// Overflows before it is halved.
    #[schemars(range(min = 1))]
    #[default(2)]
    pub hysteresis: u64,
    /// Whether each step without an overflow lets as many overflows pass again.
    pub consecutive_hysteresis: bool,
    /// Least scale; an overflow there ends the run.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[default(1.0)]
    pub min_loss_scale: f64,
}

impl LossScalerConfig {
    /// The scaler with these settings.
    pub fn build(&self) -> LossScaler {
        if self.loss_scale > 0.0 {
            return LossScaler::Static(StaticLossScaler::new(self.loss_scale));
        }
        LossScaler::Dynamic(DynamicLossScaler::new(
            self.initial_scale_power,
            self.loss_scale_window,
            self.hysteresis,
            self.consecutive_hysteresis,
            self.min_loss_scale,
        ))
    }
}

/// What scales the loss, and leaves out steps whose gradients are not finite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossScaler {
    /// The scale changes.
    Dynamic(DynamicLossScaler),
    /// The scale is constant.
    Static(StaticLossScaler),
}

impl LossScaler {
    /// The factor of the next loss.
    pub fn get_scale(&self) -> f64 {
        match self {
            Self::Dynamic(scaler) => scaler.get_scale(),
            Self::Static(scaler) => scaler.scale,
        }
    }

    /// Steps that were left out so far.
    pub fn skipped_steps(&self) -> u64 {
        match self {
            Self::Dynamic(scaler) => scaler.skipped_steps(),
            Self::Static(scaler) => scaler.skipped_steps,
        }
    }

    /// Adapts the scale after a step, or after one that was left out for an overflow.
    ///
    /// # Errors
    /// As [`DynamicLossScaler::update`].
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        match self {
            Self::Dynamic(scaler) => scaler.update(overflow),
            Self::Static(scaler) => {
                scaler.skipped_steps += u64::from(overflow);
                Ok(())
            }
        }
    }
}

/// A constant factor of the loss.
///
/// Source: `deepspeed/runtime/fp16/loss_scaler.py`, `LossScaler`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StaticLossScaler {
    scale: f64,
    skipped_steps: u64,
}

impl StaticLossScaler {
    /// With this scale.
    pub fn new(scale: f64) -> Self {
        Self { scale, skipped_steps: 0 }
    }
}

/// Halves the scale at an overflow, but only after so many overflows (`hysteresis`), and doubles it after a number
/// of steps without one.
///
/// Source: `deepspeed/runtime/fp16/loss_scaler.py`, `DynamicLossScaler`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DynamicLossScaler {
    cur_scale: f64,
    cur_iter: u64,
    /// The step of the last overflow; -1 at first.
    last_overflow_iter: i64,
    cur_hysteresis: u64,
    scale_window: u64,
    min_scale: f64,
    hysteresis: u64,
    consecutive_hysteresis: bool,
    /// Steps that were left out so far.
    skipped_steps: u64,
}

impl DynamicLossScaler {
    /// A scaler with DeepSpeed's settings: the first scale is 2 to the power of `initial_scale_power`.
    pub fn new(
        initial_scale_power: u32,
        loss_scale_window: u64,
        hysteresis: u64,
        consecutive_hysteresis: bool,
        min_loss_scale: f64,
    ) -> Self {
        Self {
            cur_scale: 2.0_f64.powi(i32::try_from(initial_scale_power).unwrap_or(i32::MAX)),
            cur_iter: 0,
            last_overflow_iter: -1,
            cur_hysteresis: hysteresis,
            scale_window: loss_scale_window.max(1),
            min_scale: min_loss_scale,
            hysteresis,
            consecutive_hysteresis,
            skipped_steps: 0,
        }
    }

    /// The factor of the next loss.
    pub fn get_scale(&self) -> f64 {
        self.cur_scale
    }

    /// Steps that were left out so far.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps
    }

    /// Adapts the scale after a step, or after one that was left out for an overflow.
    ///
    /// # Errors
    /// An overflow at the least scale: it cannot be lowered any more.
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        let iter = i64::try_from(self.cur_iter).unwrap_or(i64::MAX);
        if overflow {
            self.skipped_steps += 1;
            if self.hysteresis <= 1 || self.cur_hysteresis <= 1 {
                if self.cur_scale == self.min_scale {
                    let what = format!(
                        "the gradients of step {} overflow at the least loss scale, {}",
                        self.cur_iter, self.min_scale
                    );
                    let remedy = "use bf16, a lower learning rate, or a lower min_loss_scale";
                    return Err(ConfigError::new("fp16.min_loss_scale", what, remedy).into());
                }
                self.cur_scale = (self.cur_scale / 2.0).max(self.min_scale);
            } else {
                self.cur_hysteresis -= 1;
            }
            self.last_overflow_iter = iter;
        } else {
            if self.consecutive_hysteresis {
                self.cur_hysteresis = self.hysteresis;
            }
            let stable = u64::try_from(iter - self.last_overflow_iter - 1).unwrap_or(0);
            if stable > 0 && stable.is_multiple_of(self.scale_window) {
                self.cur_hysteresis = self.hysteresis;
                let scale = self.cur_scale * 2.0;
                if scale <= f64::from(f32::MAX) {
                    self.cur_scale = scale; // DeepSpeed's becomes infinite
                }
            }
        }
        self.cur_iter += 1;
        Ok(())
    }
}
