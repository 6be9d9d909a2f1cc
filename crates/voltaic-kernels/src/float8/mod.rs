//! Numbers of 8 bits: casts with the largest magnitude, and the scales of fp8 training.

pub(crate) mod cast;
pub(crate) mod format;
pub(crate) mod scale;
