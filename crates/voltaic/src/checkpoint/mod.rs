//! Checkpoints: one safetensors file with the weights under their own names and the training state beside them, or a folder with
//! such a file of each rank that has shards of the state.
//!
//! A file gets its name only when it is complete and on disk (`atomic`), so a crash at any moment leaves the previous checkpoint intact.
//! [`Checkpoint`] is the content, `format` the layout of a file, `shards` that of a folder; `docs/checkpoint_format.md` describes both.
//! `load` reads every kind, those of Lightning (`lightning`) and PyTorch (`torch_file`) among them. [`CheckpointIo`] is the trait for
//! other storage.

mod async_io;
mod atomic;
mod below;
mod budget;
#[expect(clippy::module_inception, reason = "the struct of the folder")]
mod checkpoint;
mod chunk;
mod deepspeed;
mod extra_state;
mod format;
mod hugging_face;
mod io;
mod lightning;
mod load;
mod loop_state;
mod masters;
mod one_file;
mod peek;
pub mod pickle;
mod progress;
mod shards;
mod stream;
mod torch_file;
mod unread;

pub use async_io::AsyncCheckpointIo;
pub(crate) use atomic::{Claim, remove_unfinished, temporary_file};
pub use atomic::{remove_file, remove_leftovers, write_atomically};
pub use below::is_checkpoint_below;
pub use budget::ReadLimits;
pub(crate) use checkpoint::shards_to_host;
pub use checkpoint::{
    Checkpoint, CheckpointMeta, CheckpointPaths, FORMAT_VERSION, RankState, Shard, TrainingState,
};
pub use chunk::{Chunk, ShardSpec};
pub(crate) use deepspeed::is_deepspeed;
pub use deepspeed::{DeepSpeedRead, DeepSpeedWrite, read_deepspeed, write_deepspeed};
pub use extra_state::fp8_extra_state;
pub(crate) use format::{callback_name, grad_name, optimizer_name, rank_from_bytes, rank_to_bytes};
pub use format::{write, write_weights};
pub use hugging_face::{from_hugging_face, to_hugging_face};
pub use io::{CheckpointIo, FileCheckpointIo, HpuCheckpointIo};
pub use lightning::{Converted, from_lightning, state_dict, to_lightning};
pub(crate) use load::{export_weights, peek, peek_whole, read_within};
pub use load::{read, read_weights};
pub(crate) use loop_state::{LoopState, OpenWindow, SavedGradients};
pub(crate) use masters::{MASTER, exact, parameter_of, use_master_weights};
pub(crate) use one_file::read_without_optimizers;
pub(crate) use peek::Beginning;
pub use progress::Progress;
pub(crate) use shards::folder::is_folder;
pub(crate) use shards::read::Shards;
pub use shards::shard::write_folder;
pub use torch_file::{read_torch, read_torch_within, write_torch};
pub(crate) use unread::{Failures, Unread};
