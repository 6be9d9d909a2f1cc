//! Loading values by name.

use std::collections::{HashMap, HashSet};

use tch::{Kind, Tensor};

use crate::checkpoint::{Unread, exact};
use crate::error::{CheckpointError, Problem, Result, first_of};
use crate::nn::parameter::Parameter;

/// Names that [`load_state_dict`](crate::nn::ModuleExt::load_state_dict) found on one side only; PyTorch's `_IncompatibleKeys`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Names of the module that the state does not have: their values are as they were. A tied parameter counts if none of its names
    /// is there.
    pub missing_keys: Vec<String>,
    /// Names of the state that the module does not have: their values are not used.
    pub unexpected_keys: Vec<String>,
}

impl IncompatibleKeys {
    /// Whether both sides have the same names.
    pub fn is_empty(&self) -> bool {
        self.missing_keys.is_empty() && self.unexpected_keys.is_empty()
    }
}

/// An entry of a module's state dict.
pub(crate) enum StateEntry {
    Parameter(Parameter),
    Buffer(Tensor),
}

impl StateEntry {
    /// Of a parameter, which may have several names.
    fn id(&self) -> Option<u64> {
        match self {
            Self::Parameter(parameter) => Some(parameter.id()),
            Self::Buffer(_) => None,
        }
    }

    fn size(&self) -> Vec<i64> {
        match self {
            Self::Parameter(parameter) => parameter.full_size(),
            Self::Buffer(tensor) => tensor.size(),
        }
    }

    /// Copies values into it, of which a rank that has a slice takes that.
    pub(crate) fn fill(&self, values: &Tensor) -> Result<()> {
        let own = match self {
            Self::Parameter(parameter) => parameter.kind(),
            Self::Buffer(tensor) => tensor.kind(),
        };
        let is_float8 = |kind| matches!(kind, Kind::Float8e4m3fn | Kind::Float8e5m2);
        if own != values.kind() && (is_float8(own) || is_float8(values.kind())) {
            let what = format!("weights are {:?}, and the module's are {own:?}", values.kind());
            let remedy = match is_float8(own) {
                true => "the module is quantized: load a quantized file, or load before convert_modules",
                false => "load a quantized file with its scales, by nn::quant::load or ckpt_path",
            };
            let module = "a quantized weight".to_owned();
            return Err(CheckpointError::Mismatch { module, problem: Problem::new(what, remedy) }.into());
        }
        match self {
            Self::Parameter(parameter) => match parameter.tensor_shard() {
                Some(shard) => Self::fill_own(parameter, &shard.slice(values)?),
                None => Self::fill_own(parameter, values),
            },
            Self::Buffer(tensor) => Ok(tensor.shallow_clone().f_copy_(values)?),
        }
    }

    /// Takes the tensor of this name of an opened checkpoint, with the precision of its master weight if that is named. A rank that has a
    /// slice reads no more.
    pub(crate) fn read(&self, unread: &Unread, name: &str, master: Option<&str>) -> Result<()> {
        let Self::Parameter(parameter) = self else { return self.fill(&unread.whole(name)?) };
        let shard = parameter.tensor_shard();
        let read = |name: &str| match &shard {
            Some(shard) => Ok(unread.shard(name, &shard.spec())?.f_view(shard.local_shape().as_slice())?),
            None => unread.whole(name),
        };
        let values = read(name)?;
        Self::fill_own(
            parameter,
            &match master {
                Some(master) => exact(values, read(master)?)?,
                None => values,
            },
        )
    }

    /// Copies this rank's values into a parameter.
    pub(crate) fn fill_own(parameter: &Parameter, values: &Tensor) -> Result<()> {
        parameter.update(|tensor| Ok(tensor.shallow_clone().f_copy_(values)?))
    }
}

/// Copies values of the names that `own`, the tensors of a module of this type, has.
pub(super) fn load_state_dict(
    module: &'static str,
    own: &[(String, StateEntry)],
    state: &[(String, Tensor)],
    strict: bool,
) -> Result<IncompatibleKeys> {
    let shapes: Vec<(&str, Vec<i64>)> =
        state.iter().map(|(name, tensor)| (name.as_str(), tensor.size())).collect();
    let given: HashMap<&str, &Tensor> = state.iter().map(|(n, t)| (n.as_str(), t)).collect();
    load_each(module, own, &shapes, strict, &mut |fqn, held| {
        given.get(fqn).map_or(Ok(()), |values| held.fill(values))
    })
}

/// The same with a function that copies the values of a name, for tensors that are not all in memory.
pub(super) fn load_each(
    module: &'static str,
    own: &[(String, StateEntry)],
    shapes: &[(&str, Vec<i64>)],
    strict: bool,
    fill: &mut dyn FnMut(&str, &StateEntry) -> Result<()>,
) -> Result<IncompatibleKeys> {
    let given: HashMap<&str, &Vec<i64>> = shapes.iter().map(|(name, shape)| (*name, shape)).collect();
    let mut problems = Vec::new();
    let mut copies = Vec::new();
    let mut keys = IncompatibleKeys::default();
    for (fqn, target) in own {
        match given.get(fqn.as_str()) {
            None => keys.missing_keys.push(fqn.clone()),
            Some(shape) if **shape != target.size() => {
                problems.push(format!("{fqn} has shape {shape:?}, the module's is {:?}", target.size()));
            }
            Some(_) => copies.push((fqn, target)),
        }
    }
    let names: HashSet<&str> = own.iter().map(|(name, _)| name.as_str()).collect();
    let unexpected = shapes.iter().map(|(name, _)| *name).filter(|name| !names.contains(name));
    keys.unexpected_keys.extend(unexpected.map(str::to_owned));
    let refuse = |what: String, remedy: String| {
        let module = module.to_owned();
        Err(CheckpointError::Mismatch { module, problem: Problem::new(what, remedy) }.into())
    };
    if keys.missing_keys.len() == own.len() && !own.is_empty() && !shapes.is_empty() {
        let mut unexpected = keys.unexpected_keys.clone();
        unexpected.sort(); // tensors of a file may come in any order
        let what = format!(
            "none of the names fits: {} missing ({}), {} unexpected ({})",
            keys.missing_keys.len(),
            first_of(&keys.missing_keys, 3),
            unexpected.len(),
            first_of(&unexpected, 3)
        );
        let remedy = how_to_rename(&keys.missing_keys, &unexpected).unwrap_or_else(|| {
            "load it into a module like the one that it was saved from, or rename the tensors".to_owned()
        });
        return refuse(what, remedy);
    }
    // one name of a tied parameter is enough
    let filled: HashSet<u64> = copies.iter().filter_map(|(_, target)| target.id()).collect();
    let is_absent = |(fqn, target): &&(String, StateEntry)| {
        !given.contains_key(fqn.as_str()) && target.id().is_none_or(|id| !filled.contains(&id))
    };
    keys.missing_keys = own.iter().filter(is_absent).map(|(fqn, _)| fqn.clone()).collect();
    let has_other_shapes = !problems.is_empty();
    if strict {
        problems.extend(keys.missing_keys.iter().map(|fqn| format!("missing {fqn}")));
        let mut unexpected: Vec<String> =
            keys.unexpected_keys.iter().map(|name| format!("unexpected {name}")).collect();
        unexpected.sort();
        problems.extend(unexpected);
    }
    if !problems.is_empty() {
        let renamed = how_to_rename(&keys.missing_keys, &keys.unexpected_keys).filter(|_| !has_other_shapes);
        let remedy = renamed.unwrap_or_else(|| {
            "build the module with the sizes it was saved with, or load with strict=false".to_owned()
        });
        return refuse(first_of(&problems, 10), remedy);
    }
    // of the names of a tied parameter the last one counts, and in the order of files neighbours share blocks that are read
    let last: HashMap<u64, &String> =
        copies.iter().filter_map(|(fqn, target)| Some((target.id()?, *fqn))).collect();
    copies.retain(|(fqn, target)| target.id().is_none_or(|id| last.get(&id) == Some(fqn)));
    copies.sort_unstable_by_key(|(fqn, _)| *fqn);
    let _no_grad = tch::no_grad_guard();
    copies.into_iter().try_for_each(|(fqn, target)| fill(fqn, target))?;
    Ok(keys)
}

/// How to rename a state whose names differ from the module's only in what they begin with.
fn how_to_rename(missing: &[String], unexpected: &[String]) -> Option<String> {
    let (few, many) =
        if missing.len() <= unexpected.len() { (missing, unexpected) } else { (unexpected, missing) };
    let known: HashSet<&str> = many.iter().map(String::as_str).collect();
    let first = few.first()?;
    let (own, other) = many.iter().filter_map(|name| prefixes_of(first, name)).find(|(own, other)| {
        few.iter().all(|name| {
            name.strip_prefix(own).is_some_and(|rest| known.contains(format!("{other}{rest}").as_str()))
        })
    })?;
    let (to, from) = if missing.len() <= unexpected.len() { (own, other) } else { (other, own) };
    let what = match (from, to) {
        (from, "") => format!("take the prefix `{from}` off the names of the state"),
        ("", to) => format!("put the prefix `{to}` before the names of the state"),
        (from, to) => format!("replace the prefix `{from}` of the names of the state by `{to}`"),
    };
    Some(format!("{what}, of a file by weights.rename=[{from}={to}], or convert --rename={from}={to}"))
}

/// What two names begin with, if they end alike.
fn prefixes_of<'a>(one: &'a str, other: &'a str) -> Option<(&'a str, &'a str)> {
    let alike = one.bytes().rev().zip(other.bytes().rev()).take_while(|(a, b)| a == b).count();
    let end = one.get(one.len() - alike..)?;
    let is_whole = |name: &str| name.len() == end.len() || name[..name.len() - end.len()].ends_with('.');
    // what is alike begins with a whole part of both names
    let end = if is_whole(one) && is_whole(other) { end } else { end.split_once('.')?.1 };
    Some((one.strip_suffix(end)?, other.strip_suffix(end)?))
}
