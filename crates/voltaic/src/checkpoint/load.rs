//! Checkpoints by their path: one file, or a folder with a file of each rank.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use tch::Tensor;

use super::atomic::write_atomically;
use super::budget::ReadLimits;
use super::checkpoint::Checkpoint;
use super::deepspeed::{DeepSpeedRead, is_deepspeed, read_deepspeed};
use super::format::read as read_file;
use super::lightning::{Converted, from_lightning};
use super::masters::source;
use super::peek::{Beginning, peek_file, peek_whole_file};
use super::pickle::Value;
use super::shards::folder::is_folder;
use super::shards::read as shards;
use super::stream::{Planned, bytes_of, write_tensors};
use super::torch_file::read_torch;
use crate::config::open_file;
use crate::error::{CheckpointError, Error, Problem, Result};

/// Reads a checkpoint; see [`Checkpoint::load`].
///
/// # Errors
/// As [`Checkpoint::load`].
pub fn read(path: &Path) -> Result<Checkpoint> {
    read_within(path, ReadLimits::default())
}

/// Reads a checkpoint as [`read`] does. `limits` apply to a folder; other files have the default limits.
///
/// # Errors
/// As [`Checkpoint::load`].
pub(crate) fn read_within(path: &Path, limits: ReadLimits) -> Result<Checkpoint> {
    match () {
        () if is_deepspeed(path) => {
            let how = DeepSpeedRead { limits, ..DeepSpeedRead::default() };
            Ok(noted(read_deepspeed(path, &how)?, path))
        }
        () if is_folder(path) => shards::load(path, limits),
        () if is_torch(path)? => converted(&read_torch(path)?, path),
        () => read_file(path),
    }
}

/// Whether a file begins like one of `torch.save`.
pub(super) fn is_torch(path: &Path) -> Result<bool> {
    let fail = |e| Error::io("read checkpoint", path, e);
    let mut head = Vec::new();
    open_file(path).map_err(fail)?.take(4).read_to_end(&mut head).map_err(fail)?;
    Ok(head == b"PK\x03\x04")
}

/// A file of Lightning, or a state dict, as a checkpoint; the log has what is left out.
pub(super) fn converted(value: &Value, path: &Path) -> Result<Checkpoint> {
    let refuse = |error: Error| -> Error {
        let Problem { what, .. } = error.into_problem("convert it with --weights_only");
        let remedy = format!(
            "convert it with `voltaic convert {} NEW_NAME`, which takes --param_names and --weights_only",
            path.display()
        );
        CheckpointError::Unreadable { path: path.to_path_buf(), problem: Problem::new(what, remedy) }.into()
    };
    Ok(noted(from_lightning(value, None, false).map_err(refuse)?, path))
}

/// The checkpoint, whose notes go to the log.
fn noted(converted: Converted<Checkpoint>, path: &Path) -> Checkpoint {
    for note in converted.notes {
        tracing::warn!("{}: {note}", path.display());
    }
    converted.value
}

/// The weights alone, from a checkpoint or from any safetensors file.
///
/// # Errors
/// As [`Checkpoint::load`].
pub fn read_weights(path: &Path) -> Result<Vec<(String, Tensor)>> {
    if is_deepspeed(path) {
        let how = DeepSpeedRead { weights_only: true, ..DeepSpeedRead::default() };
        return Ok(noted(read_deepspeed(path, &how)?, path).weights);
    }
    if !is_folder(path) {
        return Ok(read(path)?.weights);
    }
    shards::Shards::open(path)?.all_weights(&HashMap::new(), ReadLimits::default())
}

impl Checkpoint {
    /// Reads a checkpoint, a file or the folder of one that was sharded among ranks, also by DeepSpeed; tensors are whole, and on the CPU.
    ///
    /// # Errors
    /// If the file is missing, damaged, or of a later version; of a folder, if this is so of one of its files.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        read(path.as_ref())
    }
}

/// Writes the weights of a folder as [`write_weights`](super::write_weights) does, one tensor in memory at a time; those that are among
/// `masters` with the values of what they name. Returns their number.
///
/// # Errors
/// If a file of the folder is missing or damaged, they are more than `limits` allow, or the output cannot be written.
pub(crate) fn export_weights(
    shards: &shards::Shards,
    masters: &HashMap<&str, &str>,
    limits: ReadLimits,
    path: &Path,
) -> Result<usize> {
    shards.check_growth(shards.weights().map(|(name, _)| source(masters, name)), 0, limits)?;
    let plan = |(name, shape): (&str, &[usize])| {
        Some(Planned {
            name: name.to_owned(),
            dtype: shards.dtype(source(masters, name))?,
            shape: shape.to_vec(),
        })
    };
    let planned: Vec<Planned> = shards.weights().filter_map(plan).collect();
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    // what is wrong with the folder says more than that the output cannot be written
    let mut failure = None;
    let written = write_atomically(path, |writer| {
        let mut read = |index: usize| {
            let tensor = shards.whole(source(masters, &planned[index].name)).map_err(|error| {
                let text = error.to_string();
                failure = Some(error);
                std::io::Error::other(text)
            })?;
            bytes_of(&tensor)
        };
        write_tensors(writer, &planned, metadata, &mut read).map(drop)
    });
    match failure {
        Some(error) => Err(error),
        None => written.map(|()| planned.len()),
    }
}

/// The beginning of a checkpoint, whose rest is not checked.
///
/// # Errors
/// If the file is missing or not voltaic's, nor safetensors; if a folder has no index.
pub(crate) fn peek(path: &Path) -> Result<Beginning> {
    if is_folder(path) { shards::peek(path) } else { peek_file(path) }
}

/// The beginning of a checkpoint, whose lengths and checksums are verified: with `(rank, ranks)` those of this rank's share of the files.
///
/// # Errors
/// As [`peek`], and if a file is damaged or missing.
pub(crate) fn peek_whole(path: &Path, share: (usize, usize)) -> Result<Beginning> {
    if is_folder(path) { shards::peek_whole(path, share) } else { peek_whole_file(path) }
}
