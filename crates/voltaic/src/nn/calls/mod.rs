//! The one place that each call of a module goes through, and the hooks and interceptors that run around it.
//!
//! `call` dispatches a call: hooks before it, then the interceptors of the module, the outermost first, then the module's code, and
//! the hooks after it. `active` has what is active on this thread, and the calls in progress.

pub(super) mod active;
pub(super) mod backward;
pub(super) mod call;
pub(super) mod entry;
pub(super) mod hooks;
pub(super) mod reach;
pub(super) mod recompute;
mod registry;
pub(super) mod stash;
pub(super) mod surroundings;
pub(super) mod table;
pub(super) mod which;
