//! Numbers of 8 bits: casts with the largest magnitude, and the scales of fp8 training.

pub(crate) mod cast;
pub(crate) mod format;
#[cfg(target_arch = "x86_64")]
pub(crate) mod halves;
pub(crate) mod scale;
