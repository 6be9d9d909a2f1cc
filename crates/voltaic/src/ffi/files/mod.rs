//! Files that are read and written while the caller goes on: memory in whole blocks, transfers, and who carries them out.

pub(super) mod buffer;
pub(super) mod engine;
mod ring;
mod threads;
pub(super) mod transfer;
