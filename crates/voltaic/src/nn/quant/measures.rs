//! Files of measurements, in the format of Habana's tools.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::pickled::Object;
use crate::checkpoint::write_atomically;
use crate::error::{CheckpointError, ConfigError, Error, Problem, Result};
use crate::precision::fp8::{MEASURE, Observer, ScaleMethod};

/// Bytes that a file may have.
const MAX_FILE: u64 = 64 << 20;

/// What was measured of a layer: for each tensor its largest magnitude, or those of its channels, or its shape.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerMeasures {
    /// Of what it was given. Attention has that of its weights in the fourth place.
    pub inputs: Vec<Vec<f32>>,
    /// Of what it gave.
    pub outputs: Vec<Vec<f32>>,
    /// Of its weight.
    pub weight: Option<Vec<f32>>,
}

/// What was measured of a module's layers, by fqn.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measures {
    /// By fqn.
    pub layers: BTreeMap<String, LayerMeasures>,
}

/// A file's content.
#[derive(Deserialize)]
struct Content {
    #[serde(rename = "Nodes")]
    nodes: BTreeMap<String, Node>,
}

#[derive(Deserialize)]
struct Node {
    #[serde(alias = "input", default)]
    inputs: Option<Vec<Numbers>>,
    #[serde(alias = "output", default)]
    outputs: Option<Vec<Numbers>>,
    #[serde(default)]
    params: Option<BTreeMap<String, Numbers>>,
}

/// A number, or lists of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Numbers {
    One(f32),
    Many(Vec<Numbers>),
}

impl Numbers {
    fn flatten(&self, to: &mut Vec<f32>) {
        match self {
            Self::One(number) => to.push(*number),
            Self::Many(all) => all.iter().for_each(|numbers| numbers.flatten(to)),
        }
    }

    fn flat(&self) -> Vec<f32> {
        let mut numbers = Vec::new();
        self.flatten(&mut numbers);
        numbers
    }
}

/// Which rank's measurements a file has: its number, and how many there are.
pub(super) type RankOf = Option<(usize, usize)>;

fn file_name(prefix: &Path, of: &str, rank: RankOf, ending: &str) -> PathBuf {
    let name = prefix.file_name().unwrap_or_default().to_string_lossy();
    let rank = rank.map_or_else(String::new, |(rank, world)| format!("_{rank}_{world}"));
    prefix.with_file_name(format!("{name}_hooks_{of}{rank}{ending}"))
}

impl Measures {
    /// The larger of both for each tensor; layers that one of them has not are the other's.
    pub(super) fn merge(&mut self, other: Self) {
        let larger = |own: &mut Vec<f32>, other: Vec<f32>| {
            if own.len() < other.len() {
                own.resize(other.len(), 0.0);
            }
            own.iter_mut().zip(other).for_each(|(own, other)| *own = own.max(other));
        };
        let all_larger = |own: &mut Vec<Vec<f32>>, other: Vec<Vec<f32>>| {
            own.resize(own.len().max(other.len()), Vec::new());
            own.iter_mut().zip(other).for_each(|(own, other)| larger(own, other));
        };
        for (fqn, layer) in other.layers {
            let own = self.layers.entry(fqn).or_default();
            all_larger(&mut own.inputs, layer.inputs);
            all_larger(&mut own.outputs, layer.outputs);
            if let Some(weight) = layer.weight {
                larger(own.weight.get_or_insert_default(), weight);
            }
        }
    }

    /// An error that names the first tensor with infinite numbers, or none.
    pub(super) fn check(&self) -> Result<()> {
        for (fqn, layer) in &self.layers {
            let all = layer.inputs.iter().map(|input| ("an input", input));
            let all = all.chain(layer.outputs.iter().map(|output| ("an output", output)));
            let mut all = all.chain(layer.weight.iter().map(|weight| ("the weight", weight)));
            if let Some((what, _)) =
                all.find(|(_, most)| most.iter().any(|most| !most.is_finite() || *most < 0.0))
            {
                let what = format!("layer {fqn}: {what} is infinite or no number");
                return Err(
                    ConfigError::new("fp8 measurements", what, "look for NaN with detect_anomaly").into()
                );
            }
        }
        Ok(())
    }

    /// Writes `PREFIX_hooks_OBSERVER.json`, the same as `.npz`, and `.._mod_list.json`, with the rank in the names if there is one.
    pub(super) fn write(&self, prefix: &Path, observer: Observer, rank: RankOf) -> Result<()> {
        let mode = if observer == Observer::Shape { "Shape" } else { "DynamicRange" };
        self.write_numbers(prefix, observer.name(), mode, rank)?;
        let names: Vec<&String> = self.layers.keys().collect();
        write_json(&file_name(prefix, observer.name(), rank, "_mod_list.json"), &json!(names))
    }

    /// Writes the numbers as scales that a method has made of measurements: `PREFIX_hooks_OBSERVER_METHOD.json` and `.npz`.
    pub(super) fn write_scales(&self, prefix: &Path, observer: Observer, method: ScaleMethod) -> Result<()> {
        let of = format!("{observer}_{}", method.name().to_uppercase());
        self.write_numbers(prefix, &of, "Scale", None)
    }

    fn write_numbers(&self, prefix: &Path, of: &str, mode: &str, rank: RankOf) -> Result<()> {
        let column =
            |most: &Vec<f32>| -> serde_json::Value { most.iter().map(|most| json!([most])).collect() };
        let columns = |all: &[Vec<f32>]| -> serde_json::Value { all.iter().map(column).collect() };
        let object =
            |all: &[Vec<f32>]| Object::List(all.iter().map(|most| Object::Column(most.clone())).collect());
        let (mut nodes, mut objects) = (serde_json::Map::new(), Vec::new());
        for (fqn, layer) in &self.layers {
            let mut params = serde_json::Map::new();
            params.extend(layer.weight.iter().map(|weight| ("weight".to_owned(), column(weight))));
            let node = json!({
                "inputs": columns(&layer.inputs), "outputs": columns(&layer.outputs), "params": params,
            });
            nodes.insert(fqn.clone(), node);
            let weight = layer.weight.iter().map(|it| ("weight".to_owned(), Object::Column(it.clone())));
            let node = vec![
                ("inputs".to_owned(), object(&layer.inputs)),
                ("outputs".to_owned(), object(&layer.outputs)),
                ("params".to_owned(), Object::Dict(weight.collect())),
            ];
            objects.push((fqn.clone(), Object::Dict(node)));
        }
        let local_rank = rank.map(|(rank, _)| rank);
        let content = json!({"GlobalRank": null, "LocalRank": local_rank, "Mode": mode, "Nodes": nodes});
        write_json(&file_name(prefix, of, rank, ".json"), &content)?;
        let content = Object::Dict(vec![
            ("GlobalRank".to_owned(), Object::None),
            ("LocalRank".to_owned(), local_rank.map_or(Object::None, |rank| Object::Integer(rank as i32))),
            ("Mode".to_owned(), Object::Text(mode.to_owned())),
            ("Nodes".to_owned(), Object::Dict(objects)),
        ]);
        write_atomically(&file_name(prefix, of, rank, ".npz"), |out| content.write_npz(out))
    }

    fn read_file(path: &Path) -> Result<Self> {
        let unreadable = |what: String| {
            let what = format!("Failed to load file {}: {what}", path.display());
            let problem = Problem::new(what, "measure again");
            Error::from(CheckpointError::Unreadable { path: path.to_owned(), problem })
        };
        let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
        let mut text = Vec::new();
        file.take(MAX_FILE + 1).read_to_end(&mut text).map_err(|error| Error::io("read", path, error))?;
        if text.len() as u64 > MAX_FILE {
            return Err(unreadable(format!("it has more than {MAX_FILE} bytes")));
        }
        let content: Content =
            serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
        let flat = |all: Option<Vec<Numbers>>| all.unwrap_or_default().iter().map(Numbers::flat).collect();
        let layers = content.nodes.into_iter().map(|(fqn, node)| {
            let weight = node.params.and_then(|params| params.get("weight").map(Numbers::flat));
            (fqn, LayerMeasures { inputs: flat(node.inputs), outputs: flat(node.outputs), weight })
        });
        let measures = Self { layers: layers.collect() };
        measures.check().map_err(|error| unreadable(error.to_string()))?;
        Ok(measures)
    }

    /// Reads the JSON files of all ranks that have measured: for each tensor the largest magnitude is taken, so that all ranks get the
    /// same scales, however many there are. The `.npz` is not read, since it is pickled.
    ///
    /// # Errors
    /// If there is no file, or one cannot be read.
    pub fn read(prefix: &Path, observer: Observer) -> Result<Self> {
        let mut all = Self::default();
        let files = files_of(prefix, observer);
        if files.is_empty() {
            let path = file_name(prefix, observer.name(), None, ".json");
            let what = format!("Failed to load file {}: it is not there", path.display());
            let remedy = "run predict with quant=false first, or name the folder of the measurements by fp8_data_path, HABANA_LOGS \
                          or dump_stats_path";
            return Err(ConfigError::new("fp8 measurements", what, remedy).into());
        }
        for path in files {
            all.merge(Self::read_file(&path)?);
        }
        Ok(all)
    }
}

fn write_json(path: &Path, content: &serde_json::Value) -> Result<()> {
    write_atomically(path, |out| {
        let format = serde_json::ser::PrettyFormatter::with_indent(b"    ");
        content.serialize(&mut serde_json::Serializer::with_formatter(&mut *out, format))?;
        out.write_all(b"\n")
    })
}

/// The JSON files of a prefix and an observer, of one process or of ranks.
fn files_of(prefix: &Path, observer: Observer) -> Vec<PathBuf> {
    let stem = file_name(prefix, observer.name(), None, "");
    let stem = stem.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_rank = |rest: &str| {
        let mut parts = rest.split('_');
        let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<usize>().is_ok());
        rest.is_empty()
            || (parts.next() == Some("")
                && is_number(parts.next())
                && is_number(parts.next())
                && parts.next().is_none())
    };
    let is_one = |name: &str| {
        let rest = name.strip_prefix(&stem).and_then(|rest| rest.strip_suffix(".json"));
        rest.is_some_and(is_rank)
    };
    let folder = prefix.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> =
        entries.filter(|entry| entry.file_name().to_str().is_some_and(is_one)).map(|it| it.path()).collect();
    files.sort();
    files
}

/// Moves the files of an earlier measurement to `backup_PREFIX` beside them, whose files are replaced.
pub(super) fn set_aside(prefix: &Path, observer: Observer) -> Result<()> {
    let files = files_of(prefix, observer);
    if files.is_empty() {
        return Ok(());
    }
    let name = prefix.file_name().unwrap_or_default().to_string_lossy();
    let folder = prefix.with_file_name(format!("backup_{name}"));
    fs::create_dir_all(&folder).map_err(|error| Error::io("create folder", &folder, error))?;
    for json in files {
        let stem = json.file_stem().unwrap_or_default().to_string_lossy();
        let mod_list = json.with_file_name(format!("{stem}_mod_list.json"));
        for path in [json.clone(), json.with_extension("npz"), mod_list] {
            let Some(name) = path.file_name().filter(|_| path.exists()) else { continue };
            let to = folder.join(name);
            fs::rename(&path, &to).map_err(|error| Error::io("rename to", &to, error))?;
        }
    }
    Ok(())
}

/// The beginning of the files' names of the latest measurement in this folder or in one beside its runs: `version_3` finds that of
/// `version_2`.
pub(super) fn latest(folders: &[PathBuf], observer: Observer) -> Option<PathBuf> {
    let beside = |folder: &PathBuf| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    let all = folders.iter().cloned().chain(folders.iter().flat_map(beside));
    let written = all.filter_map(|folder| {
        let prefix = folder.join(MEASURE);
        let time = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
        let latest: Option<SystemTime> = files_of(&prefix, observer).iter().filter_map(time).max();
        Some((latest?, prefix))
    });
    written.max().map(|(_, prefix)| prefix)
}
