//! The index of a checkpoint in a folder: what tensors there are, and which rank's file has which of their elements.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::checkpoint::budget::{Budget, ReadLimits};
use crate::checkpoint::checkpoint::CheckpointMeta;
use crate::checkpoint::chunk::{Chunk, MAX_CORNERS, cover_problem};
use crate::checkpoint::format::{MAX_OPTIMIZERS, PREFIX, shape_of, unreadable};
use crate::config::read_file;
use crate::error::{Error, Result};

/// Version of the layout; a folder of a later version is refused. In version 1 a rank has a range of the flattened tensor, and its
/// file has one checksum.
pub(super) const VERSION: u32 = 2;
/// A longer index is none.
const MAX_BYTES: u64 = 1 << 30;
/// A folder of more ranks is refused.
const MAX_RANKS: usize = 1 << 16;
/// What the file begins with; eight hexadecimal digits follow, which count as zeros for themselves.
const BEGINNING: &str = "{\"crc32\":\"";
const NO_CHECKSUM: &str = "00000000";
/// Chunks that are made of slices of version 1 may take so many times the bytes of the text.
const SLICE_GROWTH: u64 = 64;
/// So many corners of chunks are looked at for each byte of the text, beside those of a large tensor: a chunk of five dimensions has 32,
/// and takes as many bytes.
const CORNERS_PER_BYTE: usize = 2;

/// The index. Its text begins with the checksum.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    crc32: String,
    pub shards_version: u32,
    /// The same in all files of one checkpoint.
    pub id: String,
    pub meta: CheckpointMeta,
    pub saved_at: u64,
    pub num_optimizers: usize,
    /// The files, by rank.
    pub files: Vec<FileEntry>,
    /// All tensors except the ranks' local state, by their name in a checkpoint of one file.
    pub tensors: BTreeMap<String, Entry>,
    /// Other names of weights that are tied.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tied: BTreeMap<String, String>,
    /// Parameters that have had a gradient on some rank, if gradients of an open window are among the tensors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub had_grad: Vec<String>,
    /// Values logged on ranks 1, 2, ...
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<Value>,
    /// The training state that is not tensors; null in a checkpoint of weights only.
    pub training: Option<Value>,
}

/// A rank's file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub bytes: u64,
    /// Of its header, which has the checksums of the rest; in version 1 of the whole file.
    pub crc32: String,
}

/// A tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Of version 1: rank, first element and number of elements, of the flattened tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    slices: Vec<(usize, usize, usize)>,
    /// Those of a rank in the order in which its file has them, one behind the other.
    #[serde(default)]
    pub chunks: Vec<StoredChunk>,
}

/// A chunk of a tensor, and where it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "(usize, Vec<usize>, Vec<usize>)", into = "(usize, Vec<usize>, Vec<usize>)")]
pub(super) struct StoredChunk {
    pub rank: usize,
    pub chunk: Chunk,
    /// The elements before it in what the rank's file has of the tensor.
    pub start: usize,
}

impl From<(usize, Vec<usize>, Vec<usize>)> for StoredChunk {
    fn from((rank, offsets, sizes): (usize, Vec<usize>, Vec<usize>)) -> Self {
        Self { rank, chunk: Chunk { offsets, sizes }, start: 0 }
    }
}

impl From<StoredChunk> for (usize, Vec<usize>, Vec<usize>) {
    fn from(StoredChunk { rank, chunk, .. }: StoredChunk) -> Self {
        (rank, chunk.offsets, chunk.sizes)
    }
}

impl Entry {
    /// Without chunks.
    pub fn new(dtype: Dtype, shape: Vec<usize>) -> Self {
        Self { dtype, shape, slices: Vec::new(), chunks: Vec::new() }
    }

    /// Adds chunks of a rank's file, in the order in which it has them.
    pub fn add(&mut self, rank: usize, chunks: Vec<Chunk>) {
        self.chunks.extend(chunks.into_iter().map(|chunk| StoredChunk { rank, chunk, start: 0 }));
    }

    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// How many elements the file of each rank has.
    pub fn lens(&self) -> HashMap<usize, usize> {
        let mut lens = HashMap::new();
        self.chunks.iter().for_each(|stored| *lens.entry(stored.rank).or_default() += stored.chunk.numel());
        lens
    }

    /// Takes what version 1 has in place of chunks.
    fn take_slices(&mut self, budget: &mut Budget) -> Result<(), String> {
        let numel = shape_of(&self.shape).map_or(0, |shape| shape.iter().product::<i64>() as usize);
        for (rank, start, len) in std::mem::take(&mut self.slices) {
            let Some(end) = start.checked_add(len).filter(|end| *end <= numel) else {
                return Err(format!("has {numel} elements, and a slice of {len} from {start}"));
            };
            let chunks = Chunk::whole(&self.shape).rectangles(start..end);
            let coordinates = 2 * chunks.len() * self.shape.len();
            budget.take(chunks.len() * size_of::<StoredChunk>() + coordinates * size_of::<usize>())?;
            self.add(rank, chunks);
        }
        Ok(())
    }

    /// Finds where chunks begin. What is wrong with it, if they are not the whole tensor once, or have more corners than are left.
    pub fn finish(&mut self, ranks: usize, corners_left: &mut usize) -> Result<(), String> {
        if shape_of(&self.shape).is_none() {
            return Err(format!("has shape {:?}, too large", self.shape));
        }
        if let Some(StoredChunk { rank, .. }) = self.chunks.iter().find(|stored| stored.rank >= ranks) {
            return Err(format!("has a chunk of rank {rank}, of {ranks} ranks"));
        }
        let chunks = self.chunks.iter().map(|stored| &stored.chunk);
        if let Some(what) = cover_problem(&self.shape, chunks, corners_left) {
            return Err(what);
        }
        let mut lens: HashMap<usize, usize> = HashMap::new();
        for stored in &mut self.chunks {
            let len = lens.entry(stored.rank).or_default();
            stored.start = *len;
            *len += stored.chunk.numel();
        }
        Ok(())
    }
}

/// What decides how the rest is read, and the trees of values, each of which takes many times its text: all else takes at most 16 times
/// its text, whatever it says.
#[derive(Deserialize)]
struct Unchecked<'a> {
    shards_version: u32,
    #[serde(borrow)]
    meta: Option<&'a RawValue>,
    #[serde(borrow, default)]
    ranks: Vec<&'a RawValue>,
    #[serde(borrow)]
    training: Option<&'a RawValue>,
}

fn checksum(text: &str) -> Option<String> {
    let rest = text.strip_prefix(BEGINNING)?.get(NO_CHECKSUM.len()..)?;
    let mut crc = crc32fast::Hasher::new();
    [BEGINNING, NO_CHECKSUM, rest].into_iter().for_each(|part| crc.update(part.as_bytes()));
    Some(format!("{:08x}", crc.finalize()))
}

impl Index {
    /// Of these parts, without tensors.
    pub fn new(id: String, saved_at: u64, meta: CheckpointMeta) -> Self {
        Self {
            crc32: NO_CHECKSUM.to_owned(),
            shards_version: VERSION,
            id,
            meta,
            saved_at,
            num_optimizers: 0,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            tied: BTreeMap::new(),
            had_grad: Vec::new(),
            ranks: Vec::new(),
            training: None,
        }
    }

    /// The text of the file.
    ///
    /// # Errors
    /// If a value has no JSON.
    pub fn to_text(&self) -> serde_json::Result<String> {
        let mut text = serde_json::to_string(self)?;
        if let Some(crc) = checksum(&text) {
            text.replace_range(BEGINNING.len()..BEGINNING.len() + NO_CHECKSUM.len(), &crc);
        }
        Ok(text)
    }

    /// Reads and checks it.
    ///
    /// # Errors
    /// If the file is missing, damaged, of a later version, or does not hold together.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_file(path, MAX_BYTES).map_err(|e| Error::io("read checkpoint", path, e))?;
        let text = String::from_utf8(bytes).map_err(|_| unreadable(path, "it is not UTF-8 text"))?;
        Self::parse(&text, path)
    }

    /// Takes the text of a file apart, and checks it.
    ///
    /// # Errors
    /// As those of [`Index::read`].
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let found = text.get(BEGINNING.len()..BEGINNING.len() + NO_CHECKSUM.len()).unwrap_or_default();
        let Some(computed) = checksum(text) else {
            return Err(unreadable(
                path,
                "it does not begin with a checksum: it is no index of a checkpoint",
            ));
        };
        if computed != found {
            let what = format!("its checksum is {computed} but should be {found}: the file is damaged");
            return Err(unreadable(path, what));
        }
        let not_understood = |e: serde_json::Error| unreadable(path, format!("it is not understood: {e}"));
        let Unchecked { shards_version, meta, ranks, training } =
            serde_json::from_str(text).map_err(not_understood)?;
        let trees = || [meta, training].into_iter().flatten().chain(ranks.iter().copied()).map(RawValue::get);
        let mut budget = Budget::new(trees().map(|tree| tree.len() as u64).sum(), ReadLimits::default());
        trees()
            .try_for_each(|tree| budget.take_json(tree))
            .map_err(|what| unreadable(path, format!("its training state is too large: {what}")))?;
        if shards_version > VERSION {
            let what = format!("it has version {shards_version}, this voltaic reads up to {VERSION}");
            return Err(unreadable(path, what));
        }
        let mut index: Self = serde_json::from_str(text).map_err(not_understood)?;
        let corners = text.len().saturating_mul(CORNERS_PER_BYTE).saturating_add(MAX_CORNERS);
        let finished = index.take_slices(text.len()).and_then(|()| index.finish(corners));
        finished.map_err(|what| unreadable(path, what))?;
        Ok(index)
    }

    /// Takes what version 1 has in place of chunks, from a text of so many bytes.
    fn take_slices(&mut self, len: usize) -> Result<(), String> {
        let version = self.shards_version;
        let mut budget = Budget::new(len as u64, ReadLimits { max_growth: SLICE_GROWTH });
        for (name, entry) in &mut self.tensors {
            let is_of_version = if version == 1 { entry.chunks.is_empty() } else { entry.slices.is_empty() };
            if !is_of_version {
                return Err(format!("{name} has parts of another version than {version}"));
            }
            entry.take_slices(&mut budget).map_err(|what| format!("{name} {what}"))?;
        }
        Ok(())
    }

    /// Finds where chunks begin; an index that was made or read is of use only then. Looks at so many corners of chunks.
    ///
    /// # Errors
    /// What does not hold together.
    pub fn finish(&mut self, mut corners_left: usize) -> Result<(), String> {
        let ranks = self.files.len();
        if ranks == 0 || ranks > MAX_RANKS {
            return Err(format!("it lists {ranks} ranks; 1 to {MAX_RANKS} are read"));
        }
        if self.num_optimizers > MAX_OPTIMIZERS {
            let found = self.num_optimizers;
            return Err(format!("it lists {found} optimizers, at most {MAX_OPTIMIZERS} are read"));
        }
        if self.training.is_some() && self.ranks.len() + 1 != ranks {
            let found = self.ranks.len() + 1;
            return Err(format!("it has logged values of {found} ranks, and files of {ranks}"));
        }
        for (name, entry) in &mut self.tensors {
            entry.finish(ranks, &mut corners_left).map_err(|what| format!("{name} {what}"))?;
        }
        let is_known = |name: &String| self.tensors.contains_key(name);
        let is_weight = |name: &String| !name.starts_with(PREFIX);
        let fits = |alias: &String, name: &String| {
            is_known(name) && !is_known(alias) && is_weight(alias) && is_weight(name)
        };
        if let Some((alias, _)) = self.tied.iter().find(|(alias, name)| !fits(alias, name)) {
            return Err(format!("{alias} is tied to {}, which does not fit the tensors", self.tied[alias]));
        }
        let names: HashSet<&String> = self.had_grad.iter().collect();
        match names.len() == self.had_grad.len() {
            true => Ok(()),
            false => Err("it names a gradient twice".to_owned()),
        }
    }

    /// The tensor of a name, or of what the name is tied to.
    pub fn entry(&self, name: &str) -> Option<(&str, &Entry)> {
        let name = self.tied.get(name).map_or(name, String::as_str);
        self.tensors.get_key_value(name).map(|(name, entry)| (name.as_str(), entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> Index {
        let mut index = Index::new("an id".to_owned(), 7, CheckpointMeta::default());
        index.files = vec![FileEntry { bytes: 1, crc32: "0".to_owned() }; 2];
        let mut entry = Entry::new(Dtype::F32, vec![2, 3]);
        entry.add(1, Chunk::whole(&[2, 3]).rectangles(0..2));
        entry.add(0, Chunk::whole(&[2, 3]).rectangles(2..6));
        index.tensors.insert("w".to_owned(), entry);
        index.tied.insert("again".to_owned(), "w".to_owned());
        index
    }

    #[test]
    fn chunks_of_a_rank_lie_one_behind_the_other() {
        let mut index = index();
        index.finish(usize::MAX).unwrap();
        let (name, entry) = index.entry("again").unwrap();
        assert_eq!(name, "w");
        let starts: Vec<_> = entry.chunks.iter().map(|stored| (stored.rank, stored.start)).collect();
        assert_eq!(starts, [(1, 0), (0, 0), (0, 1)]);
        assert_eq!(entry.lens(), HashMap::from([(1, 2), (0, 4)]));
    }

    #[test]
    fn an_index_that_does_not_hold_together_is_refused() {
        let chunk =
            |offsets: [usize; 2], sizes: [usize; 2]| Chunk { offsets: offsets.into(), sizes: sizes.into() };
        for (rank, chunks, expected) in [
            (0, vec![chunk([0, 0], [2, 2]), chunk([0, 1], [2, 2])], "w has element [0, 1] in 2 chunks"),
            (0, vec![chunk([0, 0], [2, 1]), chunk([0, 2], [2, 1])], "w has element [0, 1] in no chunk"),
            (0, vec![], "w has element [0, 0] in no chunk"),
            (2, vec![chunk([0, 0], [2, 3])], "w has a chunk of rank 2, of 2 ranks"),
            (0, vec![chunk([0, 0], [2, 0])], "w has a chunk without elements"),
            (0, vec![chunk([0, 1], [2, 3])], "w has a chunk at [0, 1] of [2, 3], which is not within [2, 3]"),
            (0, vec![chunk([1, 0], [usize::MAX, 3])], "which is not within [2, 3]"),
            (0, vec![Chunk::whole(&[6])], "w has a chunk at [0] of [6], which is not within [2, 3]"),
        ] {
            let mut index = index();
            let mut entry = Entry::new(Dtype::F32, vec![2, 3]);
            entry.add(rank, chunks);
            index.tensors.insert("w".to_owned(), entry);
            let found = index.finish(usize::MAX).unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
        for (slices, expected) in [
            (vec![(0, 0, 3), (1, 2, 4)], "w has element [0, 2] in 2 chunks"),
            (vec![(0, 0, 2), (1, 3, 3)], "w has element [0, 2] in no chunk"),
            (vec![(0, 0, 7)], "w has 6 elements, and a slice of 7 from 0"),
            (vec![(0, 0, 6), (1, 6, usize::MAX)], "w has 6 elements, and a slice of"),
        ] {
            let mut index = index();
            index.shards_version = 1;
            index.tensors.insert("w".to_owned(), Entry { slices, ..Entry::new(Dtype::F32, vec![2, 3]) });
            let found = index.take_slices(1).and_then(|()| index.finish(usize::MAX)).unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
        let what = index().finish(15).unwrap_err(); // four of each of three chunks and of the whole tensor
        assert_eq!(what, "w has 3 chunks that cut 2 dimensions: too many");
        index().finish(16).unwrap();
        let mut of_other = index();
        of_other.shards_version = 1;
        assert_eq!(of_other.take_slices(1).unwrap_err(), "w has parts of another version than 1");
        for (alias, name) in [("w", "w"), ("v", "u"), ("voltaic:optimizer.0.exp_avg.w", "w")] {
            let mut tied = index();
            tied.tied.insert(alias.to_owned(), name.to_owned());
            assert!(tied.finish(usize::MAX).unwrap_err().contains(&format!("{alias} is tied to {name}")));
        }
    }

    /// As of 96 ranks of a model of 70 billion weights: many chunks, of two dimensions each.
    #[test]
    fn a_long_index_is_read_and_hostile_trees_are_not() {
        let mut index = index();
        let ranks = 96;
        index.files = vec![FileEntry { bytes: 1, crc32: "00000000".to_owned() }; ranks];
        for number in 0..9_000 {
            let mut entry = Entry::new(Dtype::F32, vec![8192, 28672]);
            (0..ranks).for_each(|rank| entry.add(rank, vec![rows(rank, ranks)]));
            index.tensors.insert(format!("layers.{number}.weight"), entry);
        }
        let text = index.to_text().unwrap();
        assert!(text.len() > 20_000_000, "{}", text.len());
        let read = Index::parse(&text, Path::new("index.json")).unwrap();
        assert_eq!(read.tensors.len(), index.tensors.len());

        let mut hostile = self::tests::index();
        hostile.training = Some(Value::Array(vec![Value::Array(Vec::new()); 4_000_000]));
        hostile.ranks = vec![Value::Null];
        let error =
            Index::parse(&hostile.to_text().unwrap(), Path::new("index.json")).unwrap_err().to_string();
        assert!(error.contains("its training state is too large"), "{error}");
    }

    /// Few bytes that ask for many corners: of each tensor one half along each dimension.
    #[test]
    fn corners_are_bounded_by_the_chunks() {
        let dims = 14;
        let text_of = |tensors: usize| {
            let mut index = index();
            for number in 0..tensors {
                let mut entry = Entry::new(Dtype::F32, vec![2; dims]);
                let mut left = Chunk::whole(&entry.shape);
                for dim in 0..dims {
                    left.sizes[dim] = 1;
                    let mut half = left.clone();
                    half.offsets[dim] = 1;
                    entry.add(0, vec![half]);
                }
                entry.add(0, vec![left]);
                index.tensors.insert(format!("w{number}"), entry);
            }
            index.to_text().unwrap()
        };
        let parse = |text: String| Index::parse(&text, Path::new("index.json"));
        parse(text_of(2)).unwrap();
        let error = parse(text_of(8)).unwrap_err().to_string();
        assert!(error.contains("has 15 chunks that cut 14 dimensions: too many"), "{error}");
    }

    /// The rows of a rank of a matrix of 8192 x 28672, cut as evenly as they go.
    fn rows(rank: usize, ranks: usize) -> Chunk {
        let (from, to) = (8192 * rank / ranks, 8192 * (rank + 1) / ranks);
        Chunk { offsets: vec![from, 0], sizes: vec![to - from, 28672] }
    }

    #[test]
    fn a_changed_byte_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index.json");
        let text = index().to_text().unwrap();
        std::fs::write(&path, &text).unwrap();
        let mut expected = index();
        expected.finish(usize::MAX).unwrap();
        assert_eq!(Index::read(&path).unwrap().entry("w"), expected.entry("w"));
        std::fs::write(&path, text.replace("an id", "my id")).unwrap();
        let error = Index::read(&path).unwrap_err().to_string();
        assert!(error.contains("the file is damaged"), "{error}");
    }
}
