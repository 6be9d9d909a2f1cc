//! Checkpoints: one safetensors file with the weights under their own names and the training state beside them.
//!
//! A file appears under its name only when it is complete and on disk, so a crash at any moment leaves the previous
//! checkpoint whole. `docs/checkpoint_format.md` describes the layout.

mod async_io;
mod atomic;
mod below;
mod budget;
#[expect(clippy::module_inception, reason = "the struct of the folder")]
mod checkpoint;
mod format;
mod hugging_face;
mod io;
mod lightning;
mod loop_state;
mod peek;
pub mod pickle;
mod progress;
mod torch_file;

pub use async_io::AsyncCheckpointIo;
pub(crate) use atomic::temporary_file;
pub use atomic::{remove_file, remove_leftovers, write_atomically};
pub use below::is_checkpoint_below;
pub use budget::ReadLimits;
pub use checkpoint::{Checkpoint, CheckpointMeta, CheckpointPaths, FORMAT_VERSION, RankState, TrainingState};
pub(crate) use format::{rank_from_bytes, rank_to_bytes};
pub use format::{read, read_weights, write, write_weights};
pub use hugging_face::{from_hugging_face, to_hugging_face};
pub use io::{CheckpointIo, FileCheckpointIo, HpuCheckpointIo};
pub use lightning::{Converted, from_lightning, state_dict, to_lightning};
pub(crate) use loop_state::LoopState;
pub(crate) use peek::{peek, peek_whole};
pub use progress::Progress;
pub use torch_file::{read_torch, read_torch_within, write_torch};
