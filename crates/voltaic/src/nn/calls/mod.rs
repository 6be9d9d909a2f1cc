//! The one place that each call of a module goes through, and who hears it.

pub(super) mod backward;
pub(super) mod call;
pub(super) mod entry;
pub(super) mod hooks;
pub(super) mod reach;
mod registry;
pub(super) mod table;
pub(super) mod which;
