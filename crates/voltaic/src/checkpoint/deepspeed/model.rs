//! Files of DeepSpeed's model states: weights, buffers, and what else a run keeps.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use tch::Tensor;

use super::folder::{Folder, refuse};
use super::layout::{FlatParam, own_name};
use crate::checkpoint::budget::ReadLimits;
use crate::checkpoint::extra_state::is_extra_state;
use crate::checkpoint::pickle::Value;
use crate::checkpoint::torch_file::read_torch_within;
use crate::error::Result;

/// What to do about a file whose contents do not fit together.
pub(super) const OTHER: &str = "use another checkpoint";

/// A dictionary of a file, from which values are taken.
#[derive(Debug)]
pub(super) struct Contents {
    pub path: PathBuf,
    entries: Vec<(Value, Value)>,
}

impl Contents {
    /// Reads a file of `torch.save` that holds a dictionary.
    pub fn read(path: &Path, limits: ReadLimits) -> Result<Self> {
        Self::of(read_torch_within(path, limits)?, path)
    }

    pub fn of(value: Value, path: &Path) -> Result<Self> {
        match value {
            Value::Dict(entries) => Ok(Self { path: path.to_path_buf(), entries }),
            _ => refuse(path, "it holds no dictionary where DeepSpeed has one", OTHER),
        }
    }

    /// The value at a key; `None` also for Python's.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        let at = self.entries.iter().rposition(|(own, _)| own.as_str() == Some(key))?;
        Some(self.entries.swap_remove(at).1).filter(|value| !matches!(value, Value::None))
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        let found = self.entries.iter().rfind(|(own, _)| own.as_str() == Some(key));
        found.map(|(_, value)| value).filter(|value| !matches!(value, Value::None))
    }

    pub fn refuse<T>(&self, what: impl Into<String>) -> Result<T> {
        refuse(&self.path, what, OTHER)
    }

    /// The values at a key, with their names.
    pub fn take_named(&mut self, key: &str) -> Result<Vec<(String, Value)>> {
        let Some(value) = self.take(key) else { return Ok(Vec::new()) };
        named(value).map_or_else(|| self.refuse(format!("{key} is no dictionary of names")), Ok)
    }
}

/// Entries of a dictionary whose keys are text.
pub(super) fn named(value: Value) -> Option<Vec<(String, Value)>> {
    let Value::Dict(entries) = value else { return None };
    let named = entries.into_iter().map(|(key, value)| match key {
        Value::Text(name) => Some((name, value)),
        _ => None,
    });
    named.collect()
}

/// A whole number that is not negative.
pub(super) fn count_of(value: &Value) -> Option<usize> {
    value.as_i64().and_then(|count| usize::try_from(count).ok())
}

/// What the files of model states have.
#[derive(Debug)]
pub(super) struct Model {
    /// The weights in the module's order, under their own names; in stage 3 those of parameters are empty.
    weights: Vec<(String, Tensor)>,
    places: HashMap<String, usize>,
    /// Extra states of layers that are no tensors.
    pub extra_states: Vec<(String, Value)>,
    /// Parameters of each flat buffer; none without ZeRO.
    pub flats: Option<Vec<Vec<FlatParam>>>,
    /// Other names of parameters, each with the name that they have elsewhere.
    pub tied: Vec<(String, String)>,
    pub buffers: Vec<String>,
    /// Parameters that are not trained.
    pub frozen: Vec<String>,
    /// Everything else.
    pub rest: Contents,
}

impl Model {
    pub fn read(folder: &Folder, limits: ReadLimits) -> Result<Self> {
        let [first, others @ ..] = &folder.models[..] else {
            return refuse(&folder.path, "it has no model states", OTHER);
        };
        let mut rest = Contents::read(first, limits)?;
        let Some(module) = rest.take("module") else {
            let what = "it has no `module`: the weights are elsewhere, as those of a pipeline";
            return refuse(first, what, "save without pipeline stages");
        };
        let (mut weights, mut places, mut extra_states) = (Vec::new(), HashMap::new(), Vec::new());
        for (name, value) in Contents::of(module, first)?.entries {
            match (name, value) {
                (Value::Text(name), Value::Tensor(tensor)) => {
                    let name = own_name(&name).to_owned();
                    if places.insert(name.clone(), weights.len()).is_some() {
                        return rest.refuse(format!("the weight {name} is there twice"));
                    }
                    weights.push((name, tensor));
                }
                (Value::Text(name), value @ Value::Bytes(_)) if is_extra_state(own_name(&name), &value) => {
                    extra_states.push((own_name(&name).to_owned(), value));
                }
                (name, _) => return rest.refuse(format!("the weight {name:?} is not a tensor")),
            }
        }
        let flats = match rest.take("param_shapes") {
            Some(Value::List(groups)) => Some(groups),
            Some(group @ Value::Dict(_)) => Some(vec![group]), // of old versions
            Some(_) => return rest.refuse("param_shapes is no list of groups"),
            None => None,
        };
        let flats = flats.map(|groups| groups.into_iter().map(|group| shapes(group, &rest)).collect());
        let flats: Option<Vec<Vec<FlatParam>>> = flats.transpose()?;
        let mut names = HashSet::new();
        if let Some(twice) = flats.iter().flatten().flatten().find(|flat| !names.insert(own_name(&flat.name)))
        {
            return rest.refuse(format!("{} is twice in param_shapes", twice.name));
        }
        let names_in = |value: Option<Value>| match value {
            Some(value) => {
                let names = value.items().unwrap_or_default().iter().filter_map(Value::as_str);
                names.map(|name| own_name(name).to_owned()).collect()
            }
            None => Vec::new(),
        };
        let buffers = names_in(rest.take("buffer_names"));
        let mut tied = Vec::new();
        for (alias, first) in rest.take_named("shared_params")? {
            let Some(first) = first.as_str() else {
                return rest.refuse(format!("{alias} is tied to something that is no name"));
            };
            tied.push((own_name(&alias).to_owned(), own_name(first).to_owned()));
        }
        let mut model =
            Self { weights, places, extra_states, flats, tied, buffers, frozen: Vec::new(), rest };
        model.add_frozen(folder, others, limits)?;
        Ok(model)
    }

    /// Puts frozen parameters together; in stage 3 each rank has a chunk of them.
    fn add_frozen(&mut self, folder: &Folder, others: &[PathBuf], limits: ReadLimits) -> Result<()> {
        let Some(frozen) = self.rest.take("frozen_param_shapes") else { return Ok(()) };
        let frozen = shapes(frozen, &self.rest)?;
        let mut chunks: Vec<Vec<Tensor>> = frozen.iter().map(|_| Vec::new()).collect();
        let mut of_rank = |rest: &mut Contents| -> Result<()> {
            let mut own: HashMap<String, Value> =
                rest.take_named("frozen_param_fragments")?.into_iter().collect();
            for (flat, chunks) in frozen.iter().zip(&mut chunks) {
                match own.remove(&flat.name) {
                    Some(Value::Tensor(tensor)) => chunks.push(tensor),
                    _ => return rest.refuse(format!("frozen_param_fragments has no tensor {}", flat.name)),
                }
            }
            Ok(())
        };
        of_rank(&mut self.rest)?;
        if !frozen.is_empty() && folder.has_model_of_each {
            others.iter().try_for_each(|path| of_rank(&mut Contents::read(path, limits)?))?;
        }
        let ranks = if folder.has_model_of_each { folder.models.len() } else { 1 };
        for (flat, chunks) in frozen.iter().zip(chunks) {
            let expected = flat.chunk(ranks);
            if let Some(wrong) = chunks.iter().find(|chunk| chunk.numel() != expected) {
                let (name, shape, found) = (&flat.name, &flat.shape, wrong.numel());
                let what = format!(
                    "{name} of shape {shape:?} is divided among {ranks} ranks, of which one has {found} elements, not {expected}"
                );
                return self.rest.refuse(what);
            }
            let flats =
                chunks.iter().map(|chunk| chunk.f_reshape([-1_i64])).collect::<Result<Vec<_>, _>>()?;
            let whole = Tensor::f_cat(&flats, 0)?.f_narrow(0, 0, flat.numel as i64)?;
            self.set(own_name(&flat.name), whole.f_reshape(&flat.shape)?);
            self.frozen.push(own_name(&flat.name).to_owned());
        }
        Ok(())
    }

    /// A weight by its own name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.places.get(name).map(|at| &self.weights[*at].1)
    }

    pub fn weights(&self) -> &[(String, Tensor)] {
        &self.weights
    }

    /// Replaces a weight, or adds it.
    pub fn set(&mut self, name: &str, tensor: Tensor) {
        match self.places.get(name) {
            Some(at) => self.weights[*at].1 = tensor,
            None => {
                self.places.insert(name.to_owned(), self.weights.len());
                self.weights.push((name.to_owned(), tensor));
            }
        }
    }
}

/// Names and shapes.
fn shapes(group: Value, file: &Contents) -> Result<Vec<FlatParam>> {
    let Some(group) = named(group) else { return file.refuse("a group of param_shapes has no names") };
    let flat = |(name, shape): (String, Value)| {
        let sizes = shape.items().map(|sizes| sizes.iter().map(Value::as_i64).collect::<Option<Vec<_>>>());
        match sizes.flatten().and_then(|sizes| FlatParam::new(&name, &sizes)) {
            Some(flat) => Ok(flat),
            None => file.refuse(format!("{name} has no shape that a tensor may have: {shape:?}")),
        }
    };
    group.into_iter().map(flat).collect()
}
