//! What is tried before a fit.

pub(super) mod batch_size_finder;
pub(super) mod flops;
pub(super) mod graphs;
pub(super) mod lr_finder;
pub(super) mod trial;
