//! How checkpoints reach storage: a trait, the default, the one for HPUs. The asynchronous one is in `async_io.rs`.

use std::path::Path;

use serde_json::Value;

use super::atomic::{link_atomically, remove_file};
use super::checkpoint::Checkpoint;
use super::shards::gather::{as_on_rank_zero, gathered, save_as_file};
use super::shards::write::save;
use crate::distributed::ProcessGroup;
use crate::error::{ConfigError, Result};

/// Saves, loads and removes checkpoints; Lightning's `CheckpointIO`.
///
/// A run has one, in which calls come in order: a checkpoint is saved before it is linked to, and before the one that it
/// replaces is removed.
pub trait CheckpointIo: Send {
    /// Writes `checkpoint` so that `path` holds either the old file or the whole new one, whatever happens.
    ///
    /// # Errors
    /// If it cannot be written; if `storage_options` has options that this class does not support.
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()>;

    /// Writes a checkpoint of which this rank has the [shards](Checkpoint::shards), so that `path` leads to either the old one or the
    /// whole new one, whatever happens. Everything else is the same on all ranks, except for their local state: gradients, metrics
    /// and random states. The default gathers all shards on rank 0, which calls [`CheckpointIo::save_checkpoint`].
    ///
    /// # Collective
    /// All ranks must call it.
    ///
    /// # Errors
    /// On all ranks if one of them cannot write; if `storage_options` has options that this class does not support.
    fn save_shards(
        &mut self,
        checkpoint: &Checkpoint,
        ranks: &ProcessGroup,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()> {
        let whole = gathered(checkpoint, ranks, path)?;
        let saved = whole.map_or(Ok(()), |whole| self.save_checkpoint(&whole, path, storage_options));
        as_on_rank_zero(saved, ranks, path)
    }

    /// Whether a path leads to a file or folder as [`FileCheckpointIo`] writes it. Ranks with sharded states then read their shards
    /// of it, without [`CheckpointIo::load_checkpoint`]: those of a folder each by itself; a file is read by rank 0 for all, tensor by
    /// tensor.
    fn reads_shards(&self) -> bool {
        false
    }

    /// Reads a checkpoint; tensors are on the CPU.
    ///
    /// # Errors
    /// If the file is missing or damaged.
    fn load_checkpoint(&mut self, path: &Path) -> Result<Checkpoint> {
        Checkpoint::load(path)
    }

    /// Removes a checkpoint; that it is gone already is not an error.
    ///
    /// # Errors
    /// If it is there and cannot be removed.
    fn remove_checkpoint(&mut self, path: &Path) -> Result<()> {
        remove_file(path)
    }

    /// Makes `path` a symbolic link to the checkpoint `target`.
    ///
    /// # Errors
    /// If the folder cannot be written to.
    fn link_checkpoint(&mut self, target: &Path, path: &Path) -> Result<()> {
        link(target, path)
    }

    /// Waits until everything is on disk; called at the end of each fit.
    ///
    /// # Errors
    /// If something that was begun could not be done.
    fn teardown(&mut self) -> Result<()> {
        Ok(())
    }

    /// Gets what the accelerator would use by itself. A wrapper made without an inner one takes it.
    fn set_inner(&mut self, inner: Box<dyn CheckpointIo>) {
        drop(inner);
    }
}

/// Writes checkpoints to files, and those of which ranks have shards to folders, unless they are weights only; the default.
#[derive(Debug, Clone, Copy, Default)]
pub struct FileCheckpointIo;

impl CheckpointIo for FileCheckpointIo {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()> {
        refuse_storage_options("FileCheckpointIo", storage_options)?;
        checkpoint.save(path)
    }

    fn save_shards(
        &mut self,
        checkpoint: &Checkpoint,
        ranks: &ProcessGroup,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()> {
        refuse_storage_options("FileCheckpointIo", storage_options)?;
        match checkpoint.training {
            Some(_) => save(checkpoint, ranks, path),
            None => save_as_file(checkpoint, ranks, path),
        }
    }

    fn reads_shards(&self) -> bool {
        true
    }
}

/// Writes checkpoints of a device that only the trainer's thread may touch: all tensors are on the host before the
/// first byte is written. The default on HPUs; Lightning's `HPUCheckpointIO`.
#[derive(Debug, Clone, Copy, Default)]
pub struct HpuCheckpointIo;

impl CheckpointIo for HpuCheckpointIo {
    /// # Sync
    /// Reads all tensors back.
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()> {
        refuse_storage_options("HpuCheckpointIo", storage_options)?;
        checkpoint.to_host()?.save(path)
    }

    /// # Sync
    /// Reads this rank's tensors back, weights alone piece by piece.
    fn save_shards(
        &mut self,
        checkpoint: &Checkpoint,
        ranks: &ProcessGroup,
        path: &Path,
        storage_options: Option<&Value>,
    ) -> Result<()> {
        refuse_storage_options("HpuCheckpointIo", storage_options)?;
        match checkpoint.training {
            Some(_) => save(&checkpoint.to_host()?, ranks, path),
            None => save_as_file(checkpoint, ranks, path),
        }
    }

    fn reads_shards(&self) -> bool {
        true
    }
}

/// Files take no options: whatever was meant by them would not happen.
fn refuse_storage_options(class: &str, storage_options: Option<&Value>) -> Result<()> {
    let names = match storage_options {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(options)) => options.keys().cloned().collect::<Vec<_>>().join(", "),
        Some(other) => other.to_string(),
    };
    let names = if names.is_empty() { "{}".to_owned() } else { names };
    Err(ConfigError::new(
        "Trainer.save_checkpoint(.., storage_options)",
        format!("{class} supports no storage options, but was given {names}"),
        format!("leave storage_options out, or give the trainer a CheckpointIo that supports them in place of {class}"),
    )
    .into())
}

/// Makes `path` a symbolic link to `target`, by its name alone if they are in the same folder.
fn link(target: &Path, path: &Path) -> Result<()> {
    let target = match (target.parent() == path.parent(), target.file_name()) {
        (true, Some(name)) => Path::new(name),
        _ => target,
    };
    link_atomically(target, path)
}
