//! Training with states divided among ranks: ZeRO (arXiv:1910.02054).

pub(super) mod config;
