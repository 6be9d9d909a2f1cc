//! What one call of fit, validate, test or predict holds.

pub(super) mod agree;
pub(super) mod anomaly;
pub(super) mod batch;
pub(super) mod captured_optimizers;
pub(super) mod engine;
pub(super) mod graphs;
pub(super) mod guard;
pub(super) mod hooks;
pub(super) mod log;
pub(super) mod manual;
pub(super) mod options;
pub(super) mod run;
#[allow(clippy::module_inception)]
pub(super) mod session;
pub(super) mod snapshot;
pub(super) mod step;
pub(super) mod transfer;
pub(super) mod undo;
