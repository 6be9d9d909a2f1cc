//! What is saved, and where a run resumes.

pub(super) mod collect;
pub(super) mod find;
pub(super) mod restart;
pub(super) mod restore;
pub(super) mod write;
