//! What happens, in order: stages, the training loop, evaluations.

pub(super) mod alike;
pub(super) mod eval;
pub(super) mod example;
pub(super) mod failure;
pub(super) mod fit;
pub(super) mod graphs;
pub(super) mod loaders;
pub(super) mod optimizers;
pub(super) mod running_statistics;
pub(super) mod stages;
