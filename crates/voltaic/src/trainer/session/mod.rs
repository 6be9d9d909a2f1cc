//! What one call of fit, validate, test or predict holds.

pub(super) mod agree;
pub(super) mod engine;
pub(super) mod gradients;
pub(super) mod graphs;
pub(super) mod hooks;
mod place;
#[allow(clippy::module_inception)]
pub(super) mod session;
pub(super) mod step;
