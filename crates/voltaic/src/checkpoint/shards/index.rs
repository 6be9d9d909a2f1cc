//! The index of a checkpoint in a folder: what tensors there are, and which rank's file has which of their elements.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoint::checkpoint::CheckpointMeta;
use crate::checkpoint::format::{MAX_OPTIMIZERS, PREFIX, check_json, shape_of, unreadable};
use crate::config::read_file;
use crate::error::{Error, Result};

/// Version of the layout; a folder of a later version is refused.
pub(super) const VERSION: u32 = 1;
/// A longer index is none.
const MAX_BYTES: u64 = 1 << 30;
/// A folder of more ranks is refused.
const MAX_RANKS: usize = 1 << 16;
/// What the file begins with; eight hexadecimal digits follow, which count as zeros for themselves.
const BEGINNING: &str = "{\"crc32\":\"";
const NO_CHECKSUM: &str = "00000000";

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
    /// All tensors but those that each rank has to itself, by their name in a checkpoint of one file.
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
    pub crc32: String,
}

/// A tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Rank, first element and number of elements, of the flattened tensor, in the order of the elements.
    pub slices: Vec<(usize, usize, usize)>,
}

impl Entry {
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// What of `range` each file has: the rank, where it is in the rank's slice, and how long the slice is.
    pub fn within(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
        let range = range.clone();
        self.slices.iter().filter_map(move |&(rank, start, len)| {
            let first = range.start.max(start);
            let end = range.end.min(start + len);
            (first < end).then(|| (rank, first - start..end - start, len))
        })
    }

    /// What is wrong with it, if its slices are not the whole tensor once.
    pub fn problem(&self, ranks: usize) -> Option<String> {
        let Some(shape) = shape_of(&self.shape) else {
            return Some(format!("has shape {:?}, too large", self.shape));
        };
        let numel = shape.iter().product::<i64>() as usize;
        let mut at = 0_usize;
        let mut seen = HashSet::new();
        for &(rank, start, len) in &self.slices {
            if rank >= ranks {
                return Some(format!("has a slice of rank {rank}, of {ranks} ranks"));
            }
            if !seen.insert(rank) {
                return Some(format!("has two slices of rank {rank}"));
            }
            if start != at {
                let what = if start < at { "twice" } else { "nowhere" };
                return Some(format!("has element {} {what}", start.min(at)));
            }
            let Some(end) = at.checked_add(len) else {
                return Some("has a slice that is too long".to_owned());
            };
            at = end;
        }
        (at != numel).then(|| format!("has {numel} elements, its slices have {at}"))
    }
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
        let found = text.get(BEGINNING.len()..BEGINNING.len() + NO_CHECKSUM.len()).unwrap_or_default();
        let Some(computed) = checksum(&text) else {
            return Err(unreadable(
                path,
                "it does not begin with a checksum: it is no index of a checkpoint",
            ));
        };
        if computed != found {
            let what = format!("its checksum is {computed} but should be {found}: the file is damaged");
            return Err(unreadable(path, what));
        }
        check_json(&text, path)?;
        #[derive(Deserialize)]
        struct Version {
            shards_version: u32,
        }
        let not_understood = |e: serde_json::Error| unreadable(path, format!("it is not understood: {e}"));
        let Version { shards_version } = serde_json::from_str(&text).map_err(not_understood)?;
        if shards_version > VERSION {
            let what = format!("it has version {shards_version}, this voltaic reads up to {VERSION}");
            return Err(unreadable(path, what));
        }
        let index: Self = serde_json::from_str(&text).map_err(not_understood)?;
        match index.problem() {
            Some(what) => Err(unreadable(path, what)),
            None => Ok(index),
        }
    }

    /// What does not hold together.
    pub fn problem(&self) -> Option<String> {
        let ranks = self.files.len();
        if ranks == 0 || ranks > MAX_RANKS {
            return Some(format!("it tells of {ranks} ranks; 1 to {MAX_RANKS} are read"));
        }
        if self.num_optimizers > MAX_OPTIMIZERS {
            let found = self.num_optimizers;
            return Some(format!("it tells of {found} optimizers, at most {MAX_OPTIMIZERS} are read"));
        }
        if self.training.is_some() && self.ranks.len() + 1 != ranks {
            let found = self.ranks.len() + 1;
            return Some(format!("it has logged values of {found} ranks, and files of {ranks}"));
        }
        for (name, entry) in &self.tensors {
            if let Some(what) = entry.problem(ranks) {
                return Some(format!("{name} {what}"));
            }
        }
        let is_known = |name: &String| self.tensors.contains_key(name);
        let is_weight = |name: &String| !name.starts_with(PREFIX);
        let fits = |alias: &String, name: &String| {
            is_known(name) && !is_known(alias) && is_weight(alias) && is_weight(name)
        };
        if let Some((alias, _)) = self.tied.iter().find(|(alias, name)| !fits(alias, name)) {
            return Some(format!("{alias} is tied to {}, which does not fit the tensors", self.tied[alias]));
        }
        let names: HashSet<&String> = self.had_grad.iter().collect();
        (names.len() != self.had_grad.len()).then(|| "it names a gradient twice".to_owned())
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
        let slices = vec![(1, 0, 2), (0, 2, 4)];
        index.tensors.insert("w".to_owned(), Entry { dtype: Dtype::F32, shape: vec![2, 3], slices });
        index.tied.insert("again".to_owned(), "w".to_owned());
        index
    }

    #[test]
    fn slices_are_found_by_their_elements() {
        let index = index();
        let (name, entry) = index.entry("again").unwrap();
        assert_eq!(name, "w");
        let within = |range| entry.within(&range).collect::<Vec<_>>();
        assert_eq!(within(0..6), [(1, 0..2, 2), (0, 0..4, 4)]);
        assert_eq!(within(1..3), [(1, 1..2, 2), (0, 0..1, 4)]);
        assert_eq!(within(3..3), []);
    }

    #[test]
    fn slices_that_are_not_the_tensor_are_refused() {
        for (slices, expected) in [
            (vec![(0, 0, 3), (1, 2, 4)], "w has element 2 twice"),
            (vec![(0, 0, 2), (1, 3, 3)], "w has element 2 nowhere"),
            (vec![(0, 0, 5)], "w has 6 elements, its slices have 5"),
            (vec![(2, 0, 6)], "w has a slice of rank 2, of 2 ranks"),
            (vec![(0, 0, 3), (0, 3, 3)], "w has two slices of rank 0"),
            (vec![(0, 0, 6), (1, 6, usize::MAX)], "w has a slice that is too long"),
        ] {
            let mut index = index();
            index.tensors.get_mut("w").unwrap().slices = slices;
            assert_eq!(index.problem().as_deref(), Some(expected));
        }
        for (alias, name) in [("w", "w"), ("v", "u"), ("voltaic:optimizer.0.exp_avg.w", "w")] {
            let mut tied = index();
            tied.tied.insert(alias.to_owned(), name.to_owned());
            assert!(tied.problem().unwrap().contains(&format!("{alias} is tied to {name}")));
        }
        assert_eq!(index().problem(), None);
    }

    #[test]
    fn a_changed_byte_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index.json");
        let text = index().to_text().unwrap();
        std::fs::write(&path, &text).unwrap();
        assert_eq!(Index::read(&path).unwrap().entry("w"), index().entry("w"));
        std::fs::write(&path, text.replace("an id", "my id")).unwrap();
        let error = Index::read(&path).unwrap_err().to_string();
        assert!(error.contains("the file is damaged"), "{error}");
    }
}
