//! Reads a sharded checkpoint: any elements of any tensor, in whichever files they are.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata};
use tch::{Kind, Tensor};

use super::folder::{INDEX, file_name};
use super::index::{Entry, FileEntry, Index};
use super::write::{BLOCKS_KEY, DIGITS, METADATA_KEY, Owner};
use crate::checkpoint::budget::{Budget, ReadLimits};
use crate::checkpoint::checkpoint::{Checkpoint, CheckpointMeta, FORMAT_VERSION, RankState, TrainingState};
use crate::checkpoint::chunk::{Chunk, ShardSpec, usizes};
use crate::checkpoint::format::{
    OWN, PREFIX, add_tensor, add_to_rank, grad_name, kind, note_saved_at, shape_of, unreadable,
};
use crate::checkpoint::masters::{masters_of, may_have_master, parameter_of, source};
use crate::checkpoint::peek::{Beginning, open_header};
use crate::checkpoint::stream::BLOCK;
use crate::error::{CheckpointError, Error, Problem, Result};

/// A file is checked in pieces of so many bytes.
const PIECE: usize = 1 << 20;
/// What a tensor that shares its elements with another takes, with its name.
const BYTES_OF_NAMED: usize = 256;

/// A checkpoint in a folder, whose tensors are read on request.
pub(crate) struct Shards {
    folder: PathBuf,
    index: Index,
    /// Those that have been opened, by rank.
    files: Vec<OnceCell<Opened>>,
}

/// A file whose header has been checked.
struct Opened {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Where the tensors begin.
    data: u64,
    /// CRC-32 of the blocks of what follows; none in version 1, whose files are checked as a whole when they are opened.
    blocks: Option<Vec<u32>>,
    /// The last block of which only a part was requested: adjacent tensors share it.
    last_block: RefCell<Block>,
}

/// A block that has been checked.
#[derive(Default)]
struct Block {
    index: usize,
    /// Empty before the first one.
    bytes: Vec<u8>,
}

impl Opened {
    /// Where a tensor of so many elements begins.
    fn start_of(&self, name: &str, dtype: Dtype, len: usize) -> Result<usize> {
        let numel = |shape: &[usize]| shape.iter().try_fold(1_usize, |n, size| n.checked_mul(*size));
        let info = self.metadata.info(name);
        let info = info.filter(|info| info.dtype == dtype && numel(&info.shape) == Some(len));
        let what = || format!("{name} is not there as the index says: {len} elements of {dtype:?}");
        info.map(|info| info.data_offsets.0).ok_or_else(|| unreadable(&self.path, what()))
    }

    /// How many bytes a block has.
    fn block_len(&self, index: usize) -> usize {
        self.metadata.data_len().saturating_sub(index * BLOCK).min(BLOCK)
    }

    /// Reads a whole block, and checks it.
    fn read_block(&self, expected: u32, index: usize, bytes: &mut [u8]) -> Result<()> {
        self.read_at(index * BLOCK, bytes)?;
        let computed = crc32fast::hash(bytes);
        if computed == expected {
            return Ok(());
        }
        let what = format!(
            "the checksum of its bytes from {} is {computed:08x} but should be {expected:08x}: the file is damaged",
            self.data + (index * BLOCK) as u64
        );
        Err(unreadable(&self.path, what))
    }

    fn read_at(&self, start: usize, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(bytes, self.data + start as u64);
        read.map_err(|e| Error::io("read checkpoint", &self.path, e))
    }

    /// Reads bytes of tensors, and checks the blocks that they are in.
    fn read(&self, start: usize, mut bytes: &mut [u8]) -> Result<()> {
        let Some(blocks) = &self.blocks else { return self.read_at(start, bytes) };
        let mut at = start;
        while !bytes.is_empty() {
            let (index, first) = (at / BLOCK, at % BLOCK);
            let block_len = self.block_len(index);
            let len = bytes.len().min(block_len.saturating_sub(first));
            let Some(expected) = blocks.get(index).filter(|_| len > 0) else {
                return Err(unreadable(&self.path, "it has fewer bytes than its header says"));
            };
            let (piece, rest) = bytes.split_at_mut(len);
            if len == block_len {
                self.read_block(*expected, index, piece)?;
            } else {
                let mut last = self.last_block.borrow_mut();
                if last.index != index || last.bytes.is_empty() {
                    let mut read = std::mem::take(&mut last.bytes);
                    read.resize(block_len, 0);
                    self.read_block(*expected, index, &mut read)?;
                    *last = Block { index, bytes: read };
                }
                piece.copy_from_slice(&last.bytes[first..first + len]);
            }
            (bytes, at) = (rest, at + len);
        }
        Ok(())
    }

    /// Reads all blocks, and checks them.
    fn check_blocks(&self) -> Result<()> {
        let mut bytes = vec![0; BLOCK];
        let mut blocks = self.blocks.iter().flatten().enumerate();
        blocks.try_for_each(|(index, crc)| self.read_block(*crc, index, &mut bytes[..self.block_len(index)]))
    }
}

impl Shards {
    /// Reads the index.
    ///
    /// # Errors
    /// If the folder is not a checkpoint; if the index is damaged, or of a later version.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let name = folder.join(INDEX);
        if !name.exists() {
            let what = format!("it is a folder without {INDEX}, so no checkpoint, or not a whole one");
            return Err(unreadable(folder, what));
        }
        let index = Index::read(&name)?;
        if index.meta.format_version > FORMAT_VERSION {
            let (found, known) = (index.meta.format_version, FORMAT_VERSION);
            let what = format!("it has format version {found}, this voltaic reads up to {known}");
            return Err(unreadable(&name, what));
        }
        note_saved_at(index.saved_at);
        let files = index.files.iter().map(|_| OnceCell::new()).collect();
        Ok(Self { folder: folder.to_path_buf(), index, files })
    }

    /// Facts about the run that has saved it.
    pub(crate) fn meta(&self) -> &CheckpointMeta {
        &self.index.meta
    }

    /// Whether it has more than weights.
    pub(crate) fn has_training(&self) -> bool {
        self.index.training.is_some()
    }

    /// Ranks that have saved it.
    pub(crate) fn ranks(&self) -> usize {
        self.files.len()
    }

    /// Names and shapes of the weights, tied ones under each of their names.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (&str, &[usize])> {
        let names = self.index.tensors.keys().chain(self.index.tied.keys());
        let weights = names.filter(|name| !name.starts_with(PREFIX));
        weights.filter_map(|name| Some((name.as_str(), self.index.entry(name)?.1.shape.as_slice())))
    }

    /// Whether two names are those of one tensor.
    pub(crate) fn are_one(&self, first: &str, other: &str) -> bool {
        let own = |name| self.index.entry(name).map(|(own, _)| own);
        own(first).is_some() && own(first) == own(other)
    }

    /// safetensors' dtype of a tensor.
    pub(in crate::checkpoint) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.index.entry(name).map(|(_, entry)| entry.dtype)
    }

    /// Refuses to make more of the folder's files than `limits` allow: of tensors by these names, and `more` bytes.
    ///
    /// # Errors
    /// If that is too much, with the sizes; if a file is missing.
    pub(in crate::checkpoint) fn check_growth<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
        more: usize,
        limits: ReadLimits,
    ) -> Result<()> {
        let size = |name: &str| self.folder.join(name).metadata().map_or(0, |metadata| metadata.len());
        let files =
            (0..self.ranks()).map(|rank| size(&file_name(rank))).fold(size(INDEX), u64::saturating_add);
        let mut budget = Budget::new(files, limits);
        let bytes = |name: &str| {
            let entry = self.index.entry(name)?.1;
            entry.numel().checked_mul(kind(entry.dtype)?.elt_size_in_bytes())
        };
        let mut sizes = names.map(|name| bytes(name).unwrap_or(usize::MAX)).chain([more]);
        let Err(what) = sizes.try_for_each(|bytes| budget.take(bytes)) else { return Ok(()) };
        if let Some(rank) = (0..self.ranks()).find(|&rank| !self.folder.join(file_name(rank)).exists()) {
            return self.file(rank).map(drop); // says what to do about that
        }
        let remedy = "if you trust the folder, raise max_growth (--max_growth of convert)";
        let (path, problem) = (self.folder.clone(), Problem::new(what, remedy));
        Err(CheckpointError::Unreadable { path, problem }.into())
    }

    /// Names of weights of 16 bits, each with the name of the master weight that it was rounded from. Reads them all.
    ///
    /// # Errors
    /// As [`Shards::whole`], and before anything is read if they are more than `limits` allow.
    pub(crate) fn masters(&self, limits: ReadLimits) -> Result<HashMap<&str, &str>> {
        let states = (0..self.index.num_optimizers).flat_map(|index| self.optimizer_states(index));
        let known = states.filter_map(|(name, state)| Some((parameter_of(state)?, name))).collect();
        let is_half = |name: &str| self.dtype(name).and_then(kind).is_some_and(may_have_master);
        let names: Vec<&str> = self.weights().map(|(name, _)| name).filter(|name| is_half(name)).collect();
        self.check_growth(names.iter().copied(), 0, limits)?;
        masters_of(&names, &known, &|name| self.whole(name), &|name: &str| self.whole(name))
    }

    /// The weights, whole; tied ones share their memory. Those that are among `masters` have the values of what they name.
    ///
    /// # Errors
    /// As [`Shards::whole`], and if they are more than `limits` allow.
    pub(crate) fn all_weights(
        &self,
        masters: &HashMap<&str, &str>,
        limits: ReadLimits,
    ) -> Result<Vec<(String, Tensor)>> {
        self.check_growth(self.weights().map(|(name, _)| source(masters, name)), 0, limits)?;
        let mut read = TiedOnce::of(self);
        read.tied.extend(masters.values().map(|name| (*name, None)));
        self.weights().map(|(name, _)| Ok((name.to_owned(), read.whole(source(masters, name))?))).collect()
    }

    fn named(&self, name: &str) -> Result<(&str, &Entry)> {
        self.index.entry(name).ok_or_else(|| unreadable(&self.folder, format!("it has no tensor {name}")))
    }

    /// A whole tensor.
    ///
    /// # Errors
    /// If there is none of that name; if a file that has some of it is missing, damaged, or of another checkpoint.
    pub(crate) fn whole(&self, name: &str) -> Result<Tensor> {
        let (name, entry) = self.named(name)?;
        let shape = shape_of(&entry.shape).unwrap_or_default();
        let whole = (entry.numel() > 0).then(|| Chunk::whole(&entry.shape));
        Ok(self.elements(name, entry, whole.as_slice())?.f_view(shape.as_slice())?)
    }

    /// The elements of chunks of a tensor, one behind the other.
    fn elements(&self, name: &str, entry: &Entry, wanted: &[Chunk]) -> Result<Tensor> {
        let kind = self.kind_of(name, entry)?;
        let size = kind.elt_size_in_bytes();
        let lens = entry.lens();
        let mut places = Vec::new();
        let mut total = 0;
        for wanted in wanted {
            for stored in &entry.chunks {
                let runs = stored.chunk.runs(wanted);
                if runs.is_empty() {
                    continue;
                }
                let opened = self.file(stored.rank)?;
                let start = opened.start_of(name, entry.dtype, lens[&stored.rank])?;
                places.push((opened, start + stored.start * size, total, runs));
            }
            total += wanted.numel() * size;
        }
        // as many as the files have, so no more than there are
        let mut bytes = Vec::new();
        let short = |_| Error::io("read", &self.folder, std::io::ErrorKind::OutOfMemory.into());
        bytes.try_reserve_exact(total).map_err(short)?;
        bytes.resize(total, 0);
        for (opened, from, to, runs) in places {
            for (stored, wanted, len) in runs {
                let to = to + wanted * size;
                opened.read(from + stored * size, &mut bytes[to..to + len * size])?;
            }
        }
        Ok(Tensor::f_from_data_size(&bytes, &[(total / size) as i64], kind)?)
    }

    fn kind_of(&self, name: &str, entry: &Entry) -> Result<Kind> {
        kind(entry.dtype).ok_or_else(|| {
            unreadable(&self.folder, format!("{name} has dtype {:?}, unknown here", entry.dtype))
        })
    }

    /// The file of a rank, whose header has been checked.
    fn file(&self, rank: usize) -> Result<&Opened> {
        let (Some(cell), Some(entry)) = (self.files.get(rank), self.index.files.get(rank)) else {
            return Err(unreadable(&self.folder, format!("it has no file of rank {rank}")));
        };
        if let Some(opened) = cell.get() {
            return Ok(opened);
        }
        let opened = self.open_file(rank, entry)?;
        Ok(cell.get_or_init(|| opened))
    }

    fn open_file(&self, rank: usize, entry: &FileEntry) -> Result<Opened> {
        let path = self.folder.join(file_name(rank));
        if !path.exists() {
            let what =
                format!("it is missing: the checkpoint has a file of each of its {} ranks", self.ranks());
            let problem = Problem::new(what, "copy the whole folder, or use another checkpoint");
            return Err(CheckpointError::Unreadable { path, problem }.into());
        }
        let (mut file, header) = open_header(&path)?;
        let found = file.metadata().map_err(|e| Error::io("read checkpoint", &path, e))?.len();
        if found != entry.bytes {
            let what = format!("it has {found} bytes, the index says {}", entry.bytes);
            return Err(unreadable(&path, what));
        }
        let metadata: Metadata =
            serde_json::from_slice(&header[8..]).map_err(|e| unreadable(&path, e.to_string()))?;
        let own = |key: &str| metadata.metadata().as_ref().and_then(|own| own.get(key));
        let owner = own(METADATA_KEY).and_then(|text| serde_json::from_str::<Owner>(text).ok());
        let expected = Owner { id: self.index.id.clone(), rank, ranks: self.ranks() };
        if owner.as_ref() != Some(&expected) {
            let what = format!("it is not the file of rank {rank} of this checkpoint, but of another one");
            return Err(unreadable(&path, what));
        }
        let has_blocks = self.index.shards_version > 1;
        let checked = if has_blocks { 0 } else { found - header.len() as u64 };
        check_crc(&header, &mut (&mut file).take(checked), &entry.crc32, &path)?;
        if header.len() as u64 + metadata.data_len() as u64 != entry.bytes {
            return Err(unreadable(&path, "its length is not that of its header"));
        }
        let digits = own(BLOCKS_KEY).map(String::as_bytes).unwrap_or_default();
        let blocks =
            digits.chunks(DIGITS).map(|digits| u32::from_str_radix(str::from_utf8(digits).ok()?, 16).ok());
        let blocks: Vec<u32> = blocks.map_while(|crc| crc).collect();
        if has_blocks && blocks.len() != metadata.data_len().div_ceil(BLOCK) {
            return Err(unreadable(&path, "its header has not the checksums of all blocks"));
        }
        let (data, blocks) = (header.len() as u64, has_blocks.then_some(blocks));
        Ok(Opened { path, file, metadata, data, blocks, last_block: RefCell::default() })
    }

    /// The local state of a rank.
    fn own(&self, rank: usize) -> Result<RankState> {
        let path = self.folder.join(file_name(rank));
        let logged = rank.checked_sub(1).and_then(|index| self.index.ranks.get(index)).cloned();
        let mut state = RankState { logged: logged.unwrap_or_default(), ..RankState::default() };
        let opened = self.file(rank)?;
        let metadata = &opened.metadata;
        let mut names: Vec<String> = metadata.offset_keys();
        names.retain(|name| name.starts_with(OWN));
        for name in names {
            let (Some(info), Some(own)) = (metadata.info(&name), name.strip_prefix(OWN)) else { continue };
            let (Some(kind), Some(shape)) = (kind(info.dtype), shape_of(&info.shape)) else {
                let what =
                    format!("{name} has dtype {:?} and shape {:?}, not read here", info.dtype, info.shape);
                return Err(unreadable(&path, what));
            };
            let (start, end) = info.data_offsets;
            let mut bytes = vec![0; end - start]; // within the file, by the length in the header
            opened.read(start, &mut bytes)?;
            let tensor = Tensor::f_from_data_size(&bytes, &shape, kind)?;
            if !add_to_rank(&mut state, own, tensor) {
                return Err(unreadable(&path, format!("{name} has an unknown meaning")));
            }
        }
        Ok(state)
    }

    /// The part of a checkpoint that a rank reads whole; of weights, optimizer states and sharded gradients it reads its own elements
    /// later. Of the ranks' local state it has rank 0's, its own, and those of the ranks whose gradients it restores among `ranks`.
    ///
    /// # Errors
    /// As [`Shards::whole`].
    pub(crate) fn rest(&self, rank: usize, ranks: usize) -> Result<Checkpoint> {
        let is_left = |name: &str| match name.strip_prefix(PREFIX) {
            Some(rest) => rest.starts_with("optimizer.") || rest.starts_with("grad."),
            None => true,
        };
        self.checkpoint(Some((rank, ranks)), &is_left)
    }

    /// All tensors except those for which `is_left` holds, by the names that they have in a file. Of the ranks' local state it has what
    /// `rank`, one of so many, needs; without a rank all of it.
    fn checkpoint(&self, rank: Option<(usize, usize)>, is_left: &dyn Fn(&str) -> bool) -> Result<Checkpoint> {
        let mut weights = Vec::new();
        let mut read = TiedOnce::of(self);
        let mut training = TrainingState {
            optimizers: (0..self.index.num_optimizers).map(|_| Vec::new()).collect(),
            json: self.index.training.clone().unwrap_or_default(),
            had_grad: self.index.had_grad.clone(),
            ..TrainingState::default()
        };
        for name in self.index.tensors.keys().chain(self.index.tied.keys()) {
            if is_left(name) {
                continue;
            }
            let tensor = read.whole(name)?;
            add_tensor(&mut weights, &mut training, name.clone(), tensor)
                .map_err(|what| unreadable(&self.folder, what))?;
        }
        if self.index.training.is_some() {
            let takes = |own: usize, (rank, ranks): (usize, usize)| {
                own == 0 || own == rank || own % ranks.max(1) == rank
            };
            training.add_ranks(self.ranks(), |own| match rank {
                Some(rank) if !takes(own, rank) => Ok(RankState::default()),
                _ => self.own(own),
            })?;
        }
        let training = self.index.training.is_some().then_some(training);
        Ok(Checkpoint { weights, training, meta: self.index.meta.clone(), ..Checkpoint::default() })
    }

    /// The elements of a shard of a tensor that has its shape.
    ///
    /// # Errors
    /// As [`Shards::whole`]; if it has another shape.
    pub(crate) fn shard(&self, name: &str, shard: &ShardSpec) -> Result<Tensor> {
        let (name, entry) = self.named(name)?;
        if entry.shape != usizes(&shard.shape) {
            let what = format!("{name} has shape {:?}, this run has {:?}", entry.shape, shard.shape);
            return Err(unreadable(&self.folder, what));
        }
        self.elements(name, entry, &shard.rectangles())
    }

    /// Names of the states of an optimizer, as in a file, with what follows its number.
    pub(crate) fn optimizer_states(&self, index: usize) -> impl Iterator<Item = (&str, &str)> {
        let prefix = format!("{PREFIX}optimizer.{index}.");
        let named = self.index.tensors.keys();
        named.filter_map(move |name| Some((name.as_str(), name.strip_prefix(prefix.as_str())?)))
    }

    /// Whether a tensor is a number, and not one like a parameter.
    pub(crate) fn is_number(&self, name: &str) -> bool {
        self.index.entry(name).is_some_and(|(_, entry)| entry.shape.is_empty())
    }

    /// Parameters whose gradients are the mean of all ranks, and have had one on some rank.
    pub(crate) fn shared_grads(&self) -> impl Iterator<Item = &str> {
        let has = |fqn: &&String| self.index.tensors.contains_key(&grad_name(fqn));
        self.index.had_grad.iter().filter(has).map(String::as_str)
    }

    fn beginning(&self) -> Beginning {
        let training = self.index.training.clone();
        let global_step = self.index.meta.global_step;
        Beginning { training, global_step, saved_at: Some(self.index.saved_at) }
    }
}

/// Refuses a file whose header, and what follows, have not this checksum.
fn check_crc(header: &[u8], rest: &mut impl Read, expected: &str, path: &Path) -> Result<()> {
    let mut crc = crc32fast::Hasher::new();
    crc.update(header);
    let mut piece = vec![0; PIECE];
    loop {
        match rest.read(&mut piece).map_err(|e| Error::io("read checkpoint", path, e))? {
            0 => break,
            read => crc.update(&piece[..read]),
        }
    }
    let computed = format!("{:08x}", crc.finalize());
    if computed == expected {
        return Ok(());
    }
    let what = format!("its checksum is {computed} but should be {expected}: the file is damaged");
    Err(unreadable(path, what))
}

/// Whole tensors of a folder, of which those with several names are read once.
struct TiedOnce<'a> {
    shards: &'a Shards,
    /// By the name in the index; `None` until it is read.
    tied: HashMap<&'a str, Option<Tensor>>,
}

impl<'a> TiedOnce<'a> {
    fn of(shards: &'a Shards) -> Self {
        Self { shards, tied: shards.index.tied.values().map(|name| (name.as_str(), None)).collect() }
    }

    fn whole(&mut self, name: &str) -> Result<Tensor> {
        let (own, _) = self.shards.named(name)?;
        match self.tied.get_mut(own) {
            None => self.shards.whole(own),
            Some(Some(kept)) => Ok(kept.shallow_clone()),
            Some(kept) => {
                let tensor = self.shards.whole(own)?;
                *kept = Some(tensor.shallow_clone());
                Ok(tensor)
            }
        }
    }
}

/// All of a checkpoint in a folder, as of one file.
///
/// # Errors
/// As [`Shards::open`] and [`Shards::whole`]; if that is more than `limits` allow.
pub(in crate::checkpoint) fn load(folder: &Path, limits: ReadLimits) -> Result<Checkpoint> {
    let shards = Shards::open(folder)?;
    let names = shards.index.tensors.keys().chain(shards.index.tied.keys()).map(String::as_str);
    // each rank has the gradients that are sharded
    let grads = shards.shared_grads().count().saturating_mul(shards.ranks());
    shards.check_growth(names, grads.saturating_mul(BYTES_OF_NAMED), limits)?;
    shards.checkpoint(None, &|_| false)
}

/// What a folder says of itself; its files are not looked at.
pub(in crate::checkpoint) fn peek(folder: &Path) -> Result<Beginning> {
    Ok(Shards::open(folder)?.beginning())
}

/// The same if the files of a rank's share are there and unchanged.
pub(in crate::checkpoint) fn peek_whole(folder: &Path, (rank, ranks): (usize, usize)) -> Result<Beginning> {
    let shards = Shards::open(folder)?;
    (rank..shards.ranks()).step_by(ranks).try_for_each(|rank| shards.file(rank)?.check_blocks())?;
    Ok(shards.beginning())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::shards::write::write_rank_file;
    use crate::checkpoint::stream::{Planned, bytes_of};

    /// A folder of one rank with these tensors; `change` edits its index.
    fn folder_of(tensors: &[(&str, Dtype, Tensor)], change: impl FnOnce(&mut Index)) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let owner = Owner { id: "an id".to_owned(), rank: 0, ranks: 1 };
        let mut index = Index::new(owner.id.clone(), 7, CheckpointMeta::default());
        let mut planned = Vec::new();
        for (name, dtype, tensor) in tensors {
            let shape: Vec<usize> = tensor.size().iter().map(|&size| size as usize).collect();
            planned.push(Planned { name: (*name).to_owned(), dtype: *dtype, shape: shape.clone() });
            let mut entry = Entry::new(*dtype, shape.clone());
            entry.add(0, vec![Chunk::whole(&shape)]);
            index.tensors.insert((*name).to_owned(), entry);
        }
        let file = File::create(folder.path().join(file_name(0))).unwrap();
        let written = write_rank_file(file, &planned, &owner, &mut |index| bytes_of(&tensors[index].2));
        index.files = vec![written.unwrap()];
        change(&mut index);
        std::fs::write(folder.path().join(INDEX), index.to_text().unwrap()).unwrap();
        folder
    }

    #[test]
    fn tied_weights_share_memory_and_count_as_what_is_made_of_a_folder() {
        let w = [("w", Dtype::F32, Tensor::ones([1 << 18], (Kind::Float, tch::Device::Cpu)))];
        let with_aliases = |count: usize| {
            folder_of(&w, |index| {
                index.tied = (0..count).map(|alias| (format!("a{alias}"), "w".to_owned())).collect();
            })
        };
        let few = with_aliases(2);
        let read = |folder: &Path| load(folder, ReadLimits::default());
        let weights = read(few.path()).unwrap().weights;
        assert_eq!(weights.len(), 3);
        assert!(weights.iter().all(|(_, weight)| weight.data_ptr() == weights[0].1.data_ptr()));
        let many = with_aliases(3000);
        let expected = "MiB and 16 times its size, which is max_growth";
        for error in [
            read(many.path()).map(drop).unwrap_err(),
            crate::checkpoint::read_weights(many.path()).map(drop).unwrap_err(),
            crate::checkpoint::export_weights(
                &Shards::open(many.path()).unwrap(),
                &HashMap::new(),
                ReadLimits::default(),
                &many.path().with_extension("safetensors"),
            )
            .map(drop)
            .unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(error.contains(expected) && error.contains("--max_growth of convert"), "{error}");
        }
        assert_eq!(load(many.path(), ReadLimits { max_growth: 3000 }).unwrap().weights.len(), 3001);
    }

    #[test]
    fn master_weights_are_found_by_what_they_round_to() {
        let exact = Tensor::from_slice(&[0.1_f32, 0.2, 0.3]);
        let other = Tensor::from_slice(&[0.4_f32, 0.5, 0.6]);
        let half = exact.to_kind(Kind::BFloat16);
        let folder = folder_of(
            &[
                ("w", Dtype::BF16, half.shallow_clone()),
                ("average", Dtype::BF16, half.shallow_clone()),
                ("voltaic:optimizer.0.master_param.w", Dtype::F32, exact.shallow_clone()),
                ("voltaic:optimizer.0.master_param.average", Dtype::F32, other),
            ],
            |index| {
                index.num_optimizers = 1;
                index.tied.insert("again".to_owned(), "w".to_owned());
            },
        );
        let shards = Shards::open(folder.path()).unwrap();
        let masters = shards.masters(ReadLimits::default()).unwrap();
        let name = "voltaic:optimizer.0.master_param.w";
        assert_eq!(masters, HashMap::from([("w", name), ("again", name)]));
        let weights = shards.all_weights(&masters, ReadLimits::default()).unwrap();
        let kinds: Vec<_> = weights.iter().map(|(name, weight)| (name.as_str(), weight.kind())).collect();
        assert_eq!(kinds, [("average", Kind::BFloat16), ("w", Kind::Float), ("again", Kind::Float)]);
        assert!(weights[1].1 == exact && weights[1].1.data_ptr() == weights[2].1.data_ptr());
    }
}
