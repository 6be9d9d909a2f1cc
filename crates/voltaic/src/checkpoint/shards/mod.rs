//! Checkpoints of state that is divided among ranks: a folder with a safetensors file of each rank and an index.

pub(super) mod folder;
pub(super) mod gather;
mod index;
pub(super) mod read;
#[cfg(test)]
mod tests;
pub(super) mod write;
