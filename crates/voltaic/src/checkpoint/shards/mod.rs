//! Checkpoints of sharded state: a folder with a safetensors file of each rank and an index.
//!
//! `write` writes the shards of a rank, and `folder` commits the folder by a rename when all ranks are done. `index` lists which rank's
//! file has which chunks of each tensor; `read` reads any chunk of any tensor by it, for any number of ranks. `gather` makes one
//! file from the shards instead, and `shard` shards of a checkpoint that is in one file.

pub(super) mod folder;
pub(super) mod gather;
mod index;
pub(super) mod read;
pub(super) mod shard;
#[cfg(test)]
mod tests;
pub(super) mod write;
