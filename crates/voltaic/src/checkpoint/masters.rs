//! Float32 master weights in the place of the weights of 16 bits that were rounded from them.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use tch::{Kind, Tensor};

use super::checkpoint::Checkpoint;
use super::stream::bytes_of;
use crate::error::{Error, Result};

/// Name of the state of an optimizer that is the master weight; a dot and the fqn follow.
pub(crate) const MASTER: &str = "master_param";

/// The parameter whose master weight a state of an optimizer is, by the state's name.
pub(crate) fn parameter_of(state: &str) -> Option<&str> {
    state.strip_prefix(MASTER)?.strip_prefix('.')
}

/// Whether weights of this dtype may have master weights.
pub(super) fn may_have_master(kind: Kind) -> bool {
    matches!(kind, Kind::BFloat16 | Kind::Half)
}

/// The tensor whose values a weight has: its master weight if it is among these, else itself.
pub(super) fn source<'a>(masters: &HashMap<&str, &'a str>, name: &'a str) -> &'a str {
    masters.get(name).copied().unwrap_or(name)
}

/// For each of these 16-bit weights its master weight, if the weight is the rounded master weight. Otherwise the weight was averaged
/// or edited, and counts itself. A tied weight has the master weight of its other name. `known` are master weights by fqn.
///
/// # Errors
/// Those of `weight` and `master`, which give a tensor by its name.
pub(super) fn masters_of<'a, M: Copy>(
    names: &[&'a str],
    known: &HashMap<&str, M>,
    weight: &dyn Fn(&str) -> Result<Tensor>,
    master: &dyn Fn(M) -> Result<Tensor>,
) -> Result<HashMap<&'a str, M>> {
    let mut found = HashMap::new();
    let mut by_value = HashMap::new();
    for name in names {
        let Some(own) = known.get(name) else { continue };
        let (weight, own_master) = (weight(name)?, master(*own)?);
        let value = value_of(&weight)?;
        if own_master.kind() == Kind::Float && value_of(&own_master.f_to_kind(weight.kind())?)? == value {
            found.insert(*name, *own);
            by_value.insert(value, *own);
        }
    }
    if by_value.is_empty() {
        return Ok(found);
    }
    for name in names.iter().filter(|name| !known.contains_key(**name)) {
        if let Some(own) = by_value.get(&value_of(&weight(name)?)?) {
            found.insert(name, *own);
        }
    }
    Ok(found)
}

/// Tells tensors with other elements, shapes or dtypes apart.
fn value_of(tensor: &Tensor) -> Result<(Vec<i64>, u64)> {
    let mut hasher = DefaultHasher::new();
    bytes_of(tensor).map_err(|error| Error::io("copy", "a weight", error))?.hash(&mut hasher);
    std::mem::discriminant(&tensor.kind()).hash(&mut hasher);
    Ok((tensor.size(), hasher.finish()))
}

/// A master weight in the place of some elements of a weight that were rounded from it, else these.
///
/// # Errors
/// libtorch's, if memory runs out.
pub(crate) fn exact(weight: Tensor, master: Tensor) -> Result<Tensor> {
    let is_rounded = may_have_master(weight.kind())
        && master.kind() == Kind::Float
        && master.f_to_kind(weight.kind())?.f_equal(&weight)?;
    Ok(if is_rounded { master } else { weight })
}

/// Replaces weights by the master weights that they were rounded from, and removes these from the optimizers' states, for the selected
/// parameters. Returns how many weights were replaced.
///
/// # Errors
/// libtorch's, if memory runs out.
pub(crate) fn use_master_weights(
    checkpoint: &mut Checkpoint,
    is_wanted: &dyn Fn(&str) -> bool,
) -> Result<usize> {
    let Some(training) = &mut checkpoint.training else { return Ok(0) };
    let mut masters: Vec<(String, Tensor)> = Vec::new();
    for state in &mut training.optimizers {
        masters.extend(state.extract_if(.., |(name, _)| parameter_of(name).is_some_and(is_wanted)));
    }
    let known = masters.iter().filter_map(|(name, tensor)| Some((parameter_of(name)?, tensor))).collect();
    let by_name: HashMap<&str, &Tensor> =
        checkpoint.weights.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    if masters.is_empty() {
        return Ok(0);
    }
    let names = checkpoint.weights.iter().filter(|(_, tensor)| may_have_master(tensor.kind()));
    let names: Vec<&str> = names.map(|(name, _)| name.as_str()).collect();
    let of_name = |name: &str| Ok(by_name[name].shallow_clone());
    let found = masters_of(&names, &known, &of_name, &|master: &Tensor| Ok(master.shallow_clone()))?;
    let replaced: Vec<Option<Tensor>> = checkpoint
        .weights
        .iter()
        .map(|(name, _)| found.get(name.as_str()).map(|master| master.shallow_clone()))
        .collect();
    let count = found.len();
    for ((_, weight), master) in checkpoint.weights.iter_mut().zip(replaced) {
        if let Some(master) = master {
            *weight = master;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::checkpoint::TrainingState;

    #[test]
    fn weights_that_were_rounded_from_their_masters_are_replaced() {
        let exact = |value: f32| Tensor::from_slice(&[value, 0.1, f32::NAN]);
        let half = |value: f32| exact(value).to_kind(Kind::BFloat16);
        let mut checkpoint = Checkpoint {
            weights: vec![
                ("w".to_owned(), half(0.3)),
                ("tied".to_owned(), half(0.3)),
                ("average".to_owned(), half(0.5)),
                ("frozen".to_owned(), half(0.7)),
                ("full".to_owned(), exact(0.9)),
            ],
            ..Checkpoint::default()
        };
        assert_eq!(use_master_weights(&mut checkpoint, &|_| true).expect("has none"), 0);
        let states = [
            ("master_param.w", 0.3),
            ("exp_avg.w", 0.0),
            ("master_param.average", 0.4),
            ("master_param.half", 0.2),
        ];
        let states = states.map(|(name, value)| (name.to_owned(), exact(value)));
        checkpoint.training =
            Some(TrainingState { optimizers: vec![states.into()], ..TrainingState::default() });
        assert_eq!(use_master_weights(&mut checkpoint, &|fqn| fqn != "half").expect("copies"), 2);
        let kinds = checkpoint.weights.iter().map(|(_, tensor)| tensor.kind()).collect::<Vec<_>>();
        assert_eq!(kinds, [Kind::Float, Kind::Float, Kind::BFloat16, Kind::BFloat16, Kind::Float]);
        assert_eq!(checkpoint.weights[1].1.double_value(&[0]), f64::from(0.3_f32));
        let left = &checkpoint.training.expect("is there").optimizers[0];
        let left: Vec<&str> = left.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(left, ["exp_avg.w", "master_param.half"]);
    }
}
