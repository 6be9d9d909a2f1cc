//! What one call of fit, validate, test or predict holds.

pub(super) mod anomaly;
pub(super) mod captured_optimizers;
pub(super) mod data_hooks;
pub(super) mod guard;
pub(super) mod hooks;
pub(super) mod manual;
#[allow(clippy::module_inception)]
pub(super) mod session;
pub(super) mod signals;
pub(super) mod undo;
