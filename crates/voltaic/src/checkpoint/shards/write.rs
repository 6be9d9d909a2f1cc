//! Writes a sharded checkpoint.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use super::folder::{INDEX, exchange, file_name, flush_folder, is_own_folder, remove_folder};
use super::index::{Entry, FileEntry, Index};
use crate::checkpoint::atomic::temporary_folder;
use crate::checkpoint::checkpoint::{Checkpoint, CheckpointMeta, FORMAT_VERSION, Shard, TrainingState};
use crate::checkpoint::chunk::{Chunk, usizes};
use crate::checkpoint::format::{
    OWN, cannot_hold, check_names, check_unique, dtype, later_than_all, metadata_at, shared_tensors,
    tensors_of_rank,
};
use crate::checkpoint::stream::{BLOCK, Planned, bytes_of, of_size, patch, write_tensors};
use crate::distributed::ProcessGroup;
use crate::error::{CheckpointError, Error, Problem, Result};

/// What to do if the shards of the ranks do not fit together.
pub(super) const SAVE_SHARDS: &str = "give each element of a tensor on one rank; the trainer does";
/// The metadata entry of a rank's file: which checkpoint and rank it is of.
pub(super) const METADATA_KEY: &str = "voltaic_shard";

/// The metadata entry with the CRC-32 of each block of what follows the header: eight hexadecimal digits each, one behind the other.
pub(super) const BLOCKS_KEY: &str = "voltaic_blocks";
/// Digits of a CRC-32.
pub(super) const DIGITS: usize = 8;

/// What the metadata entry of the rank holds.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub id: String,
    pub rank: usize,
    pub ranks: usize,
}

/// What a rank has of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RankReport {
    tensors: Vec<ShardReport>,
    had_grad: Vec<String>,
    logged: Value,
}

/// What a rank has of a tensor.
#[derive(Debug, Serialize, Deserialize)]
struct ShardReport {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Offsets and sizes, in the order of the elements.
    chunks: Vec<(Vec<usize>, Vec<usize>)>,
}

/// What all ranks have.
#[derive(Debug, Default)]
pub(super) struct Merged {
    pub tensors: BTreeMap<String, Entry>,
    pub had_grad: Vec<String>,
    /// By rank.
    pub logged: Vec<Value>,
}

/// Saves a checkpoint of which each rank brings its shards. The folder appears under its name when all files are on disk; until
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
            let place = (made.path.clone(), made.id.clone());
            temporary = Some(made);
            place
        });
    }
    let not_saved = |problem: Problem| not_saved(path, problem);
    let (folder, id): (PathBuf, String) = group.broadcast_object(&begun, 0)?.map_err(not_saved)?;
    let owner = Owner { id, rank: group.rank(), ranks: group.world_size() };
    let own = write_own(checkpoint, &folder, &owner).map_err(|error| of_rank(owner.rank, error));
    let own = serde_json::to_vec(&own).map_err(|e| Error::io("serialize", path, e.into()))?;
    let all = group.gather_bytes(&own, 0)?;
    let finished = match temporary {
        Some(temporary) => temporary.finish(checkpoint, &all, path),
        None => Ok(()),
    };
    group.broadcast_object(&finished, 0)?.map_err(not_saved)
}

/// The error of all ranks.
pub(in crate::checkpoint) fn not_saved(path: &Path, problem: Problem) -> Error {
    CheckpointError::OnRanks { action: "save", path: path.to_path_buf(), problem }.into()
}

pub(in crate::checkpoint) fn of_rank(rank: usize, error: Error) -> Problem {
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
    fn finish(mut self, checkpoint: &Checkpoint, all: &[Vec<u8>], path: &Path) -> Result<(), Problem> {
        let (files, reports) = of_ranks::<(FileEntry, RankReport)>(all)?.into_iter().unzip();
        let index = index_of(checkpoint, files, reports, self.id.clone())?;
        self.place(&index, path).map_err(|error| of_rank(0, error))
    }

    fn place(&mut self, index: &Index, path: &Path) -> Result<()> {
        let name = self.path.join(INDEX);
        let text = index.to_text().map_err(|e| Error::io("serialize", &name, e.into()))?;
        Index::parse(&text, &name)?; // what cannot be read must not take the place of what can
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

/// What all ranks have sent, unless one of them has failed.
pub(super) fn of_ranks<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>, Problem> {
    let of_rank = |(rank, bytes): (usize, &Vec<u8>)| {
        let not_understood =
            |e| Problem::new(format!("the report of rank {rank} is not understood: {e}"), "save again");
        serde_json::from_slice::<Result<T, Problem>>(bytes).map_err(not_understood)?
    };
    all.iter().enumerate().map(of_rank).collect()
}

/// A tensor of this rank's file, and the chunks of the whole one that it has; `None` if only this rank has it.
pub(super) struct OwnTensor<'a> {
    pub planned: Planned,
    pub values: &'a Tensor,
    place: Option<(Vec<usize>, Vec<Chunk>)>,
}

/// Writes this rank's file.
fn write_own(checkpoint: &Checkpoint, folder: &Path, owner: &Owner) -> Result<(FileEntry, RankReport)> {
    let tensors = own_tensors(checkpoint, owner.rank)?;
    let path = folder.join(file_name(owner.rank));
    let planned: Vec<Planned> = tensors.iter().map(|own| own.planned.clone()).collect();
    let file = write_rank_file(create(&path)?, &planned, owner, &mut |index| bytes_of(tensors[index].values))
        .map_err(|e| Error::io("write", &path, of_size(e, &planned)))?;
    Ok((file, report(checkpoint, &tensors)))
}

/// Writes the file of a rank with these tensors, and flushes it to disk.
pub(super) fn write_rank_file(
    file: File,
    planned: &[Planned],
    owner: &Owner,
    bytes_of: &mut dyn FnMut(usize) -> io::Result<Vec<u8>>,
) -> io::Result<FileEntry> {
    let num_bytes: usize = planned.iter().filter_map(Planned::num_bytes).sum();
    let metadata = HashMap::from([
        (METADATA_KEY.to_owned(), serde_json::to_string(owner)?),
        (BLOCKS_KEY.to_owned(), "0".repeat(num_bytes.div_ceil(BLOCK) * DIGITS)),
    ]);
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    let mut written = write_tensors(&mut writer, planned, metadata, bytes_of)?;
    let digits: String = written.blocks.iter().map(|crc| format!("{crc:08x}")).collect();
    // the digits are in the header, which comes before what they are computed of
    let at = metadata_at(&written.header, BLOCKS_KEY).ok_or(io::ErrorKind::InvalidData)?;
    written.header[at..at + digits.len()].copy_from_slice(digits.as_bytes());
    patch(&mut writer, at as u64, digits.as_bytes())?;
    writer.flush()?;
    writer.get_ref().sync_all()?;
    Ok(FileEntry { bytes: written.bytes, crc32: format!("{:08x}", crc32fast::hash(&written.header)) })
}

/// What a rank reports to rank 0 about these tensors.
pub(super) fn report(checkpoint: &Checkpoint, tensors: &[OwnTensor<'_>]) -> RankReport {
    let shard = |own: &OwnTensor<'_>| {
        let (shape, chunks) = own.place.clone()?;
        let (name, dtype) = (own.planned.name.clone(), own.planned.dtype);
        let chunks = chunks.into_iter().map(|Chunk { offsets, sizes }| (offsets, sizes)).collect();
        Some(ShardReport { name, dtype, shape, chunks })
    };
    let training = checkpoint.training.as_ref();
    RankReport {
        tensors: tensors.iter().filter_map(shard).collect(),
        had_grad: training.map(|training| training.had_grad.clone()).unwrap_or_default(),
        logged: training.map(|training| training.json["metrics"].clone()).unwrap_or_default(),
    }
}

/// The contents of a rank's file: its shards, its local state, and unsharded values. Rank 0 writes most of the last; the numbers of
/// optimizers come from the ranks that have them.
pub(super) fn own_tensors(checkpoint: &Checkpoint, rank: usize) -> Result<Vec<OwnTensor<'_>>> {
    let module = &checkpoint.meta.module;
    check_names(&checkpoint.weights, module)?;
    let planned = |name: String, tensor: &Tensor| {
        Ok::<_, Error>(Planned { dtype: dtype(tensor, &name, module)?, name, shape: usizes(&tensor.size()) })
    };
    let mut own = Vec::new();
    for (name, values, is_of_optimizer) in shared_tensors(checkpoint) {
        if rank == 0 || is_of_optimizer {
            let planned = planned(name, values)?;
            let chunk = (values.numel() > 0).then(|| Chunk::whole(&planned.shape));
            let place = Some((planned.shape.clone(), chunk.into_iter().collect()));
            own.push(OwnTensor { planned, values, place });
        }
    }
    for Shard { name, spec, values } in &checkpoint.shards {
        let differs = || format!("has {} values for {} elements", values.numel(), spec.range.len());
        let differs = (values.numel() != spec.range.len()).then(differs);
        if let Some(what) = spec.problem().or(differs) {
            return Err(cannot_hold(module, format!("the shard of {name} {what}"), SAVE_SHARDS));
        }
        if values.numel() > 0 || (rank == 0 && spec.shape.contains(&0)) {
            let place = Some((usizes(&spec.shape), spec.rectangles()));
            own.push(OwnTensor { planned: planned(name.clone(), values)?, values, place });
        }
    }
    if let Some(training) = &checkpoint.training {
        let TrainingState { grads, metrics, rng, fp8, .. } = training;
        for (name, values) in tensors_of_rank(grads, metrics, rng, if rank == 0 { &[] } else { fp8 }) {
            own.push(OwnTensor { planned: planned(format!("{OWN}{name}"), values)?, values, place: None });
        }
    }
    check_unique(own.iter().map(|own| own.planned.name.as_str()), module)?;
    Ok(own)
}

/// Puts together what the ranks have.
///
/// # Errors
/// If a tensor has another dtype or shape on another rank, or the shards are not all of it once.
pub(super) fn merged(reports: Vec<RankReport>) -> Result<Merged, Problem> {
    let mut merged = Merged::default();
    let mut had_grad: HashSet<String> = HashSet::new();
    for (rank, report) in reports.into_iter().enumerate() {
        merged.logged.push(report.logged);
        for name in report.had_grad {
            if had_grad.insert(name.clone()) {
                merged.had_grad.push(name);
            }
        }
        for ShardReport { name, dtype, shape, chunks } in report.tensors {
            let new = || Entry::new(dtype, shape.clone());
            let entry = merged.tensors.entry(name.clone()).or_insert_with(new);
            if (entry.dtype, &entry.shape) != (dtype, &shape) {
                let own = format!("{:?} {:?}", entry.dtype, entry.shape);
                let what =
                    format!("{name} is {dtype:?} {shape:?} on rank {rank}, but {own} on ranks before it");
                return Err(Problem::new(what, "keep the same tensors on all ranks"));
            }
            entry.add(rank, chunks.into_iter().map(|(offsets, sizes)| Chunk { offsets, sizes }).collect());
        }
    }
    let ranks = merged.logged.len();
    for (name, entry) in &mut merged.tensors {
        entry
            .finish(ranks, &mut usize::MAX.clone())
            .map_err(|what| Problem::new(format!("{name} {what}"), SAVE_SHARDS))?;
    }
    Ok(merged)
}

/// The index of these files; it holds together.
fn index_of(
    checkpoint: &Checkpoint,
    files: Vec<FileEntry>,
    reports: Vec<RankReport>,
    id: String,
) -> Result<Index, Problem> {
    let meta = CheckpointMeta {
        format_version: FORMAT_VERSION,
        voltaic_version: env!("CARGO_PKG_VERSION").to_owned(),
        ..checkpoint.meta.clone()
    };
    let Merged { tensors, had_grad, logged } = merged(reports)?;
    let mut index = Index::new(id, later_than_all(), meta);
    (index.files, index.tensors, index.had_grad) = (files, tensors, had_grad);
    index.num_optimizers = checkpoint.training.as_ref().map_or(0, |training| training.optimizers.len());
    index.training = checkpoint.training.as_ref().map(|training| training.json.clone());
    index.tied = checkpoint.tied.iter().cloned().collect();
    if index.training.is_some() {
        index.ranks = logged.into_iter().skip(1).collect();
    }
    index.finish(usize::MAX).map_err(|what| Problem::new(what, SAVE_SHARDS))?;
    Ok(index)
}

/// Saves the shards of all ranks, which one process has; see [`save`].
///
/// # Errors
/// If the folder cannot be written, or the shards are not all of each tensor once.
pub(in crate::checkpoint) fn save_ranks(all: &[Checkpoint], path: &Path) -> Result<()> {
    let not_saved = |problem: Problem| not_saved(path, problem);
    let mut temporary = Temporary::make(path).map_err(not_saved)?;
    let write = |(rank, checkpoint)| {
        let owner = Owner { id: temporary.id.clone(), rank, ranks: all.len() };
        write_own(checkpoint, &temporary.path, &owner)
    };
    let written = all.iter().enumerate().map(write).collect::<Result<Vec<_>>>()?;
    let (files, reports) = written.into_iter().unzip();
    let index = index_of(&all[0], files, reports, temporary.id.clone()).map_err(not_saved)?;
    temporary.place(&index, path)
}

/// Writes the files of all ranks in one process. Returns the text of the index.
#[cfg(test)]
pub(super) fn write_ranks(all: &[Checkpoint], folder: &Path) -> Result<String, Problem> {
    let id = "an id".to_owned();
    let write = |(rank, checkpoint)| {
        let owner = Owner { id: id.clone(), rank, ranks: all.len() };
        write_own(checkpoint, folder, &owner).map_err(|error| of_rank(rank, error))
    };
    let written = all.iter().enumerate().map(write).collect::<Result<Vec<_>, _>>()?;
    let (files, reports) = written.into_iter().unzip();
    let index = index_of(&all[0], files, reports, id.clone())?;
    index.to_text().map_err(|error| Problem::new(error.to_string(), ""))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A GPT-2 by units: its blocks, and what is not in one.
    fn units() -> Vec<Vec<(String, Vec<usize>)>> {
        let of_block =
            |shape: &[usize], at: usize, tensor: usize| (format!("h.{at}.{tensor}"), shape.to_vec());
        let shapes: [&[usize]; 12] = [
            &[768],
            &[768],
            &[2304, 768],
            &[2304],
            &[768, 768],
            &[768],
            &[768],
            &[768],
            &[3072, 768],
            &[3072],
            &[768, 3072],
            &[768],
        ];
        let block =
            |at| shapes.iter().enumerate().map(|(tensor, shape)| of_block(shape, at, tensor)).collect();
        let rest: [(&str, &[usize]); 4] =
            [("wte", &[50257, 768]), ("wpe", &[1024, 768]), ("ln_f.weight", &[768]), ("ln_f.bias", &[768])];
        let rest = rest.map(|(name, shape)| (name.to_owned(), shape.to_vec()));
        (0..12).map(block).chain([rest.to_vec()]).collect()
    }

    /// What a rank has of a unit's tensors, which stand one behind the other.
    fn shards(unit: &[(String, Vec<usize>)], state: &str, rank: usize, ranks: usize) -> Vec<ShardReport> {
        let sizes = unit.iter().map(|(_, shape)| shape.iter().product::<usize>());
        let all: usize = sizes.clone().sum();
        let own = all * rank / ranks..all * (rank + 1) / ranks;
        let mut at = 0;
        let mut shards = Vec::new();
        for ((name, shape), size) in unit.iter().zip(sizes) {
            let range = own.start.clamp(at, at + size) - at..own.end.clamp(at, at + size) - at;
            at += size;
            if !range.is_empty() {
                let chunks = Chunk::whole(shape).rectangles(range).into_iter();
                let chunks = chunks.map(|Chunk { offsets, sizes }| (offsets, sizes)).collect();
                shards.push(ShardReport {
                    name: format!("{state}{name}"),
                    dtype: Dtype::F32,
                    shape: shape.clone(),
                    chunks,
                });
            }
        }
        shards
    }

    #[test]
    #[ignore = "measures; make stress runs it"]
    fn what_a_save_costs_rank_zero() {
        println!(
            "| ranks | a rank sends, bytes | rank 0 receives, bytes | makes and checks the index, s | index, bytes |"
        );
        println!("|---|---|---|---|---|");
        let units = units();
        let mut of_few = usize::MAX;
        for ranks in [8, 64, 512] {
            let sent = |rank| {
                let states = ["", "exp_avg.", "exp_avg_sq."].into_iter();
                let tensors = states
                    .flat_map(|state| units.iter().flat_map(move |unit| shards(unit, state, rank, ranks)));
                let report =
                    RankReport { tensors: tensors.collect(), had_grad: Vec::new(), logged: Value::Null };
                let file = FileEntry { bytes: 1, crc32: "0".to_owned() };
                serde_json::to_vec(&Ok::<_, Problem>((file, report))).unwrap()
            };
            let all: Vec<Vec<u8>> = (0..ranks).map(sent).collect();
            let began = Instant::now();
            let (files, reports) = of_ranks::<(FileEntry, RankReport)>(&all).unwrap().into_iter().unzip();
            let index = index_of(&Checkpoint::default(), files, reports, "an id".to_owned()).unwrap();
            let text = index.to_text().unwrap();
            Index::parse(&text, Path::new(INDEX)).unwrap();
            let seconds = began.elapsed().as_secs_f64();
            let most = all.iter().map(Vec::len).max().unwrap();
            let sum: usize = all.iter().map(Vec::len).sum();
            println!("| {ranks} | {most} | {sum} | {seconds:.2} | {} |", text.len());
            assert!(most <= of_few, "a rank sends no more if there are more ranks");
            of_few = most;
        }
    }
}
