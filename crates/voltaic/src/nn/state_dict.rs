//! Loading values by name.

use std::collections::{HashMap, HashSet};

use tch::Tensor;

use crate::error::{CheckpointError, Problem, Result};
use crate::nn::parameter::Parameter;

/// Names that [`load_state_dict`](crate::nn::ModuleExt::load_state_dict) found on one side only; PyTorch's `_IncompatibleKeys`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Names of the module that the state does not have: their values are as they were.
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

/// What a state dict names.
pub(super) enum Held {
    Parameter(Parameter),
    Buffer(Tensor),
}

impl Held {
    fn size(&self) -> Vec<i64> {
        match self {
            Self::Parameter(parameter) => parameter.size(),
            Self::Buffer(tensor) => tensor.size(),
        }
    }

    fn fill(&self, values: &Tensor) -> Result<()> {
        match self {
            Self::Parameter(parameter) => {
                parameter.update(|tensor| Ok(tensor.shallow_clone().f_copy_(values)?))
            }
            Self::Buffer(tensor) => Ok(tensor.shallow_clone().f_copy_(values)?),
        }
    }
}

/// Copies values of the names that `own`, the tensors of a module of this type, has.
pub(super) fn load_state_dict(
    module: &'static str,
    own: &[(String, Held)],
    state: &[(String, Tensor)],
    strict: bool,
) -> Result<IncompatibleKeys> {
    let given: HashMap<&str, &Tensor> = state.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let mut problems = Vec::new();
    let mut copies = Vec::new();
    let mut keys = IncompatibleKeys::default();
    for (fqn, target) in own {
        match given.get(fqn.as_str()) {
            None => keys.missing_keys.push(fqn.clone()),
            Some(source) if source.size() != target.size() => problems.push(format!(
                "{fqn} has shape {:?}, the module's is {:?}",
                source.size(),
                target.size()
            )),
            Some(source) => copies.push((target, *source)),
        }
    }
    let names: HashSet<&str> = own.iter().map(|(name, _)| name.as_str()).collect();
    let unexpected = state.iter().map(|(name, _)| name).filter(|name| !names.contains(name.as_str()));
    keys.unexpected_keys.extend(unexpected.cloned());
    let refuse = |what: String, remedy: &'static str| {
        let module = module.to_owned();
        Err(CheckpointError::Mismatch { module, problem: Problem::new(what, remedy) }.into())
    };
    if strict {
        problems.extend(keys.missing_keys.iter().map(|name| format!("missing {name}")));
        problems.extend(keys.unexpected_keys.iter().map(|name| format!("unexpected {name}")));
    } else if keys.missing_keys.len() == own.len() && !own.is_empty() && !state.is_empty() {
        let what = format!(
            "none of the names fits: {} missing ({}), {} unexpected ({})",
            keys.missing_keys.len(),
            first_of(&keys.missing_keys, 3),
            keys.unexpected_keys.len(),
            first_of(&keys.unexpected_keys, 3)
        );
        return refuse(what, "rename the tensors as the module's are named, such as by leaving out a prefix");
    }
    if !problems.is_empty() {
        let remedy = "build the module with the sizes it was saved with, or load with strict=false";
        return refuse(first_of(&problems, 10), remedy);
    }
    let _no_grad = tch::no_grad_guard();
    for (target, source) in copies {
        target.fill(source)?;
    }
    Ok(keys)
}

/// So many of the texts, and how many there are besides.
fn first_of(texts: &[String], count: usize) -> String {
    let shown = texts.iter().take(count).cloned().collect::<Vec<_>>().join(", ");
    match texts.len().saturating_sub(count) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
