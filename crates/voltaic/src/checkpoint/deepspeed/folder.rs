//! The files of a checkpoint of DeepSpeed: a folder with `latest` and the folders of tags, or the folder of a tag itself.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Component, Path, PathBuf};

use crate::config::read_file;
use crate::error::{CheckpointError, Error, Problem, Result};

/// The file that names the tag; the converter's file that does.
pub(super) const LATEST: &str = "latest";
pub(super) const LATEST_UNIVERSAL: &str = "latest_universal";
/// The folder of a tag that has a folder for each parameter.
pub(super) const UNIVERSAL: &str = "zero";

pub(super) const MODEL_STATES: &str = "_model_states.pt";
pub(super) const OPTIM_STATES: &str = "_optim_states.pt";
/// The name of a tag is no longer.
const MAX_TAG: u64 = 4096;

/// Whether a folder has what DeepSpeed writes: the name of the newest state, its script, or states of ranks. None of ours has.
pub(crate) fn is_deepspeed(path: &Path) -> bool {
    let is_one = |name: &str| {
        let is_state =
            ["mp_rank_", "zero_pp_rank_", "bf16_zero_pp_rank_"].iter().any(|start| name.starts_with(start));
        is_state || [LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py"].contains(&name)
    };
    let mut entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().to_str().is_some_and(is_one))
}

fn has_model_states(path: &Path) -> bool {
    let names = std::fs::read_dir(path).into_iter().flatten().flatten();
    names.into_iter().any(|entry| entry.file_name().to_string_lossy().ends_with(MODEL_STATES))
}

pub(super) fn refuse<T>(path: &Path, what: impl Into<String>, remedy: impl Into<String>) -> Result<T> {
    let problem = Problem::new(what, remedy.into());
    Err(CheckpointError::Unreadable { path: path.to_path_buf(), problem }.into())
}

/// The files of a tag.
#[derive(Debug)]
pub(super) struct Folder {
    pub path: PathBuf,
    /// By rank; one if the ranks have the same weights.
    pub models: Vec<PathBuf>,
    /// Whether each rank has a file of the model, as in stage 3.
    pub has_model_of_each: bool,
    /// By rank; none without ZeRO, and of a universal checkpoint.
    pub optims: Vec<PathBuf>,
    /// The folder with a folder for each parameter.
    pub universal: Option<PathBuf>,
}

/// What a file has of what, by its name.
#[derive(Debug, PartialEq, Eq)]
struct FileName {
    is_model: bool,
    /// Of ZeRO.
    rank: Option<usize>,
    /// Of tensor parallelism.
    model_rank: usize,
}

impl FileName {
    fn parse(name: &str) -> Option<Self> {
        let (stem, is_model) = match name.strip_suffix(MODEL_STATES) {
            Some(stem) => (stem, true),
            None => (name.strip_suffix(OPTIM_STATES)?, false),
        };
        let stem = ["bf16_", "fp16_"].iter().find_map(|prefix| stem.strip_prefix(prefix)).unwrap_or(stem);
        let (rank, rest) = match stem.strip_prefix("zero_pp_rank_") {
            Some(rest) => {
                let (rank, rest) = rest.split_once('_')?;
                (Some(rank.parse().ok()?), rest)
            }
            None => (None, stem),
        };
        Some(Self { is_model, rank, model_rank: rest.strip_prefix("mp_rank_")?.parse().ok()? })
    }
}

impl Folder {
    /// Finds the files of a tag, of that which `latest` names unless one is given.
    pub fn open(path: &Path, tag: Option<&str>) -> Result<Self> {
        let path = match tag {
            Some(tag) => tagged(path, tag, path)?,
            None if has_model_states(path) => path.to_path_buf(),
            None => latest(path)?,
        };
        if !path.is_dir() {
            return refuse(&path, "there is no such folder", "give the tag of a checkpoint with --tag");
        }
        let (mut models, mut optims) = (BTreeMap::new(), BTreeMap::new());
        let mut common = None;
        let entries = std::fs::read_dir(&path).map_err(|e| Error::io("read folder", &path, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("read folder", &path, e))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.ends_with(MODEL_STATES) && !name.ends_with(OPTIM_STATES) {
                continue;
            }
            let Some(FileName { is_model, rank, model_rank }) = FileName::parse(&name) else {
                let remedy = "save without pipeline stages and experts, or convert its weights in Python";
                return refuse(&path, format!("{name} is a part of a pipeline or of experts"), remedy);
            };
            if model_rank > 0 {
                let remedy = "save it without tensor parallelism, or put its parts together in Python";
                return refuse(&path, format!("{name} is a part of tensor parallelism"), remedy);
            }
            let ranks = if is_model { &mut models } else { &mut optims };
            match rank {
                None if is_model => common = Some(entry.path()),
                None => {
                    return refuse(&path, format!("{name} names no rank"), "give it the name that it had");
                }
                Some(rank) => match ranks.entry(rank) {
                    Entry::Vacant(vacant) => drop(vacant.insert(entry.path())),
                    Entry::Occupied(other) => {
                        let what = format!("{name} and {} are both of rank {rank}", other.get().display());
                        return refuse(&path, what, "remove the one of the older run");
                    }
                },
            }
        }
        let has_model_of_each = !models.is_empty();
        if let (Some(common), true) = (&common, has_model_of_each) {
            let what = format!("{} is of stage 0 to 2, others are of stage 3", common.display());
            return refuse(&path, what, "remove those of the older run");
        }
        let models = match common {
            Some(common) => vec![common],
            None => of_all_ranks(&path, models, MODEL_STATES)?,
        };
        if models.is_empty() {
            return refuse(&path, "it has no file *_model_states.pt", "give a checkpoint of DeepSpeed");
        }
        let optims = of_all_ranks(&path, optims, OPTIM_STATES)?;
        let universal = Some(path.join(UNIVERSAL)).filter(|zero| zero.is_dir() && optims.is_empty());
        Ok(Self { path, models, has_model_of_each, optims, universal })
    }
}

/// Whether a parameter's name can be that of its folder.
pub(super) fn is_folder_name(name: &str) -> bool {
    let is_one = Path::new(name).components().count() == 1;
    is_one && !name.contains(['/', '\\']) && ![".", ".."].contains(&name)
}

/// The files of ranks 0, 1, ...
fn of_all_ranks(path: &Path, files: BTreeMap<usize, PathBuf>, ending: &str) -> Result<Vec<PathBuf>> {
    if let Some(missing) = files.keys().enumerate().find(|(rank, key)| rank != *key).map(|(rank, _)| rank) {
        let what = format!("zero_pp_rank_{missing}_mp_rank_00{ending} is missing, a later rank's is there");
        return refuse(path, what, "copy the files of all ranks");
    }
    Ok(files.into_values().collect())
}

/// The folder of a tag, which is a part of a path.
fn tagged(path: &Path, tag: &str, from: &Path) -> Result<PathBuf> {
    let mut parts = Path::new(tag).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(_)), None) => Ok(path.join(tag)),
        _ => refuse(from, format!("the tag {tag:?} is not the name of a folder"), "give a tag with --tag"),
    }
}

fn latest(path: &Path) -> Result<PathBuf> {
    let Some(file) = [LATEST, LATEST_UNIVERSAL].map(|name| path.join(name)).into_iter().find(|f| f.is_file())
    else {
        let what = "it has neither a file `latest` nor model states";
        return refuse(path, what, "give the folder that DeepSpeed saved to, or name its tag with --tag");
    };
    let tag = read_file(&file, MAX_TAG).map_err(|e| Error::io("read", &file, e))?;
    let Ok(tag) = String::from_utf8(tag) else {
        return refuse(&file, "it is not text", "give a tag with --tag");
    };
    tagged(path, tag.trim(), &file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_understood() {
        let name = |is_model, rank, model_rank| Some(FileName { is_model, rank, model_rank });
        for (text, expected) in [
            ("mp_rank_00_model_states.pt", name(true, None, 0)),
            ("mp_rank_01_model_states.pt", name(true, None, 1)),
            ("zero_pp_rank_12_mp_rank_00_model_states.pt", name(true, Some(12), 0)),
            ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", name(false, Some(3), 0)),
            ("zero_pp_rank_3_mp_rank_00_optim_states.pt", name(false, Some(3), 0)),
            ("expp_rank_0_mp_rank_00_optim_states.pt", None),
            ("layer_0_expert_1_mp_rank_00_model_states.pt", None),
            ("zero_pp_rank_-1_mp_rank_00_optim_states.pt", None),
            ("zero_pp_rank_99999999999999999999_mp_rank_00_optim_states.pt", None),
        ] {
            assert_eq!(FileName::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn what_does_not_belong_together_is_refused() {
        for (files, tag, expected) in [
            (
                &["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"][..],
                "t",
                "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing",
            ),
            (&["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"], "t", "tensor parallelism"),
            (&["mp_rank_00_model_states.pt", "layer_00-model_00_model_states.pt"], "t", "pipeline"),
            (
                &["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"],
                "t",
                "others are of stage 3",
            ),
            (
                &[
                    "mp_rank_00_model_states.pt",
                    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
                    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                ],
                "t",
                "are both of rank 0; remove the one of the older run",
            ),
            (&["other"], "t", "no file *_model_states.pt"),
            (&["other"], "../t", "the tag \"../t\" is not the name of a folder"),
            (&["other"], "", "the tag \"\" is not"),
            (&["other"], "gone", "there is no such folder"),
        ] {
            let root = tempfile::tempdir().expect("temp folder");
            std::fs::create_dir(root.path().join("t")).expect("writable");
            std::fs::write(root.path().join(LATEST), tag).expect("writable");
            for file in files {
                std::fs::write(root.path().join("t").join(file), "").expect("writable");
            }
            let error = Folder::open(root.path(), None).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
        let root = tempfile::tempdir().expect("temp folder");
        assert!(!is_deepspeed(root.path()));
        let error = Folder::open(root.path(), None).expect_err("is empty").to_string();
        assert!(error.contains("neither a file `latest`"), "{error}");
    }
}
