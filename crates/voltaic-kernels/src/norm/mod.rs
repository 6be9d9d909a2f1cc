//! Batch norm.

pub(crate) mod batch_norm;
pub(crate) mod loops;
