//! Checkpoints of sharded state: a folder with a safetensors file of each rank and an index.
//!
//! `write` writes the parts of a rank, and `folder` commits the folder by a rename when all ranks are done. `index` lists which rank's
//! file has which chunks of each tensor; `read` reads any chunk of any tensor by it, for any number of ranks. `gather` makes one
//! file from the parts instead, and `divide` parts of a whole checkpoint.

pub(super) mod divide;
pub(super) mod folder;
pub(super) mod gather;
mod index;
pub(super) mod read;
#[cfg(test)]
mod tests;
pub(super) mod write;
