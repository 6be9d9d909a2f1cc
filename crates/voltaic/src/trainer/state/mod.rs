//! What is saved, and where a run goes on.

pub(super) mod collect;
pub(super) mod find;
pub(super) mod restart;
pub(super) mod restore;
pub(super) mod write;
