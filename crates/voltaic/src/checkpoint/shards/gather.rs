//! Makes one checkpoint of the shards of all ranks: rank 0 gets them from the others, one tensor at a time.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use tch::{Kind, Tensor};

use super::index::Entry;
use super::write::{
    Merged, RankReport, SAVE_SHARDS, merged, not_saved, of_rank, of_ranks, own_tensors, report,
};
use crate::checkpoint::checkpoint::{Checkpoint, TrainingState};
use crate::checkpoint::chunk::Chunk;
use crate::checkpoint::format::{
    add_tensor, cannot_hold, kind, rank_from_bytes, rank_to_bytes, shape_of, unreadable, write_file,
};
use crate::checkpoint::stream::{Planned, bytes_of};
use crate::distributed::{ProcessGroup, collective_scope};
use crate::error::{CheckpointError, Error, Problem, Result};

/// So many bytes travel together.
const PIECE: usize = 4 << 20;
/// Rank 0 needs nothing more.
const END: i64 = -1;

/// Saves weights, of which each rank brings its shards, as one file, which rank 0 writes. One tensor at a time is whole, there alone.
///
/// # Collective
/// All ranks must call it. The path of rank 0 counts.
///
/// # Errors
/// [`CheckpointError::OnRanks`](crate::error::CheckpointError::OnRanks) on all ranks if rank 0 cannot write the file, or one cannot
/// read its shards from its device; [`DistributedError`](crate::error::DistributedError) if one is gone.
pub(in crate::checkpoint) fn save_as_file(
    checkpoint: &Checkpoint,
    group: &ProcessGroup,
    path: &Path,
) -> Result<()> {
    with_others(checkpoint, group, path, |source| source.write(checkpoint, path)).map(drop)
}

/// The checkpoint that a folder of these shards would be, on rank 0.
///
/// # Collective
/// All ranks must call it.
///
/// # Errors
/// As [`save_as_file`].
pub(in crate::checkpoint) fn gathered(
    checkpoint: &Checkpoint,
    group: &ProcessGroup,
    path: &Path,
) -> Result<Option<Checkpoint>> {
    let own = match (group.rank(), &checkpoint.training) {
        (1.., Some(training)) => training.own().and_then(|own| rank_to_bytes(&own)),
        _ => Ok(Vec::new()),
    };
    let ranks = group.gather_bytes(&message(own, group.rank()), 0)?;
    with_others(checkpoint, group, path, |source| source.whole(checkpoint, &ranks, path))
}

/// Bytes behind a zero, or what went wrong behind a one.
fn message(own: Result<Vec<u8>>, rank: usize) -> Vec<u8> {
    match own {
        Ok(bytes) => [&[0], bytes.as_slice()].concat(),
        Err(error) => [&[1], of_rank(rank, error).to_string().as_bytes()].concat(),
    }
}

/// What [`message`] was made of.
fn content(message: &[u8]) -> Result<&[u8], String> {
    match message.split_first() {
        Some((0, bytes)) => Ok(bytes),
        Some((_, text)) => Err(String::from_utf8_lossy(text).into_owned()),
        None => Err("an empty message".to_owned()),
    }
}

/// Runs `body` on rank 0, with what all ranks have; the others send what it requests. All get the result.
fn with_others<T>(
    checkpoint: &Checkpoint,
    group: &ProcessGroup,
    path: &Path,
    body: impl FnOnce(&Source<'_>) -> Result<T>,
) -> Result<Option<T>> {
    let _named = collective_scope("checkpoint");
    let own = own_tensors(checkpoint, group.rank()).map_err(|error| of_rank(group.rank(), error));
    let sent = own.as_ref().map(|own| report(checkpoint, own)).map_err(Problem::clone);
    let sent = serde_json::to_vec(&sent).map_err(|e| Error::io("serialize", path, e.into()))?;
    let all = group.gather_bytes(&sent, 0)?;
    let all = match group.rank() {
        0 => of_ranks::<RankReport>(&all).and_then(merged),
        _ => Ok(Merged::default()),
    };
    let names = all.as_ref().map(|all| all.tensors.keys().cloned().collect::<Vec<_>>());
    let names: Result<Vec<String>, Problem> = group.broadcast_object(&names.map_err(Problem::clone), 0)?;
    let names = names.map_err(|problem| not_saved(path, problem))?;
    let own = own.map_err(|problem| not_saved(path, problem))?; // all ranks have agreed on it
    let mut by_name: HashMap<&str, &Tensor> =
        own.iter().map(|own| (own.planned.name.as_str(), own.values)).collect();
    let own: Vec<Option<&Tensor>> = names.iter().map(|name| by_name.remove(name.as_str())).collect();
    let mut done = Ok(None);
    if group.rank() == 0 {
        done = all.and_then(|Merged { tensors, had_grad, .. }| {
            let source = Source { own, entries: tensors.into_iter().collect(), had_grad, group };
            body(&source).map(Some).map_err(|error| of_rank(0, error))
        });
        group.broadcast(&Tensor::from(END), 0)?;
    } else {
        serve(&own, group)?;
    }
    let ended = group.broadcast_object(&done.as_ref().map(drop).map_err(Problem::clone), 0)?;
    ended.map_err(|problem| not_saved(path, problem))?;
    done.map_err(|problem| not_saved(path, problem))
}

/// What this rank has done, if all ranks could do theirs; else the first error of a rank, on all.
///
/// # Collective
/// All ranks must call it.
pub(in crate::checkpoint) fn as_on_all<T>(done: Result<T>, group: &ProcessGroup, path: &Path) -> Result<T> {
    let _named = collective_scope("checkpoint");
    let (done, own) = match done {
        Ok(done) => (Some(done), None),
        Err(Error::Checkpoint(CheckpointError::OnRanks { path, problem, .. })) => {
            (None, Some((path, problem)))
        }
        Err(error) => (None, Some((path.to_path_buf(), of_rank(group.rank(), error)))),
    };
    let failed = match (group.all_gather_object(&own), own) {
        (Err(_), Some(own)) => Some(own), // the other ranks are gone
        (all, _) => all?.into_iter().flatten().next(),
    };
    match (failed, done) {
        (None, Some(done)) => Ok(done),
        (failed, _) => {
            let (path, problem) = failed.unwrap_or_else(|| (path.to_path_buf(), Problem::new("", "")));
            Err(not_saved(&path, problem))
        }
    }
}

/// What rank 0 did ends all ranks, if it has failed.
///
/// # Collective
/// All ranks must call it.
pub(in crate::checkpoint) fn as_on_rank_zero(
    done: Result<()>,
    group: &ProcessGroup,
    path: &Path,
) -> Result<()> {
    let own = done.map_err(|error| of_rank(group.rank(), error));
    group.broadcast_object(&own, 0)?.map_err(|problem| not_saved(path, problem))
}

/// Gives rank 0 this rank's elements of the tensors that it asks for.
fn serve(own: &[Option<&Tensor>], group: &ProcessGroup) -> Result<()> {
    loop {
        let asked = Tensor::from(END);
        group.broadcast(&asked, 0)?;
        let Some(values) = usize::try_from(asked.f_int64_value(&[])?).ok().and_then(|index| own.get(index))
        else {
            return Ok(());
        };
        for (start, len) in values.iter().flat_map(|values| pieces(values)) {
            let sent = values.map_or_else(|| Ok(Vec::new()), |values| piece(values, start, len));
            let has_failed = sent.is_err();
            let sent = message(sent, group.rank());
            group.send(&Tensor::from(sent.len() as i64), 0)?;
            group.send(&Tensor::f_from_slice(&sent)?, 0)?;
            if has_failed {
                break;
            }
        }
    }
}

/// The first of elements that travel together, and their number.
fn pieces_of(numel: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    let most = (PIECE / size).max(1);
    (0..numel).step_by(most).map(move |start| (start, most.min(numel - start)))
}

fn pieces(values: &Tensor) -> impl Iterator<Item = (usize, usize)> + use<> {
    pieces_of(values.numel(), values.kind().elt_size_in_bytes())
}

fn piece(values: &Tensor, start: usize, len: usize) -> Result<Vec<u8>> {
    let values = values.f_reshape([-1_i64])?.f_narrow(0, start as i64, len as i64)?;
    bytes_of(&values).map_err(|error| Error::io("copy", "a shard of a tensor", error))
}

/// The tensors of all ranks, on rank 0.
struct Source<'a> {
    /// What this rank has of each.
    own: Vec<Option<&'a Tensor>>,
    entries: Vec<(String, Entry)>,
    had_grad: Vec<String>,
    group: &'a ProcessGroup,
}

impl Source<'_> {
    fn write(&self, checkpoint: &Checkpoint, path: &Path) -> Result<()> {
        let tensors = self.names(checkpoint)?;
        let plan = |(name, index): &(String, usize)| {
            let Entry { dtype, shape, .. } = &self.entries[*index].1;
            Planned { name: name.clone(), dtype: *dtype, shape: shape.clone() }
        };
        let planned: Vec<Planned> = tensors.iter().map(plan).collect();
        // what went wrong says more than that the file cannot be written
        let mut failure = None;
        let written = write_file(checkpoint, &planned, path, &mut |index| {
            self.fetch(tensors[index].1).map_err(|error| {
                let text = error.to_string();
                failure = Some(error);
                io::Error::other(text)
            })
        });
        failure.map_or(written, Err)
    }

    fn whole(&self, checkpoint: &Checkpoint, ranks: &[Vec<u8>], path: &Path) -> Result<Checkpoint> {
        let mut weights = Vec::new();
        let mut training = checkpoint.training.as_ref().map(TrainingState::without_tensors);
        let mut none = TrainingState::default();
        let mut read: Vec<Option<Tensor>> = self.entries.iter().map(|_| None).collect();
        for (name, index) in self.names(checkpoint)? {
            let tensor = match &read[index] {
                Some(tensor) => tensor.shallow_clone(), // by another name
                None => {
                    let Entry { dtype, shape, .. } = &self.entries[index].1;
                    let (kind, shape) =
                        (kind(*dtype).unwrap_or(Kind::Float), shape_of(shape).unwrap_or_default());
                    Tensor::f_from_data_size(&self.fetch(index)?, &shape, kind)?
                }
            };
            read[index] = Some(tensor.shallow_clone());
            let training = training.as_mut().unwrap_or(&mut none);
            add_tensor(&mut weights, training, name, tensor).map_err(|what| unreadable(path, what))?;
        }
        if let Some(training) = &mut training {
            training.had_grad.clone_from(&self.had_grad);
            let own = |rank: usize| match (rank, &checkpoint.training) {
                (0, Some(training)) => training.own(),
                _ => {
                    let bytes = content(&ranks[rank]);
                    rank_from_bytes(bytes.map_err(|text| Error::io("gather", path, io::Error::other(text)))?)
                }
            };
            training.add_ranks(ranks.len(), own)?;
        }
        Ok(Checkpoint { weights, training, meta: checkpoint.meta.clone(), ..Checkpoint::default() })
    }

    /// Names of tensors, tied ones under each of their names, with where they are.
    fn names(&self, checkpoint: &Checkpoint) -> Result<Vec<(String, usize)>> {
        let place = |name: &str| self.entries.binary_search_by(|(own, _)| own.as_str().cmp(name)).ok();
        let names = self.entries.iter().enumerate().map(|(index, (name, _))| (name.clone(), index));
        let mut names: Vec<(String, usize)> = names.collect();
        for (alias, first) in &checkpoint.tied {
            let index = place(first).filter(|_| place(alias).is_none());
            let Some(index) = index else {
                let what = format!("{alias} is tied to {first}, which does not fit the tensors");
                return Err(cannot_hold(&checkpoint.meta.module, what, SAVE_SHARDS));
            };
            names.push((alias.clone(), index));
        }
        Ok(names)
    }

    /// The bytes of a whole tensor.
    fn fetch(&self, index: usize) -> Result<Vec<u8>> {
        let (name, entry) = &self.entries[index];
        let fail = |error: io::Error| Error::io("gather", name, error);
        let size = kind(entry.dtype).map_or(1, Kind::elt_size_in_bytes);
        self.group.broadcast(&Tensor::from(index as i64), 0)?;
        let (mut bytes, mut failed) = (Vec::new(), None);
        match bytes.try_reserve_exact(entry.numel() * size) {
            Ok(()) => bytes.resize(entry.numel() * size, 0),
            Err(_) => failed = Some(fail(io::ErrorKind::OutOfMemory.into())),
        }
        let mut lens: Vec<(usize, usize)> = entry.lens().into_iter().collect();
        lens.sort_unstable();
        for (rank, len) in lens {
            let mut scatter = Scatter::of(entry, rank, size, &mut bytes);
            for (start, len) in pieces_of(len, size) {
                let received = match (rank, self.own[index]) {
                    (0, Some(values)) => piece(values, start, len),
                    // what has been asked for comes, also if it is of no use any more
                    _ => self.receive(rank, len * size)?.map_err(|text| fail(io::Error::other(text))),
                };
                match received {
                    Ok(piece) if failed.is_none() => scatter.put(&piece),
                    Ok(_) => {}
                    Err(error) => {
                        failed.get_or_insert(error);
                        break;
                    }
                }
            }
        }
        failed.map_or(Ok(bytes), Err)
    }

    /// A piece of another rank, or why it does not come.
    fn receive(&self, rank: usize, expected: usize) -> Result<Result<Vec<u8>, String>> {
        let len = Tensor::from(0_i64);
        self.group.recv(&len, rank)?;
        let len = len.f_int64_value(&[])?;
        let data = Tensor::f_empty([len.clamp(1, PIECE as i64 + 1)], (Kind::Uint8, tch::Device::Cpu))?;
        self.group.recv(&data, rank)?;
        let mut bytes = vec![0_u8; data.numel()];
        data.f_copy_data(&mut bytes, data.numel())?;
        Ok(match content(&bytes) {
            Ok(piece) if piece.len() == expected => Ok(bytes.split_off(1)),
            Ok(piece) => Err(format!("rank {rank} sent {} bytes, not {expected}", piece.len())),
            Err(text) => Err(text),
        })
    }
}

/// Puts the elements of a rank, which come one behind the other, where they are in the whole tensor.
struct Scatter<'a> {
    /// The first byte and the number of bytes of those that lie side by side.
    runs: Box<dyn Iterator<Item = (usize, usize)> + 'a>,
    current: (usize, usize),
    whole: &'a mut [u8],
}

impl<'a> Scatter<'a> {
    fn of(entry: &'a Entry, rank: usize, size: usize, whole: &'a mut [u8]) -> Self {
        let all = Chunk::whole(&entry.shape);
        let own = entry.chunks.iter().filter(move |stored| stored.rank == rank);
        let runs = own.flat_map(move |stored| stored.chunk.runs(&all));
        let runs = Box::new(runs.map(move |(_, start, len)| (start * size, len * size)));
        Self { runs, current: (0, 0), whole }
    }

    fn put(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            if self.current.1 == 0 {
                let Some(next) = self.runs.next() else { return };
                self.current = next;
            }
            let (start, left) = self.current;
            let (own, rest) = piece.split_at(left.min(piece.len()));
            self.whole[start..start + own.len()].copy_from_slice(own);
            self.current = (start + own.len(), left - own.len());
            piece = rest;
        }
    }
}
