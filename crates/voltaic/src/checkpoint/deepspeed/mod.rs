//! DeepSpeed's checkpoints: folders in which each rank has a file.
//!
//! `folder` finds the files, `layout` says where elements lie, `model` and `partitions` read the two kinds of files, `whole` the
//! optimizer of stage 0, and `read` makes a checkpoint of all. `write` goes the other way. `docs/deepspeed.md` says what is kept.

mod folder;
mod layout;
mod model;
mod partitions;
mod read;
mod whole;
mod write;

pub(crate) use folder::is_deepspeed;
pub use read::{DeepSpeedRead, read_deepspeed};
pub use write::{DeepSpeedWrite, write_deepspeed};
