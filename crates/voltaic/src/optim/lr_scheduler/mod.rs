//! Learning rate schedules.
//!
//! Most schedules of PyTorch compute each learning rate from the one before, so that a change made by hand between
//! two steps is kept; the same is done here, with the same order of operations.

pub(super) mod basic;
pub(super) mod cosine;
pub(super) mod lambda;
pub(super) mod one_cycle;
pub(super) mod plateau;
pub(super) mod range_test;
pub(super) mod scheduler;
pub(super) mod sequential;
pub(super) mod stepper;
pub(super) mod swa;
pub(super) mod warmup;

pub use basic::{ConstantLr, ExponentialLr, LinearLr, MultiStepLr, PolynomialLr, StepLr};
pub use cosine::{CosineAnnealingLr, CosineAnnealingWarmRestarts};
pub use lambda::LambdaLr;
pub use one_cycle::{AnnealStrategy, OneCycleLr};
pub use plateau::{PlateauMode, ReduceLrOnPlateau, ThresholdMode};
pub use range_test::{LrRangeTest, OneCycle};
pub use scheduler::{BuildLrScheduler, LrScheduler, PerGroup};
pub use sequential::LinearWarmupCosine;
pub use swa::SwaLr;
pub use warmup::{WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType};
