//! Writes weights that are divided among ranks as one file: rank 0 gets them from the others, one tensor at a time.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use tch::{Kind, Tensor};

use super::index::Entry;
use super::write::{Slice, not_saved, of_rank};
use crate::checkpoint::checkpoint::{Checkpoint, Part};
use crate::checkpoint::format::{cannot_hold, check_names, check_unique, dtype, kind, write_file};
use crate::checkpoint::stream::{Planned, bytes_of};
use crate::distributed::{ProcessGroup, collective_scope};
use crate::error::{Error, Problem, Result};

/// So many bytes travel together.
const PIECE: usize = 4 << 20;
/// Rank 0 needs nothing more.
const END: i64 = -1;

/// Saves weights, of which each rank brings its parts, as one file, which rank 0 writes. One tensor at a time is whole, there alone.
///
/// # Collective
/// All ranks must call it. The path of rank 0 counts.
///
/// # Errors
/// [`CheckpointError::OnRanks`](crate::error::CheckpointError::OnRanks) on all ranks if rank 0 cannot write the file, or one cannot
/// read its parts from its device; [`DistributedError`](crate::error::DistributedError) if one is gone.
pub(in crate::checkpoint) fn save_as_file(
    checkpoint: &Checkpoint,
    group: &ProcessGroup,
    path: &Path,
) -> Result<()> {
    with_others(checkpoint, group, path, |source| source.write(checkpoint, path)).map(drop)
}

/// The same checkpoint with whole weights, on rank 0.
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
    with_others(checkpoint, group, path, |source| source.whole(checkpoint))
}

/// Runs `body` on rank 0, with what all ranks have; the others give what it asks for. All learn how it went.
fn with_others<T>(
    checkpoint: &Checkpoint,
    group: &ProcessGroup,
    path: &Path,
    body: impl FnOnce(&Source<'_>) -> Result<T>,
) -> Result<Option<T>> {
    let _named = collective_scope("checkpoint");
    let own = slices(checkpoint).map_err(|error| of_rank(group.rank(), error));
    let own = serde_json::to_vec(&own).map_err(|e| Error::io("serialize", path, e.into()))?;
    let told = group.gather_bytes(&own, 0)?;
    let mut done = Ok(None);
    if group.rank() == 0 {
        let entries = entries(&told);
        done = entries.and_then(|entries| {
            let source = Source { parts: &checkpoint.parts, entries, group };
            body(&source).map(Some).map_err(|error| of_rank(0, error))
        });
        group.broadcast(&Tensor::from(END), 0)?;
    } else {
        serve(&checkpoint.parts, group)?;
    }
    let told = group.broadcast_object(&done.as_ref().map(drop).map_err(Problem::clone), 0)?;
    told.map_err(|problem| not_saved(path, problem))?;
    done.map_err(|problem| not_saved(path, problem))
}

/// What one rank did ends all ranks, if it has failed.
///
/// # Collective
/// All ranks must call it.
pub(in crate::checkpoint) fn as_on_all(done: Result<()>, group: &ProcessGroup, path: &Path) -> Result<()> {
    let own = done.err().map(|error| of_rank(group.rank(), error));
    let failed = group.all_gather_object(&own)?.into_iter().flatten().next();
    failed.map_or(Ok(()), |problem| Err(not_saved(path, problem)))
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

/// What this rank has, in the order of its parts.
fn slices(checkpoint: &Checkpoint) -> Result<Vec<Slice>> {
    let module = &checkpoint.meta.module;
    let slice = |part: &Part| {
        let (name, shape) = (part.name.clone(), part.shape.iter().map(|&size| size as usize).collect());
        let dtype = dtype(&part.values, &name, module)?;
        Ok(Slice { name, dtype, shape, start: part.start, len: part.values.numel() })
    };
    checkpoint.parts.iter().map(slice).collect()
}

/// Who has which elements, in the order of all ranks' parts.
fn entries(told: &[Vec<u8>]) -> Result<Vec<(String, Entry)>, Problem> {
    let mut entries: Vec<(String, Entry)> = Vec::new();
    let remedy = "save through the trainer on all ranks";
    for (rank, bytes) in told.iter().enumerate() {
        let slices: Result<Vec<Slice>, Problem> =
            serde_json::from_slice::<Result<Vec<Slice>, Problem>>(bytes)
                .map_err(|e| Problem::new(format!("rank {rank} told what is not understood: {e}"), remedy))?;
        let slices = slices?;
        if rank == 0 {
            let entry = |slice: &Slice| {
                let (dtype, shape) = (slice.dtype, slice.shape.clone());
                (slice.name.clone(), Entry { dtype, shape, slices: Vec::new() })
            };
            entries = slices.iter().map(entry).collect();
        }
        if slices.len() != entries.len() {
            let what = format!("rank {rank} has {} weights, rank 0 has {}", slices.len(), entries.len());
            return Err(Problem::new(what, remedy));
        }
        for ((name, entry), slice) in entries.iter_mut().zip(slices) {
            if (&*name, entry.dtype, &entry.shape) != (&slice.name, slice.dtype, &slice.shape) {
                let own = format!("{name}, {:?} {:?}", entry.dtype, entry.shape);
                let Slice { name, dtype, shape, .. } = slice;
                let what = format!("rank {rank} has {name}, {dtype:?} {shape:?}, where rank 0 has {own}");
                return Err(Problem::new(what, remedy));
            }
            if slice.len > 0 {
                entry.slices.push((rank, slice.start, slice.len));
            }
        }
    }
    for (name, entry) in &mut entries {
        entry.slices.sort_by_key(|&(_, start, _)| start);
        if let Some(what) = entry.problem(told.len()) {
            return Err(Problem::new(format!("{name} {what}"), remedy));
        }
    }
    Ok(entries)
}

/// Gives rank 0 this rank's elements of the tensors that it asks for.
fn serve(parts: &[Part], group: &ProcessGroup) -> Result<()> {
    loop {
        let asked = Tensor::from(END);
        group.broadcast(&asked, 0)?;
        let asked = usize::try_from(asked.f_int64_value(&[])?);
        let Some(part) = asked.ok().and_then(|index| parts.get(index)) else { return Ok(()) };
        for range in pieces(part.values.numel(), &part.values) {
            // the first byte tells whether the others are there
            let sent = match piece(part, range) {
                Ok(bytes) => [&[0], bytes.as_slice()].concat(),
                Err(error) => [&[1], of_rank(group.rank(), error).to_string().as_bytes()].concat(),
            };
            let has_failed = sent[0] != 0;
            group.send(&Tensor::from(sent.len() as i64), 0)?;
            group.send(&Tensor::f_from_slice(&sent)?, 0)?;
            if has_failed {
                break;
            }
        }
    }
}

/// Elements that travel together.
fn pieces(numel: usize, like: &Tensor) -> impl Iterator<Item = (usize, usize)> + use<> {
    let most = (PIECE / like.kind().elt_size_in_bytes()).max(1);
    (0..numel).step_by(most).map(move |start| (start, most.min(numel - start)))
}

fn piece(part: &Part, (start, len): (usize, usize)) -> Result<Vec<u8>> {
    let values = part.values.f_narrow(0, start as i64, len as i64)?;
    bytes_of(&values).map_err(|error| Error::io("copy", part.name.clone(), error))
}

/// The weights of all ranks, on rank 0.
struct Source<'a> {
    parts: &'a [Part],
    entries: Vec<(String, Entry)>,
    group: &'a ProcessGroup,
}

impl Source<'_> {
    fn write(&self, checkpoint: &Checkpoint, path: &Path) -> Result<()> {
        let module = &checkpoint.meta.module;
        check_names(&checkpoint.weights, module)?;
        let mut planned = Vec::new();
        for (name, tensor) in &checkpoint.weights {
            let shape = tensor.size().iter().map(|&size| size as usize).collect();
            planned.push(Planned { name: name.clone(), dtype: dtype(tensor, name, module)?, shape });
        }
        let mut of_others = Vec::new();
        for (name, index) in self.names(checkpoint)? {
            let Entry { dtype, shape, .. } = &self.entries[index].1;
            planned.push(Planned { name, dtype: *dtype, shape: shape.clone() });
            of_others.push(index);
        }
        check_unique(planned.iter().map(|planned| planned.name.as_str()), module)?;
        // what went wrong says more than that the file cannot be written
        let mut failure = None;
        let whole = checkpoint.weights.len();
        let written = write_file(checkpoint, &planned, path, &mut |index| match index.checked_sub(whole) {
            None => bytes_of(&checkpoint.weights[index].1),
            Some(index) => self.fetch(of_others[index]).map_err(|error| {
                let text = error.to_string();
                failure = Some(error);
                io::Error::other(text)
            }),
        });
        failure.map_or(written, Err)
    }

    fn whole(&self, checkpoint: &Checkpoint) -> Result<Checkpoint> {
        let mut weights: Vec<(String, Tensor)> =
            checkpoint.weights.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        for (name, index) in self.names(checkpoint)? {
            let shape = &self.parts[index].shape;
            let kind = kind(self.entries[index].1.dtype).unwrap_or(Kind::Float);
            weights.push((name, Tensor::f_from_data_size(&self.fetch(index)?, shape, kind)?));
        }
        Ok(Checkpoint { weights, meta: checkpoint.meta.clone(), ..Checkpoint::default() })
    }

    /// Names of the weights that are divided, tied ones under each of their names, with where they are.
    fn names(&self, checkpoint: &Checkpoint) -> Result<Vec<(String, usize)>> {
        let positions: HashMap<&str, usize> =
            self.entries.iter().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect();
        let mut names: Vec<(String, usize)> =
            self.entries.iter().enumerate().map(|(index, (name, _))| (name.clone(), index)).collect();
        for (alias, first) in &checkpoint.tied {
            let Some(&index) = positions.get(first.as_str()) else {
                let what = format!("{alias} is tied to {first}, which is not there");
                return Err(cannot_hold(&checkpoint.meta.module, what, "save through the trainer"));
            };
            names.push((alias.clone(), index));
        }
        Ok(names)
    }

    /// A whole tensor.
    fn fetch(&self, index: usize) -> Result<Vec<u8>> {
        let part = &self.parts[index];
        let (_, entry) = &self.entries[index];
        let size = part.values.kind().elt_size_in_bytes();
        self.group.broadcast(&Tensor::from(index as i64), 0)?;
        let (mut bytes, mut failed) = (Vec::new(), None);
        if bytes.try_reserve_exact(entry.numel() * size).is_err() {
            let source = io::ErrorKind::OutOfMemory.into();
            failed = Some(Error::io("gather", part.name.clone(), source));
        }
        for &(rank, _, len) in &entry.slices {
            let mut add = |piece: Result<Vec<u8>>| match (piece, &failed) {
                (Ok(piece), None) => bytes.extend_from_slice(&piece),
                (Err(error), None) => failed = Some(error),
                (_, Some(_)) => {}
            };
            if rank == 0 {
                pieces(len, &part.values).for_each(|range| add(piece(part, range)));
                continue;
            }
            // what has been asked for comes, also if it is of no use any more
            for (_, len) in pieces(len, &part.values) {
                let received = self.receive(rank, len * size)?;
                let has_failed = received.is_err();
                add(received.map_err(|text| Error::io("gather", part.name.clone(), io::Error::other(text))));
                if has_failed {
                    break;
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
        Ok(match bytes.split_off(1) {
            text if bytes[0] != 0 => Err(String::from_utf8_lossy(&text).into_owned()),
            piece if piece.len() == expected => Ok(piece),
            piece => Err(format!("rank {rank} sent {} bytes, not {expected}", piece.len())),
        })
    }
}
