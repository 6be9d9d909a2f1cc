//! Writes a checkpoint that is divided among ranks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use super::folder::{INDEX, exchange, file_name, flush_folder, is_own_folder, remove_folder};
use super::index::{Entry, FileEntry, Index};
use crate::checkpoint::atomic::temporary_folder;
use crate::checkpoint::checkpoint::{Checkpoint, CheckpointMeta, FORMAT_VERSION, Part};
use crate::checkpoint::format::{
    METADATA_ENTRY, OWN, cannot_hold, check_names, dtype, later_than_all, shared_tensors, tensors_of_rank,
};
use crate::checkpoint::stream::{Planned, bytes_of, write_tensors};
use crate::distributed::ProcessGroup;
use crate::error::{CheckpointError, Error, Problem, Result};

/// The metadata entry of a rank's file: which checkpoint and rank it is of.
pub(super) const METADATA_KEY: &str = "voltaic_shard";

/// What the metadata entry holds.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub id: String,
    pub rank: usize,
    pub ranks: usize,
}

/// What a rank tells rank 0 of its file.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    file: FileEntry,
    tensors: Vec<Slice>,
    had_grad: Vec<String>,
    logged: Value,
}

/// What a rank has of a tensor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Slice {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub start: usize,
    pub len: usize,
}

/// Saves a checkpoint of which each rank brings its parts. The folder appears under its name when all files are on disk; until
/// then, and if a rank fails, what was there stays.
///
/// # Collective
/// All ranks must call it. The path of rank 0 counts; all must see its folder.
///
/// # Errors
/// [`CheckpointError::OnRanks`] on all ranks if one of them cannot write; [`DistributedError`](crate::error::DistributedError)
/// if one is gone.
pub(crate) fn save(checkpoint: &Checkpoint, group: &ProcessGroup, path: &Path) -> Result<()> {
    let is_first = group.rank() == 0;
    let (mut temporary, mut begun) = (None, Err(Problem::new("", "")));
    if is_first {
        begun = Temporary::make(path).map(|made| {
            let told = (made.path.clone(), made.id.clone());
            temporary = Some(made);
            told
        });
    }
    let not_saved = |problem: Problem| not_saved(path, problem);
    let (folder, id): (PathBuf, String) = group.broadcast_object(&begun, 0)?.map_err(not_saved)?;
    let owner = Owner { id, rank: group.rank(), ranks: group.world_size() };
    let own = write_own(checkpoint, &folder, &owner).map_err(|error| of_rank(owner.rank, error));
    let own = serde_json::to_vec(&own).map_err(|e| Error::io("serialize", path, e.into()))?;
    let told = group.gather_bytes(&own, 0)?;
    let finished = match temporary {
        Some(temporary) => temporary.finish(checkpoint, &told, path),
        None => Ok(()),
    };
    group.broadcast_object(&finished, 0)?.map_err(not_saved)
}

/// The error of all ranks.
pub(super) fn not_saved(path: &Path, problem: Problem) -> Error {
    CheckpointError::OnRanks { action: "save", path: path.to_path_buf(), problem }.into()
}

pub(super) fn of_rank(rank: usize, error: Error) -> Problem {
    let Problem { what, remedy } = error.into_problem("look at the file system of this rank");
    Problem::new(format!("rank {rank}: {what}"), remedy)
}

/// The folder of a checkpoint that is not complete, on rank 0; removed unless it is finished.
struct Temporary {
    path: PathBuf,
    id: String,
    /// Locked while the writers live.
    _lock: File,
    is_finished: bool,
}

impl Temporary {
    fn make(path: &Path) -> Result<Self, Problem> {
        let problem = |error: Error| of_rank(0, error);
        let path = std::path::absolute(path).map_err(|e| problem(Error::io("find", path, e)))?;
        if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) && !is_own_folder(&path) {
            let what = format!("{} is a folder with other things than a checkpoint in it", path.display());
            return Err(Problem::new(what, "choose another name, or move it away"));
        }
        let (folder, lock, id) = temporary_folder(&path).map_err(problem)?;
        Ok(Self { path: folder, id, _lock: lock, is_finished: false })
    }

    /// Writes the index, and gives the folder its name.
    fn finish(mut self, checkpoint: &Checkpoint, told: &[Vec<u8>], path: &Path) -> Result<(), Problem> {
        let mut all = Vec::with_capacity(told.len());
        for (rank, bytes) in told.iter().enumerate() {
            let told: Result<Told, Problem> = serde_json::from_slice(bytes).map_err(|e| {
                Problem::new(
                    format!("rank {rank} told of its file what is not understood: {e}"),
                    "save again",
                )
            })?;
            all.push(told?);
        }
        let index = index_of(checkpoint, all, self.id.clone())?;
        self.place(&index, path).map_err(|error| of_rank(0, error))
    }

    fn place(&mut self, index: &Index, path: &Path) -> Result<()> {
        let name = self.path.join(INDEX);
        let text = index.to_text().map_err(|e| Error::io("serialize", &name, e.into()))?;
        let mut file = create(&name)?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(|e| Error::io("write", &name, e))?;
        flush_folder(&self.path)?;
        let path = std::path::absolute(path).map_err(|e| Error::io("find", path, e))?;
        match path.symlink_metadata() {
            Ok(_) => exchange(&self.path, &path)?,
            Err(_) => std::fs::rename(&self.path, &path).map_err(|e| Error::io("rename to", &path, e))?,
        }
        self.is_finished = true;
        flush_folder(path.parent().unwrap_or(Path::new("/")))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_finished
            && let Err(error) = remove_folder(&self.path)
        {
            tracing::warn!("what was written of a checkpoint could not be removed: {error}");
        }
    }
}

fn create(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).open(path).map_err(|e| {
        if e.kind() == io::ErrorKind::NotFound {
            let what =
                "the folder that rank 0 has made is not there: use one on a file system that all ranks share";
            return Error::io("create", path, io::Error::other(what));
        }
        Error::io("create", path, e)
    })
}

/// A tensor of this rank's file, and what the index says of it; `None` if only this rank has it.
type Own<'a> = (Planned, &'a Tensor, Option<(Vec<usize>, usize)>);

/// Writes this rank's file.
fn write_own(checkpoint: &Checkpoint, folder: &Path, owner: &Owner) -> Result<Told> {
    let tensors = own_tensors(checkpoint, owner.rank)?;
    let text = serde_json::to_string(owner).map_err(|e| Error::io("serialize", folder, e.into()))?;
    let metadata = HashMap::from([(METADATA_KEY.to_owned(), text)]);
    let path = folder.join(file_name(owner.rank));
    let fail = |e| Error::io("write", &path, e);
    let mut writer = BufWriter::with_capacity(1 << 20, create(&path)?);
    let planned: Vec<Planned> = tensors.iter().map(|(planned, ..)| planned.clone()).collect();
    let written = write_tensors(&mut writer, &planned, metadata, &mut |index| bytes_of(tensors[index].1));
    let written = written.and_then(|written| writer.flush().map(|()| written)).map_err(fail)?;
    writer.get_ref().sync_all().map_err(|e| Error::io("flush to disk", &path, e))?;
    let slice = |(planned, tensor, place): &Own<'_>| {
        let (shape, start) = place.clone()?;
        let (name, dtype) = (planned.name.clone(), planned.dtype);
        Some(Slice { name, dtype, shape, start, len: tensor.numel() })
    };
    let training = checkpoint.training.as_ref();
    Ok(Told {
        file: FileEntry { bytes: written.bytes, crc32: format!("{:08x}", written.crc) },
        tensors: tensors.iter().filter_map(slice).collect(),
        had_grad: training.map(|training| training.had_grad.clone()).unwrap_or_default(),
        logged: training.map(|training| training.json["metrics"].clone()).unwrap_or_default(),
    })
}

/// What goes into the file of a rank: its parts, what it has to itself, and what is whole. Rank 0 writes most of that; the numbers
/// of optimizers come from the ranks that give them.
fn own_tensors(checkpoint: &Checkpoint, rank: usize) -> Result<Vec<Own<'_>>> {
    let module = &checkpoint.meta.module;
    check_names(&checkpoint.weights, module)?;
    let planned = |name: String, tensor: &Tensor| {
        let shape: Vec<usize> = tensor.size().iter().map(|&size| size as usize).collect();
        Ok::<_, Error>(Planned { dtype: dtype(tensor, &name, module)?, name, shape })
    };
    let mut own: Vec<Own<'_>> = Vec::new();
    for (name, tensor, is_of_optimizer) in shared_tensors(checkpoint) {
        if rank == 0 || is_of_optimizer {
            let planned = planned(name, tensor)?;
            let shape = planned.shape.clone();
            own.push((planned, tensor, Some((shape, 0))));
        }
    }
    let has_some = |part: &&Part| part.values.numel() > 0 || (rank == 0 && part.shape.contains(&0));
    for Part { name, shape, start, values } in checkpoint.parts.iter().filter(has_some) {
        let shape = shape.iter().map(|&size| size as usize).collect();
        own.push((planned(name.clone(), values)?, values, Some((shape, *start))));
    }
    if let Some(training) = &checkpoint.training {
        for (name, tensor) in tensors_of_rank(&training.grads, &training.metrics, &training.rng) {
            own.push((planned(format!("{OWN}{name}"), tensor)?, tensor, None));
        }
    }
    let mut names = HashSet::new();
    for (planned, ..) in &own {
        if planned.name == METADATA_ENTRY || !names.insert(planned.name.as_str()) {
            let what =
                format!("two tensors are called {}, or it is a name of the format's own", planned.name);
            return Err(cannot_hold(module, what, "give one another name"));
        }
    }
    Ok(own)
}

fn index_of(checkpoint: &Checkpoint, told: Vec<Told>, id: String) -> Result<Index, Problem> {
    let meta = CheckpointMeta {
        format_version: FORMAT_VERSION,
        voltaic_version: env!("CARGO_PKG_VERSION").to_owned(),
        ..checkpoint.meta.clone()
    };
    let mut index = Index::new(id, later_than_all(), meta);
    index.num_optimizers = checkpoint.training.as_ref().map_or(0, |training| training.optimizers.len());
    index.training = checkpoint.training.as_ref().map(|training| training.json.clone());
    index.tied = checkpoint.tied.iter().cloned().collect();
    let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
    let mut had_grad: HashSet<String> = HashSet::new();
    for (rank, told) in told.into_iter().enumerate() {
        index.files.push(told.file);
        if rank > 0 && index.training.is_some() {
            index.ranks.push(told.logged);
        }
        for name in told.had_grad {
            if had_grad.insert(name.clone()) {
                index.had_grad.push(name);
            }
        }
        for Slice { name, dtype, shape, start, len } in told.tensors {
            let new = || Entry { dtype, shape: shape.clone(), slices: Vec::new() };
            let entry = tensors.entry(name.clone()).or_insert_with(new);
            if (entry.dtype, &entry.shape) != (dtype, &shape) {
                let own = format!("{:?} {:?}", entry.dtype, entry.shape);
                let what =
                    format!("{name} is {dtype:?} {shape:?} on rank {rank}, but {own} on ranks before it");
                return Err(Problem::new(what, "keep the same tensors on all ranks"));
            }
            entry.slices.push((rank, start, len));
        }
    }
    for entry in tensors.values_mut() {
        entry.slices.sort_by_key(|&(_, start, _)| start);
    }
    index.tensors = tensors;
    let remedy = "save through the trainer on all ranks";
    index.problem().map_or(Ok(index), |what| Err(Problem::new(what, remedy)))
}
