//! The file layout: safetensors, weights under their fqn, everything else under names that start with `voltaic:`.
//!
//! safetensors' own header is the only index. The `__metadata__` entry `voltaic` holds JSON: [`CheckpointMeta`]
//! and the part of the training state that is not tensors.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use safetensors::tensor::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::atomic::write_atomically;
use super::budget::{Budget, ReadLimits};
use super::checkpoint::{Checkpoint, CheckpointMeta, FORMAT_VERSION, RankState, Shard, TrainingState};
use super::stream::{Planned, bytes_of, of_size, patch, write_tensors};
use crate::config::read_file;
use crate::dtype::DtypeNames;
use crate::error::{CheckpointError, Error, Problem, Result};

type NamedTensors = Vec<(String, Tensor)>;

pub(super) const PREFIX: &str = "voltaic:";
/// Prefix of the names of a rank's local state, in the file of that rank.
pub(super) const OWN: &str = "voltaic:own.";
pub(super) const METADATA_KEY: &str = "voltaic";
/// Metadata entry with the CRC-32 of the whole file, in which these eight digits count as zeros.
const CHECKSUM_KEY: &str = "voltaic_crc32";
pub(super) const NO_CHECKSUM: &[u8; 8] = b"00000000";
/// The entry of safetensors' header that is not a tensor.
pub(super) const METADATA_ENTRY: &str = "__metadata__";
/// libtorch's operators take no more dimensions.
const MAX_DIMS: usize = 64;
/// A file with more optimizers is rejected.
pub(super) const MAX_OPTIMIZERS: usize = 1 << 16;

/// What the metadata entry holds.
#[derive(Serialize, Deserialize)]
pub(super) struct Header {
    pub meta: CheckpointMeta,
    /// `null` for a checkpoint of weights only.
    pub training: Option<serde_json::Value>,
    num_optimizers: usize,
    /// See [`later_than_all`].
    #[serde(default)]
    pub saved_at: Option<u64>,
    /// Values logged on ranks 1, 2, ...
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ranks: Vec<serde_json::Value>,
}

/// safetensors' name of a tensor's dtype.
///
/// # Errors
/// If it has none.
pub(super) fn dtype(tensor: &Tensor, name: &str, module: &str) -> Result<Dtype> {
    if !tensor.defined() {
        let what = format!("{name} is undefined");
        return Err(cannot_hold(module, what, "try_state_dict returns why a weight could not be unsharded"));
    }
    DtypeNames::of_kind(tensor.kind()).and_then(|dtype| dtype.safetensors).ok_or_else(|| {
        let what = format!("{name} has dtype {:?}, which safetensors cannot hold", tensor.kind());
        cannot_hold(module, what, "cast it, or make it a non-persistent buffer")
    })
}

pub(super) fn kind(dtype: Dtype) -> Option<Kind> {
    DtypeNames::of_safetensors(dtype)?.kind
}

/// The name of an optimizer's state in the file.
pub(crate) fn optimizer_name(index: usize, name: &str) -> String {
    format!("{PREFIX}optimizer.{index}.{name}")
}

/// The name of a gradient in the file.
pub(crate) fn grad_name(fqn: &str) -> String {
    format!("{PREFIX}grad.{fqn}")
}

/// The name of a callback's tensor in the file.
pub(crate) fn callback_name(name: &str) -> String {
    format!("{PREFIX}callback.{name}")
}

/// The whole tensors of a checkpoint that all ranks have in common, with the names they have in the file, and whether they belong to
/// an optimizer.
pub(super) fn shared_tensors(checkpoint: &Checkpoint) -> Vec<(String, &Tensor, bool)> {
    let mut named: Vec<(String, &Tensor, bool)> =
        checkpoint.weights.iter().map(|(n, t)| (n.clone(), t, false)).collect();
    let Some(training) = &checkpoint.training else { return named };
    for (i, optimizer) in training.optimizers.iter().enumerate() {
        named.extend(optimizer.iter().map(|(n, t)| (optimizer_name(i, n), t, true)));
    }
    named.extend(training.callbacks.iter().map(|(n, t)| (callback_name(n), t, false)));
    named.extend(training.fp8.iter().map(|(n, t)| (format!("{PREFIX}fp8.{n}"), t, false)));
    named.extend(training.module.iter().map(|(n, t)| (format!("{PREFIX}module.{n}"), t, false)));
    named
}

/// All tensors of a checkpoint with the names they have in the file.
pub(super) fn named_tensors(checkpoint: &Checkpoint) -> Vec<(String, &Tensor)> {
    let mut named: Vec<(String, &Tensor)> =
        shared_tensors(checkpoint).into_iter().map(|(name, tensor, _)| (name, tensor)).collect();
    let Some(training) = &checkpoint.training else { return named };
    let own = tensors_of_rank(&training.grads, &training.metrics, &training.rng, &[]);
    named.extend(own.map(|(n, t)| (format!("{PREFIX}{n}"), t)));
    for (rank, state) in (1..).zip(&training.ranks) {
        let own = tensors_of_rank(&state.grads, &state.metrics, &state.rng, &state.fp8);
        named.extend(own.map(|(n, t)| (format!("{PREFIX}rank.{rank}.{n}"), t)));
    }
    named
}

/// The local state of a rank, with names; scales in float8 of rank 0 have their names among the tensors of all ranks.
pub(super) fn tensors_of_rank<'a>(
    grads: &'a [(String, Tensor)],
    metrics: &'a [(String, Tensor)],
    rng: &'a [(String, Tensor)],
    fp8: &'a [(String, Tensor)],
) -> impl Iterator<Item = (String, &'a Tensor)> {
    let lists = [("grad", grads), ("metric", metrics), ("rng", rng), ("fp8", fp8)];
    lists
        .into_iter()
        .flat_map(|(kind, list)| list.iter().map(move |(name, tensor)| (format!("{kind}.{name}"), tensor)))
}

/// Puts a tensor where [`tensors_of_rank`] has it from; false if its name has no meaning.
pub(super) fn add_to_rank(state: &mut RankState, name: &str, tensor: Tensor) -> bool {
    match name.split_once('.') {
        Some(("grad", fqn)) => state.grads.push((fqn.to_owned(), tensor)),
        Some(("metric", name)) => state.metrics.push((name.to_owned(), tensor)),
        Some(("rng", device)) => state.rng.push((device.to_owned(), tensor)),
        Some(("fp8", name)) => state.fp8.push((name.to_owned(), tensor)),
        _ => return false,
    }
    true
}

/// A rank's own state as one message for rank 0: a safetensors file.
pub(crate) fn rank_to_bytes(state: &RankState) -> Result<Vec<u8>> {
    let tensors = tensors_of_rank(&state.grads, &state.metrics, &state.rng, &state.fp8).collect();
    let metadata = HashMap::from([(METADATA_KEY.to_owned(), state.logged.to_string())]);
    let mut bytes = Vec::new();
    let planned = planned(&tensors, "the state of a rank")?;
    write_tensors(&mut bytes, &planned, metadata, &mut |index| bytes_of(tensors[index].1))
        .map_err(|error| Error::io("serialize", "the state of a rank", error))?;
    Ok(bytes)
}

/// Reads [`rank_to_bytes`].
pub(crate) fn rank_from_bytes(bytes: &[u8]) -> Result<RankState> {
    let path = Path::new("the state of a rank");
    let Opened { header, tensors, .. } = open_bytes(bytes, path)?;
    let header = header.unwrap_or_default();
    let logged = serde_json::from_str(&header).map_err(|e| unreadable(path, e.to_string()))?;
    let mut state = RankState { logged, ..RankState::default() };
    for (name, tensor) in tensors {
        if !add_to_rank(&mut state, &name, tensor) {
            return Err(unreadable(path, format!("{name} has an unknown meaning")));
        }
    }
    Ok(state)
}

/// The latest `saved_at` that this process has written or read.
static LATEST: AtomicU64 = AtomicU64::new(0);

/// The time in microseconds since 1970, or a little later: larger than all earlier values, also those of the run that this one
/// resumes, even if the clock was set back. Which checkpoint is the last one then does not depend on the times of files, which
/// change when they are copied.
pub(super) fn later_than_all() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX);
    let later = |latest: u64| now.max(latest.saturating_add(1));
    let before = LATEST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |latest| Some(later(latest)));
    later(before.unwrap_or_else(|latest| latest))
}

/// Notes when a checkpoint that is read was written.
pub(super) fn note_saved_at(saved_at: u64) {
    LATEST.fetch_max(saved_at, Ordering::Relaxed);
}

/// Writes `checkpoint` to `path`; see [`Checkpoint::save`].
///
/// # Errors
/// As [`Checkpoint::save`], and if a tensor has a dtype that safetensors has not.
pub fn write(checkpoint: &Checkpoint, path: &Path) -> Result<()> {
    if let Some(shard) = checkpoint.shards.first() {
        let what = format!("it has a shard of {} only, that of one of several ranks", shard.name);
        let remedy = "save it through the trainer, with a CheckpointIo that saves shards, or without it";
        return Err(cannot_hold(&checkpoint.meta.module, what, remedy));
    }
    let num_optimizers = checkpoint.training.as_ref().map_or(0, |training| training.optimizers.len());
    if num_optimizers > MAX_OPTIMIZERS {
        let what = format!("it has {num_optimizers} optimizers, a file holds at most {MAX_OPTIMIZERS}");
        return Err(cannot_hold(
            &checkpoint.meta.module,
            what,
            "use fewer optimizers, with several groups each",
        ));
    }
    check_names(&checkpoint.weights, &checkpoint.meta.module)?;
    let tensors = named_tensors(checkpoint);
    let planned = planned(&tensors, &checkpoint.meta.module)?;
    write_file(checkpoint, &planned, path, &mut |index| bytes_of(tensors[index].1))
}

/// Writes a checkpoint with these tensors, whose bytes are requested one tensor at a time.
pub(super) fn write_file(
    checkpoint: &Checkpoint,
    planned: &[Planned],
    path: &Path,
    bytes_of: &mut dyn FnMut(usize) -> std::io::Result<Vec<u8>>,
) -> Result<()> {
    let text = header_text(checkpoint, path)?;
    let metadata = HashMap::from([
        (METADATA_KEY.to_owned(), text),
        (CHECKSUM_KEY.to_owned(), String::from_utf8_lossy(NO_CHECKSUM).into_owned()),
        ("format".to_owned(), "pt".to_owned()),
    ]);
    write_atomically(path, |writer| {
        let written = write_tensors(&mut *writer, planned, metadata, bytes_of);
        let written = written.map_err(|error| of_size(error, planned))?;
        // the digits are in the header, which comes before what they are computed of
        match checksum_at(&written.header) {
            Some(at) => patch(writer, at as u64, format!("{:08x}", written.crc).as_bytes()),
            None => Ok(()),
        }
    })
}

/// The text of the metadata entry.
pub(super) fn header_text(checkpoint: &Checkpoint, path: &Path) -> Result<String> {
    let training = checkpoint.training.as_ref();
    let header = Header {
        saved_at: Some(later_than_all()),
        num_optimizers: training.map_or(0, |training| training.optimizers.len()),
        meta: CheckpointMeta {
            format_version: FORMAT_VERSION,
            voltaic_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..checkpoint.meta.clone()
        },
        training: training.map(|training| training.json.clone()),
        ranks: training
            .map(|training| training.ranks.iter().map(|rank| rank.logged.clone()).collect())
            .unwrap_or_default(),
    };
    serde_json::to_string(&header).map_err(|e| Error::io("serialize", path, e.into()))
}

/// Weights must not be taken for training states when they are read.
pub(super) fn check_names(weights: &[(String, Tensor)], module: &str) -> Result<()> {
    let Some((name, _)) = weights.iter().find(|(name, _)| name.starts_with(PREFIX)) else { return Ok(()) };
    let what = format!("a weight is called {name}, and `{PREFIX}` begins the names of training states");
    Err(cannot_hold(module, what, "give it another name"))
}

/// Each name must be that of one tensor, and not one that safetensors keeps for itself.
pub(super) fn check_unique<'a>(names: impl Iterator<Item = &'a str>, module: &str) -> Result<()> {
    let mut known = HashSet::new();
    for name in names {
        let what = match () {
            () if name == METADATA_ENTRY => {
                format!("a tensor is called {name}, which safetensors keeps for itself")
            }
            () if !known.insert(name) => format!("two tensors are called {name}"),
            () => continue,
        };
        return Err(cannot_hold(module, what, "give it another name"));
    }
    Ok(())
}

/// What is written of tensors.
fn planned(tensors: &Vec<(String, &Tensor)>, module: &str) -> Result<Vec<Planned>> {
    check_unique(tensors.iter().map(|(name, _)| name.as_str()), module)?;
    let plan = |(name, tensor): &(String, &Tensor)| {
        let shape = tensor.size().iter().map(|&dim| dim as usize).collect();
        Ok(Planned { name: name.clone(), dtype: dtype(tensor, name, module)?, shape })
    };
    tensors.iter().map(plan).collect()
}

/// Writes weights as a plain safetensors file, as PyTorch's users share them.
///
/// # Errors
/// As [`Checkpoint::save`].
pub fn write_weights(weights: &[(String, Tensor)], path: &Path) -> Result<()> {
    check_names(weights, "weights")?;
    let tensors = weights.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
    let planned = planned(&tensors, "weights")?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    write_atomically(path, |writer| {
        write_tensors(writer, &planned, metadata, &mut |i| bytes_of(tensors[i].1)).map(drop)
    })
}

pub(super) fn cannot_hold(module: &str, what: String, remedy: &'static str) -> Error {
    CheckpointError::Mismatch { module: module.to_owned(), problem: Problem::new(what, remedy) }.into()
}

pub(super) fn unreadable(path: &Path, what: impl Into<String>) -> Error {
    CheckpointError::Unreadable {
        path: path.to_path_buf(),
        problem: Problem::new(what, "use another checkpoint"),
    }
    .into()
}

/// Where the digits of the checksum are.
pub(super) fn checksum_at(bytes: &[u8]) -> Option<usize> {
    let length = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let end = usize::try_from(length).ok()?.checked_add(8)?.min(bytes.len());
    let digits = metadata_at(&bytes[..end.max(8)], CHECKSUM_KEY)?;
    (digits + NO_CHECKSUM.len() <= end).then_some(digits)
}

/// Where the text of a metadata entry begins in a header. Quotes within other entries are escaped, so this is found nowhere else.
pub(super) fn metadata_at(header: &[u8], key: &str) -> Option<usize> {
    let needle = format!("\"{key}\":\"");
    let at = header.windows(needle.len()).position(|window| window == needle.as_bytes())?;
    Some(at + needle.len())
}

/// The checksum of a file whose checksum is at `at`.
fn checksum(bytes: &[u8], at: usize) -> String {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&bytes[..at]);
    crc.update(NO_CHECKSUM);
    crc.update(&bytes[at + NO_CHECKSUM.len()..]);
    format!("{:08x}", crc.finalize())
}

/// Refuses a file whose checksum is not that of its bytes.
fn check_seal(bytes: &[u8], path: &Path) -> Result<()> {
    let Some(at) = checksum_at(bytes) else { return Ok(()) };
    let found = String::from_utf8_lossy(&bytes[at..at + NO_CHECKSUM.len()]).into_owned();
    let computed = checksum(bytes, at);
    if found == computed {
        return Ok(());
    }
    Err(unreadable(path, format!("its checksum is {computed} but should be {found}: the file is damaged")))
}

/// Reads the file and splits the text of the header, if there is one, from the tensors.
fn open(path: &Path) -> Result<Opened> {
    let bytes = read_file(path, u64::MAX).map_err(|e| Error::io("read checkpoint", path, e))?;
    refuse_torch(&bytes, path)?;
    check_seal(&bytes, path)?;
    open_bytes(&bytes, path)
}

/// Refuses what begins like a file of `torch.save`.
pub(super) fn refuse_torch(head: &[u8], path: &Path) -> Result<()> {
    if !head.starts_with(b"PK\x03\x04") {
        return Ok(());
    }
    let remedy = format!("convert it with `voltaic convert {} NEW_NAME`", path.display());
    let problem = Problem::new("it is a file of PyTorch or Lightning", remedy);
    Err(CheckpointError::Unreadable { path: path.to_path_buf(), problem }.into())
}

/// The same of what has been read from `path`.
fn open_bytes(bytes: &[u8], path: &Path) -> Result<Opened> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| unreadable(path, e.to_string()))?;
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| unreadable(path, e.to_string()))?;
    let header = metadata.metadata().as_ref().and_then(|map| map.get(METADATA_KEY).cloned());
    let mut tensors = Vec::new();
    for (name, view) in file.iter() {
        let kind = kind(view.dtype())
            .ok_or_else(|| unreadable(path, format!("{name} has dtype {:?}, unknown here", view.dtype())))?;
        let shape = shape_of(view.shape())
            .ok_or_else(|| unreadable(path, format!("{name} has shape {:?}, too large", view.shape())))?;
        tensors.push((name.to_owned(), Tensor::f_from_data_size(view.data(), &shape, kind)?));
    }
    Ok(Opened { header, tensors, is_sealed: checksum_at(bytes).is_some() })
}

/// A shape whose number of elements does not overflow, in whatever order its dimensions are multiplied.
pub(super) fn shape_of(sizes: &[usize]) -> Option<Vec<i64>> {
    if sizes.len() > MAX_DIMS {
        return None;
    }
    let shape = sizes.iter().map(|&size| i64::try_from(size)).collect::<Result<Vec<i64>, _>>().ok()?;
    shape.iter().try_fold(1_i64, |numel, &size| numel.checked_mul(size.max(1)))?;
    Some(shape)
}

/// Refuses JSON whose values take far more memory than its text.
pub(super) fn check_json(text: &str, path: &Path) -> Result<()> {
    let mut budget = Budget::new(text.len() as u64, ReadLimits::default());
    budget
        .take_json(text)
        .map_err(|what| unreadable(path, format!("its training state is too large: {what}")))
}

/// A file taken apart.
struct Opened {
    /// Text of the header, if there is one.
    header: Option<String>,
    tensors: NamedTensors,
    /// There is a checksum, and it is right.
    is_sealed: bool,
}

/// Reads a checkpoint of one file; see [`Checkpoint::load`].
pub(super) fn read(path: &Path) -> Result<Checkpoint> {
    let Opened { header, tensors, is_sealed } = open(path)?;
    let names = tensors.iter().map(|(name, _)| name.as_str());
    let Some(header) = header_of(header.as_deref(), is_sealed, names, path)? else {
        // any safetensors file of weights will do
        return Ok(Checkpoint { weights: tensors, ..Checkpoint::default() });
    };
    let mut checkpoint = header.into_checkpoint();
    let Checkpoint { weights, training, .. } = &mut checkpoint;
    let mut none = TrainingState::default();
    let training = training.as_mut().unwrap_or(&mut none);
    for (name, tensor) in tensors {
        add_tensor(weights, training, name, tensor).map_err(|what| unreadable(path, what))?;
    }
    Ok(checkpoint)
}

/// What the metadata entry of a file holds, with tensors of these names; `None` in a file of others.
///
/// # Errors
/// If it is not understood, or of a later version; if it should be sealed, and is not.
pub(super) fn header_of<'a>(
    text: Option<&str>,
    is_sealed: bool,
    mut names: impl Iterator<Item = &'a str>,
    path: &Path,
) -> Result<Option<Header>> {
    let Some(text) = text else {
        return match names.find(|name| name.starts_with(PREFIX)) {
            Some(name) => Err(unreadable(path, format!("it has {name} but no entry `{METADATA_KEY}`"))),
            None => Ok(None),
        };
    };
    check_json(text, path)?;
    let header: Header = serde_json::from_str(text)
        .map_err(|e| unreadable(path, format!("its training state is not understood: {e}")))?;
    if header.meta.format_version > FORMAT_VERSION {
        let (found, known) = (header.meta.format_version, FORMAT_VERSION);
        return Err(unreadable(
            path,
            format!("it has format version {found}, this voltaic reads up to {known}"),
        ));
    }
    if header.meta.format_version >= 2 && !is_sealed {
        return Err(unreadable(path, "its checksum is missing"));
    }
    if header.num_optimizers > MAX_OPTIMIZERS {
        let found = header.num_optimizers;
        return Err(unreadable(
            path,
            format!("it lists {found} optimizers, at most {MAX_OPTIMIZERS} are read"),
        ));
    }
    note_saved_at(header.saved_at.unwrap_or(0));
    Ok(Some(header))
}

impl Header {
    /// A checkpoint with all but its tensors.
    pub(super) fn into_checkpoint(self) -> Checkpoint {
        let of_rank = |logged| RankState { logged, ..RankState::default() };
        let training = self.training.map(|json| TrainingState {
            optimizers: (0..self.num_optimizers).map(|_| Vec::new()).collect(),
            json,
            ranks: self.ranks.into_iter().map(of_rank).collect(),
            ..TrainingState::default()
        });
        Checkpoint { training, meta: self.meta, ..Checkpoint::default() }
    }
}

/// Puts a tensor where its name says.
///
/// # Errors
/// If the name has no meaning.
pub(super) fn add_tensor(
    weights: &mut NamedTensors,
    training: &mut TrainingState,
    name: String,
    tensor: Tensor,
) -> Result<(), String> {
    let Some(rest) = name.strip_prefix(PREFIX) else {
        weights.push((name, tensor));
        return Ok(());
    };
    match rest.split_once('.') {
        Some(("grad", fqn)) => training.grads.push((fqn.to_owned(), tensor)),
        Some(("callback", name)) => training.callbacks.push((name.to_owned(), tensor)),
        Some(("module", name)) => training.module.push((name.to_owned(), tensor)),
        Some(("fp8", name)) => training.fp8.push((name.to_owned(), tensor)),
        Some(("metric", name)) => training.metrics.push((name.to_owned(), tensor)),
        Some(("rng", device)) => training.rng.push((device.to_owned(), tensor)),
        Some(("rank", rest)) => {
            let (rank, key) = rest.split_once('.').unwrap_or((rest, ""));
            let index = rank.parse::<usize>().ok().and_then(|rank| rank.checked_sub(1));
            let state = index.and_then(|index| training.ranks.get_mut(index));
            if !state.is_some_and(|state| add_to_rank(state, key, tensor)) {
                return Err(format!("{name} belongs to no rank"));
            }
        }
        Some(("optimizer", rest)) => {
            let (index, key) = rest.split_once('.').unwrap_or((rest, ""));
            let optimizer = index.parse::<usize>().ok().and_then(|index| training.optimizers.get_mut(index));
            let Some(optimizer) = optimizer else { return Err(format!("{name} belongs to no optimizer")) };
            optimizer.push((key.to_owned(), tensor));
        }
        _ => return Err(format!("{name} has an unknown meaning")),
    }
    Ok(())
}

impl Checkpoint {
    /// Writes the checkpoint to `path`, replacing a file of that name only once it is complete.
    ///
    /// # Errors
    /// If the folder cannot be written to or the disk is full; the file of that name, if any, is unchanged.
    pub fn save(&self, path: &std::path::Path) -> Result<()> {
        write(self, path)
    }

    /// Makes unsharded tensors of the shards of a run that has one rank. A shard of a gradient is added to what the rank has of it unsharded, of a
    /// later backward pass.
    ///
    /// # Errors
    /// If a shard is not all of its tensor; if its name has no meaning.
    pub(crate) fn merge_shards(&mut self) -> Result<()> {
        let mut none = TrainingState::default();
        let training = self.training.as_mut().unwrap_or(&mut none);
        let had: HashSet<String> = training.had_grad.drain(..).map(|fqn| grad_name(&fqn)).collect();
        let is_grad = |name: &str| name.starts_with(&grad_name(""));
        for Shard { name, spec, values } in self.shards.drain(..) {
            if is_grad(&name) && !had.contains(&name) {
                continue;
            }
            let whole = values.f_reshape(spec.shape.as_slice())?;
            let mut grads = training.grads.iter_mut();
            if let Some((_, grad)) = grads.find(|(fqn, _)| grad_name(fqn) == name) {
                *grad = grad.f_add(&whole.f_to_device(grad.device())?)?;
                continue;
            }
            let module = &self.meta.module;
            add_tensor(&mut self.weights, training, name, whole)
                .map_err(|what| cannot_hold(module, what, "save it through the trainer"))?;
        }
        for (alias, name) in self.tied.drain(..) {
            let first = self.weights.iter().find(|(own, _)| *own == name);
            let Some(whole) = first.map(|(_, weight)| weight.shallow_clone()) else { continue };
            self.weights.push((alias, whole));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DTYPES;

    /// Puts the checksum into a file that has room for it.
    fn seal(bytes: &mut [u8]) {
        if let Some(at) = checksum_at(bytes) {
            let digits = checksum(bytes, at);
            bytes[at..at + NO_CHECKSUM.len()].copy_from_slice(digits.as_bytes());
        }
    }

    fn example() -> Checkpoint {
        let tensor = |kind| Tensor::arange(6, (Kind::Float, tch::Device::Cpu)).reshape([2, 3]).to_kind(kind);
        Checkpoint {
            weights: DTYPES
                .iter()
                .filter(|dtype| dtype.safetensors.is_some())
                .filter_map(|dtype| dtype.kind)
                .map(|kind| (format!("w.{kind:?}"), tensor(kind)))
                .collect(),
            training: Some(TrainingState {
                optimizers: vec![vec![("exp_avg.fc.weight".into(), tensor(Kind::Float))], vec![]],
                grads: vec![("fc.weight".into(), Tensor::zeros([0], (Kind::Float, tch::Device::Cpu)))],
                callbacks: vec![("average.fc.weight".into(), tensor(Kind::Float))],
                module: vec![("queue".into(), tensor(Kind::BFloat16))],
                metrics: vec![("accuracy.tp".into(), tensor(Kind::Int64))],
                rng: vec![("cpu".into(), tensor(Kind::Uint8))],
                json: serde_json::json!({"progress": {"global_step": 7}}),
                ranks: vec![
                    RankState { logged: serde_json::json!({"train": []}), ..RankState::default() },
                    RankState {
                        grads: vec![("fc.weight".into(), tensor(Kind::Float))],
                        metrics: vec![("accuracy.tp".into(), tensor(Kind::Int64))],
                        rng: vec![("hpu:2".into(), tensor(Kind::Uint8))],
                        fp8: vec![("fc/scale_fwd".into(), tensor(Kind::Float))],
                        logged: serde_json::Value::Null,
                    },
                ],
                ..TrainingState::default()
            }),
            meta: CheckpointMeta {
                epoch: 1,
                global_step: 7,
                module: "Net".into(),
                ..CheckpointMeta::default()
            },
            ..Checkpoint::default()
        }
    }

    #[test]
    fn every_part_comes_back() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.ckpt");
        let saved = example();
        saved.save(&path).expect("saves");
        let loaded = read(&path).expect("loads");
        assert_eq!(loaded.meta.global_step, 7);
        let ranks = &loaded.training.as_ref().expect("a full checkpoint").ranks;
        assert_eq!((ranks.len(), &ranks[0].logged), (2, &serde_json::json!({"train": []})));
        let (saved, loaded) = (named_tensors(&saved), named_tensors(&loaded));
        assert_eq!(saved.len(), loaded.len());
        assert!(saved.iter().any(|(name, _)| name == "voltaic:rank.2.rng.hpu:2"));
        for (name, tensor) in saved {
            let other = loaded.iter().find(|(n, _)| *n == name).expect(&name).1;
            assert_eq!(tensor.kind(), other.kind(), "{name}");
            assert_eq!(tensor.to_kind(Kind::Float), other.to_kind(Kind::Float), "{name}");
        }
    }

    #[test]
    fn damaged_files_are_named_and_explained() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.ckpt");
        example().save(&path).expect("saves");
        let whole = std::fs::read(&path).expect("readable");
        for cut in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).expect("writable");
            let error = read(&path).expect_err("truncated").to_string();
            assert!(error.contains("a.ckpt") && error.contains("; use another checkpoint"), "{error}");
        }
        std::fs::remove_file(&path).expect("removable");
        assert!(read(&path).expect_err("missing").to_string().contains("check that the path is right"));
    }

    #[test]
    fn a_later_format_is_refused() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.ckpt");
        example().save(&path).expect("saves");
        let mut bytes = std::fs::read(&path).expect("readable");
        let needle = b"format_version\\\":2";
        let at = bytes.windows(needle.len()).position(|w| w == needle).expect("holds the version")
            + needle.len()
            - 1;
        bytes[at] = b'9';
        seal(&mut bytes);
        std::fs::write(&path, bytes).expect("writable");
        assert!(read(&path).expect_err("later").to_string().contains("format version 9"));
    }
}
