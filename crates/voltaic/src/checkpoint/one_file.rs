//! A checkpoint of one file that rank 0 reads for all ranks, tensor by tensor: no rank has all of it in memory, and only rank 0 needs to
//! see it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::checkpoint::{Checkpoint, TrainingState};
use super::chunk::{Chunk, ShardSpec};
use super::deepspeed::is_deepspeed;
use super::format::{
    Header, METADATA_KEY, PREFIX, add_tensor, checksum_at, dtype, header_of, header_text, kind,
    named_tensors, shape_of, unreadable,
};
use super::load::{converted, is_torch};
use super::masters::parameter_of;
use super::peek::{check_whole, open_header};
use super::stream::bytes_of;
use super::torch_file::open_torch;
use crate::distributed::{ProcessGroup, collective_scope};
use crate::error::{CheckpointError, Error, Problem, Result};

/// So many bytes travel together.
const PIECE: usize = 4 << 20;
const REMEDY: &str = "look at the file system of rank 0";

/// A checkpoint in one file. All functions that give values are collective: all ranks call them with the same names, in the same order.
pub(crate) struct OneFile {
    path: PathBuf,
    group: Arc<ProcessGroup>,
    contents: Contents,
    /// On rank 0.
    opened: Option<Opened>,
    /// Why nothing more can be read, the same on all ranks.
    failure: RefCell<Option<Problem>>,
}

/// What is in the file, which rank 0 sends to the others.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    /// The metadata entry, as it is in the file.
    header: Option<String>,
    is_sealed: bool,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Entry {
    fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its shape and dtype as libtorch's, which rank 0 has found to be there.
    fn as_tensor(&self) -> (Vec<i64>, Kind) {
        (shape_of(&self.shape).unwrap_or_default(), kind(self.dtype).unwrap_or(Kind::Uint8))
    }
}

/// The file, all of which has been checked.
struct Opened {
    file: File,
    places: HashMap<String, Place>,
}

/// Where the bytes of a tensor are.
enum Place {
    /// In the file, from there on.
    File(u64),
    /// In memory: small ones, and those whose elements do not lie side by side in the file.
    Memory(Vec<u8>),
}

impl Opened {
    /// Checks the whole file.
    fn of(path: &Path) -> Result<(Self, Contents)> {
        let (opened, contents) = if is_torch(path)? { Self::torch(path)? } else { Self::safetensors(path)? };
        for (name, entry) in &contents.tensors {
            if kind(entry.dtype).is_none() {
                return Err(unreadable(path, format!("{name} has dtype {:?}, unknown here", entry.dtype)));
            }
            if shape_of(&entry.shape).is_none() {
                return Err(unreadable(path, format!("{name} has shape {:?}, too large", entry.shape)));
            }
        }
        let names = contents.tensors.keys().map(String::as_str);
        let checkpoint = header_of(contents.header.as_deref(), contents.is_sealed, names, path)?;
        let training = checkpoint.and_then(|header| header.into_checkpoint().training);
        let (mut weights, mut training) = (Vec::new(), training.unwrap_or_default());
        for name in contents.tensors.keys() {
            add_tensor(&mut weights, &mut training, name.clone(), Tensor::new())
                .map_err(|what| unreadable(path, what))?;
        }
        Ok((opened, contents))
    }

    fn safetensors(path: &Path) -> Result<(Self, Contents)> {
        let (mut file, header) = open_header(path)?;
        let metadata = check_whole(&mut file, &header, path)?;
        let entry = metadata.metadata().as_ref().and_then(|own| own.get(METADATA_KEY));
        let (text, is_sealed) = (entry.cloned(), checksum_at(&header).is_some());
        let (mut tensors, mut places) = (BTreeMap::new(), HashMap::new());
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else { continue };
            places.insert(name.clone(), Place::File((header.len() + info.data_offsets.0) as u64));
            tensors.insert(name, Entry { dtype: info.dtype, shape: info.shape.clone() });
        }
        Ok((Self { file, places }, Contents { header: text, is_sealed, tensors }))
    }

    /// A file of Lightning, or a state dict, as if it had been converted.
    fn torch(path: &Path) -> Result<(Self, Contents)> {
        let (value, stored) = open_torch(path)?;
        let checkpoint = converted(&value, path)?;
        let (mut tensors, mut places) = (BTreeMap::new(), HashMap::new());
        for (name, tensor) in named_tensors(&checkpoint) {
            let shape = tensor.size().iter().map(|&size| size as usize).collect();
            let dtype = dtype(tensor, &name, "the file")?;
            let place = match stored.place_of(tensor) {
                Some(start) => Place::File(start),
                None => Place::Memory(
                    bytes_of(tensor).map_err(|error| Error::io("read checkpoint", path, error))?,
                ),
            };
            places.insert(name.clone(), place);
            tensors.insert(name, Entry { dtype, shape });
        }
        let header = Some(header_text(&checkpoint, path)?);
        Ok((Self { file: stored.into_file(), places }, Contents { header, is_sealed: true, tensors }))
    }

    /// Some bytes of a tensor, behind one of another meaning.
    fn read(&self, name: &str, at: usize, len: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; len + 1];
        match self.places.get(name) {
            Some(Place::File(start)) => self.file.read_exact_at(&mut bytes[1..], start + at as u64)?,
            Some(Place::Memory(whole)) => {
                let part = whole.get(at..at + len).ok_or(std::io::ErrorKind::UnexpectedEof)?;
                bytes[1..].copy_from_slice(part);
            }
            None => return Err(std::io::ErrorKind::NotFound.into()),
        }
        Ok(bytes)
    }
}

/// A checkpoint in one file of voltaic's, or weights, for a call that does not train: states of optimizers are left out, but for master
/// weights, and no more memory is taken than for the rest. `None` if the path leads to something else.
///
/// # Errors
/// If the file is missing, damaged, or of a later version.
pub(crate) fn read_without_optimizers(path: &Path) -> Result<Option<Checkpoint>> {
    if !path.is_file() || is_deepspeed(path) || is_torch(path)? {
        return Ok(None);
    }
    let (opened, contents) = Opened::of(path)?;
    let names = contents.tensors.keys().map(String::as_str);
    let header = header_of(contents.header.as_deref(), contents.is_sealed, names, path)?;
    let mut checkpoint = header.map(Header::into_checkpoint).unwrap_or_default();
    let mut none = TrainingState::default();
    let Checkpoint { weights, training, .. } = &mut checkpoint;
    let training = training.as_mut().unwrap_or(&mut none);
    for (name, entry) in &contents.tensors {
        let of_optimizer = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_prefix("optimizer."));
        let state = of_optimizer.and_then(|rest| rest.split_once('.'));
        if state.is_some_and(|(_, state)| parameter_of(state).is_none()) {
            continue;
        }
        let (shape, kind) = entry.as_tensor();
        let bytes = opened.read(name, 0, entry.numel() * kind.elt_size_in_bytes());
        let bytes = bytes.map_err(|error| Error::io("read checkpoint", path, error))?;
        let tensor = Tensor::f_from_data_size(&bytes[1..], &shape, kind)?;
        add_tensor(weights, training, name.clone(), tensor).map_err(|what| unreadable(path, what))?;
    }
    Ok(Some(checkpoint))
}

/// The error of all ranks.
fn not_read(path: &Path, problem: Problem) -> Error {
    CheckpointError::OnRanks { action: "read", path: path.to_path_buf(), problem }.into()
}

fn of_rank_zero(error: Error) -> Problem {
    let Problem { what, remedy } = error.into_problem(REMEDY);
    Problem::new(format!("rank 0: {what}"), remedy)
}

impl OneFile {
    /// Rank 0 checks the file, and sends the others what is in it.
    ///
    /// # Errors
    /// [`CheckpointError::OnRanks`] on all ranks if the file is missing, damaged, or of a later version.
    pub(crate) fn open(path: &Path, group: &Arc<ProcessGroup>) -> Result<Self> {
        let _named = collective_scope("checkpoint");
        let (mut opened, mut contents) = (None, Err(Problem::new("", "")));
        if group.rank() == 0 {
            contents = Opened::of(path).map_err(of_rank_zero).map(|(own, contents)| {
                opened = Some(own);
                contents
            });
        }
        let contents: Result<Contents, Problem> = group.broadcast_object(&contents, 0)?;
        let contents = contents.map_err(|problem| not_read(path, problem))?;
        let (path, group) = (path.to_path_buf(), group.clone());
        Ok(Self { path, group, contents, opened, failure: RefCell::default() })
    }

    /// Names and shapes of the weights.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (&str, &[usize])> {
        let weights = self.contents.tensors.iter().filter(|(name, _)| !name.starts_with(PREFIX));
        weights.map(|(name, entry)| (name.as_str(), entry.shape.as_slice()))
    }

    /// Names of the states of an optimizer, as in the file, with what follows its number.
    pub(crate) fn optimizer_states(&self, index: usize) -> impl Iterator<Item = (&str, &str)> {
        let prefix = format!("{PREFIX}optimizer.{index}.");
        let names = self.contents.tensors.keys();
        names.filter_map(move |name| Some((name.as_str(), name.strip_prefix(prefix.as_str())?)))
    }

    /// Whether a tensor is a number, and not one like a parameter.
    pub(crate) fn is_number(&self, name: &str) -> bool {
        self.contents.tensors.get(name).is_some_and(|entry| entry.shape.is_empty())
    }

    /// What ranks read that take their elements of the rest later: all but weights and states of optimizers. Of what each rank has to
    /// itself there is that of rank 0 and its own, and the gradients that the rank takes if the run had another number of ranks.
    ///
    /// # Errors
    /// As [`OneFile::whole`].
    pub(crate) fn rest(&self) -> Result<Checkpoint> {
        let names = self.contents.tensors.keys().map(String::as_str);
        let header = header_of(self.contents.header.as_deref(), self.contents.is_sealed, names, &self.path)?;
        let Some(header) = header else { return Ok(Checkpoint::default()) };
        let mut checkpoint = header.into_checkpoint();
        let mut none = TrainingState::default();
        let (mut weights, training) = (Vec::new(), checkpoint.training.as_mut().unwrap_or(&mut none));
        let mut failed = None;
        for (name, entry) in &self.contents.tensors {
            let Some(rest) = name.strip_prefix(PREFIX).filter(|rest| !rest.starts_with("optimizer.")) else {
                continue;
            };
            let whole = [Chunk::whole(&entry.shape)];
            let wanted = self.takes(rest).then_some(whole.as_slice());
            let added = self.elements(name, entry, wanted).and_then(|tensor| {
                let Some(tensor) = tensor else { return Ok(()) };
                let tensor = tensor.f_view(entry.as_tensor().0.as_slice())?;
                add_tensor(&mut weights, training, name.clone(), tensor)
                    .map_err(|what| unreadable(&self.path, what))
            });
            if let Err(error) = added {
                failed.get_or_insert(error); // what follows comes to all ranks, also to this one
            }
        }
        failed.map_or(Ok(checkpoint), Err)
    }

    /// Whether this rank needs a tensor of the training state.
    fn takes(&self, rest: &str) -> bool {
        let of = rest.strip_prefix("rank.").and_then(|own| own.split_once('.'));
        let (saved_by, rest) = of.map_or((0, rest), |(rank, rest)| (rank.parse().unwrap_or(0), rest));
        let own = self.group.rank();
        match rest.starts_with("grad.") {
            true => saved_by % self.group.world_size() == own,
            false => saved_by == 0 || saved_by == own,
        }
    }

    fn named(&self, name: &str) -> Result<&Entry> {
        let entry = self.contents.tensors.get(name);
        entry.ok_or_else(|| unreadable(&self.path, format!("it has no tensor {name}")))
    }

    /// A whole tensor, on all ranks.
    ///
    /// # Errors
    /// If there is none of that name. [`CheckpointError::OnRanks`] on all ranks if rank 0 cannot read it. On one rank alone if it has no
    /// memory; it must take part in what follows all the same.
    pub(crate) fn whole(&self, name: &str) -> Result<Tensor> {
        let entry = self.named(name)?;
        let values = self.elements(name, entry, Some(&[Chunk::whole(&entry.shape)]))?.unwrap_or_default();
        Ok(values.f_view(entry.as_tensor().0.as_slice())?)
    }

    /// The elements of a shard of a tensor that has its shape, perhaps another shard on each rank.
    ///
    /// # Errors
    /// As [`OneFile::whole`]; if it has another shape.
    pub(crate) fn shard(&self, name: &str, shard: &ShardSpec) -> Result<Tensor> {
        let entry = self.named(name)?;
        if entry.as_tensor().0 != shard.shape {
            let what = format!("{name} has shape {:?}, this run has {:?}", entry.shape, shard.shape);
            return Err(unreadable(&self.path, what));
        }
        Ok(self.elements(name, entry, Some(&shard.rectangles()))?.unwrap_or_default())
    }

    /// The elements of the `wanted` chunks of a tensor, one chunk after the other; the whole tensor is broadcast. `None` on a rank that
    /// needs none.
    fn elements(&self, name: &str, entry: &Entry, wanted: Option<&[Chunk]>) -> Result<Option<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let (_, kind) = entry.as_tensor();
        let (size, device) = (kind.elt_size_in_bytes(), tch::Device::Cpu);
        let own_len = wanted.map(|wanted| wanted.iter().map(Chunk::numel).sum::<usize>() * size);
        let values = own_len.map(|len| Tensor::f_empty([len as i64], (Kind::Uint8, device))).transpose();
        let whole = Chunk::whole(&entry.shape);
        // in the order of the elements, in the whole tensor and in the chunks
        let runs = wanted.unwrap_or_default().iter().flat_map(|wanted| whole.runs(wanted));
        let mut runs = runs.map(|(start, _, len)| start * size..(start + len) * size);
        let mut run = runs.next();
        let (mut at, mut filled, total) = (0, 0, entry.numel() * size);
        let mut copied = Ok(());
        while at < total {
            let end = total.min(at + PIECE);
            let piece = self.piece(name, at, end - at)?;
            while let Some(own) = run.clone().filter(|own| own.start < end) {
                let (first, until) = (own.start.max(at), own.end.min(end));
                let part =
                    |tensor: &Tensor, start: usize| tensor.f_narrow(0, start as i64, (until - first) as i64);
                if let (Ok(Some(values)), true) = (&values, copied.is_ok()) {
                    let target = part(values, filled);
                    copied =
                        target.and_then(|mut target| target.f_copy_(&part(&piece, first - at)?)).map(drop);
                }
                filled += until - first;
                if own.end > end {
                    break; // the next piece has more of it
                }
                run = runs.next();
            }
            at = end;
        }
        copied?;
        let Some(values) = values? else { return Ok(None) };
        Ok(Some(match own_len {
            Some(0) => Tensor::f_empty([0_i64], (kind, device))?,
            _ => values.f_view_dtype(kind)?,
        }))
    }

    /// Bytes of a tensor, from rank 0.
    fn piece(&self, name: &str, at: usize, len: usize) -> Result<Tensor> {
        if let Some(problem) = &*self.failure.borrow() {
            return Err(not_read(&self.path, problem.clone()));
        }
        let received = self.receive(name, at, len);
        let problem = match &received {
            Ok(Ok(_)) => None,
            Ok(Err(problem)) => Some(problem.clone()),
            Err(error) => Some(Problem::new(error.to_string(), "look at the ranks that are named")),
        };
        *self.failure.borrow_mut() = problem;
        received?.map_err(|problem| not_read(&self.path, problem))
    }

    fn receive(&self, name: &str, at: usize, len: usize) -> Result<Result<Tensor, Problem>> {
        let _named = collective_scope(format!("{name} of the checkpoint"));
        let mut failed = None;
        // the first byte says whether rank 0 could read the others
        let piece = match self.opened.as_ref().map(|opened| opened.read(name, at, len)) {
            Some(Ok(bytes)) => Tensor::f_from_slice(&bytes)?,
            Some(Err(error)) => {
                failed = Some(of_rank_zero(Error::io("read checkpoint", &self.path, error)));
                Tensor::f_ones([len as i64 + 1], (Kind::Uint8, tch::Device::Cpu))?
            }
            None => Tensor::f_empty([len as i64 + 1], (Kind::Uint8, tch::Device::Cpu))?,
        };
        self.group.broadcast(&piece, 0)?;
        if piece.f_int64_value(&[0])? == 0 {
            return Ok(Ok(piece.f_narrow(0, 1, len as i64)?));
        }
        let failed: Option<Problem> = self.group.broadcast_object(&failed, 0)?;
        Ok(Err(failed.unwrap_or_else(|| Problem::new("rank 0 could not read on", REMEDY))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::lightning::state_dict;
    use crate::checkpoint::torch_file::write_torch;

    #[test]
    fn bytes_of_a_torch_file_are_those_of_its_tensors() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.pt");
        let large = Tensor::arange(64 * 48, (Kind::Float, tch::Device::Cpu)).reshape([64, 48]);
        let weights = [
            ("large", large.shallow_clone()),
            ("tied", large.shallow_clone()),
            ("across", large.tr()),
            ("rows", large.narrow(0, 16, 40)),
            ("columns", large.narrow(1, 16, 30)),
            ("half", large.to_kind(Kind::BFloat16)),
            ("small", large.narrow(0, 0, 1).copy()),
            ("number", Tensor::from(7.0_f32)),
            ("empty", Tensor::zeros([0, 3], (Kind::Float, tch::Device::Cpu))),
        ];
        let weights = weights.map(|(name, tensor)| (name.to_owned(), tensor));
        write_torch(&state_dict(&weights), &path).expect("writes");
        let (opened, contents) = Opened::of(&path).expect("opens");
        assert_eq!(contents.tensors.len(), weights.len());
        for (name, tensor) in &weights {
            let (shape, kind) = contents.tensors[name].as_tensor();
            assert_eq!((shape, kind), (tensor.size(), tensor.kind()), "{name}");
            let expected = bytes_of(tensor).expect("copies");
            let (first, second) = expected.split_at(expected.len() / 3);
            assert_eq!(opened.read(name, 0, first.len()).expect("reads")[1..], *first, "{name}");
            assert_eq!(opened.read(name, first.len(), second.len()).expect("reads")[1..], *second, "{name}");
        }
        let in_file = |name: &str| matches!(opened.places[name], Place::File(_));
        assert!(["large", "tied", "rows", "half"].into_iter().all(in_file));
        assert!(!["small", "number", "empty"].into_iter().any(in_file));
    }

    #[test]
    fn a_torch_file_that_is_damaged_is_refused() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.pt");
        let large = Tensor::ones([64, 48], (Kind::Float, tch::Device::Cpu));
        write_torch(&state_dict(&[("large".to_owned(), large)]), &path).expect("writes");
        let whole = std::fs::read(&path).expect("readable");
        let mut flipped = whole.clone();
        let at = flipped.windows(4).position(|bytes| *bytes == 1.0_f32.to_le_bytes()).expect("has a one");
        flipped[at] ^= 1;
        for damaged in [&flipped[..], &whole[..whole.len() - 40]] {
            std::fs::write(&path, damaged).expect("writable");
            let error = Opened::of(&path).map(drop).expect_err("damaged").to_string();
            assert!(error.contains("a.pt") && error.contains("damaged"), "{error}");
        }
    }

    #[test]
    fn changed_bytes_are_refused_or_read_within_the_file() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.ckpt");
        let large = Tensor::arange(20 * 30, (Kind::Float, tch::Device::Cpu)).reshape([20, 30]);
        let weights = [("a.weight", large.shallow_clone()), ("a.bias", large.narrow(0, 0, 12))];
        let weights = weights.map(|(name, tensor)| (name.to_owned(), tensor));
        write_torch(&state_dict(&weights), &path).expect("writes");
        let torch = std::fs::read(&path).expect("readable");
        crate::checkpoint::write_weights(&weights, &path).expect("writes");
        let plain = std::fs::read(&path).expect("readable"); // has no checksum
        let mut state = 7_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut read = 0;
        for number in 0..600 {
            let mut bytes = if number % 2 == 0 { torch.clone() } else { plain.clone() };
            for _ in 0..=next(3) {
                // mostly where the structure is: in the header, and in the directory at the end
                let near = next(400.min(bytes.len()));
                let at = if next(2) == 0 { near } else { bytes.len() - 1 - near };
                match next(3) {
                    0 => bytes[at] ^= 1 << next(8),
                    1 => bytes[at] = b"019{}[],\":\xff"[next(11)],
                    _ => bytes.truncate(at.max(16)),
                }
            }
            std::fs::write(&path, &bytes).expect("writable");
            let Ok((opened, contents)) = Opened::of(&path) else { continue };
            for (name, entry) in &contents.tensors {
                let len = entry.numel() * entry.as_tensor().1.elt_size_in_bytes();
                assert_eq!(opened.read(name, 0, len).expect("within the file").len(), len + 1, "{number}");
                read += 1;
            }
        }
        assert!(read > 20, "{read}");
    }
}
