//! What is saved, and where a run goes on.

pub(super) mod collect;
pub(super) mod find;
