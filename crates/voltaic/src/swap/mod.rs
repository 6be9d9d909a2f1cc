//! Tensors in files, for what does not fit into memory: ZeRO-Infinity's third level (arXiv:2104.07857).
//!
//! A [`SwapFolder`] makes the files of one rank, a [`SwapStore`] has tensors there by name and moves them through a fixed number of
//! buffers, while the caller goes on. The threads that read and write are [`FileEngine`](crate::ffi::FileEngine)'s.
//!
//! Files have no header: the elements of a tensor in little endian, from offset 0 on, and bytes without meaning up to a multiple of 4096.
//! They have DeepSpeed's names, and lose them as soon as they are open. So they vanish with the process, however it ends, two
//! runs may share a folder, and no user can change a file of a run by mistake. `ls -l /proc/<pid>/fd` shows them with the names that they
//! had, and `df` what they take.

mod folder;
mod store;

pub use folder::SwapFolder;
pub(crate) use folder::raise_open_files;
pub use store::{StoreStats, SwapOptions, SwapStore};
