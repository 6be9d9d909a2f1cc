//! Stage 0: the optimizer's state is whole, and in the file of the model states.

use std::collections::HashSet;

use tch::Tensor;

use super::folder::refuse;
use super::layout::FlatParam;
use super::model::{Contents, Model};
use super::partitions::{self, States};
use crate::checkpoint::pickle::Value;
use crate::error::Result;

const NAMES: &str =
    "give their names in the optimizer's order with --param_names FILE, or convert with --weights_only";

/// The states of the optimizer. DeepSpeed does not save the names of its parameters here: they are those that are `given`, or the
/// weights in their order.
pub(super) fn states(model: &mut Model, given: Option<&[String]>, wants_states: bool) -> Result<States> {
    let path = model.rest.path.clone();
    let Some(optimizer) = model.rest.take("optimizer") else { return Ok(States::default()) };
    let mut wrapper = Contents::of(optimizer, &path)?;
    // weights of 16 bits have a wrapper around the optimizer
    let (masters, inner) = match wrapper.take("optimizer_state_dict") {
        Some(inner) => {
            let masters = ["fp32_groups", "fp32_groups_flat"].into_iter().find_map(|key| wrapper.take(key));
            (masters, Contents::of(inner, &path)?)
        }
        None => (None, wrapper),
    };
    if masters.is_none() && !wants_states {
        return Ok(States::default());
    }
    let of_groups = masters.as_ref().and_then(Value::items).unwrap_or_default();
    let is_flat = !of_groups.is_empty() && of_groups.iter().all(|group| group.as_tensor().is_some());
    let masters: Vec<&Tensor> = match is_flat {
        true => of_groups.iter().filter_map(Value::as_tensor).collect(),
        false => of_groups
            .iter()
            .flat_map(|group| group.items().unwrap_or_default())
            .filter_map(Value::as_tensor)
            .collect(),
    };
    let groups = inner.get("param_groups").and_then(Value::items).unwrap_or_default();
    let counts = groups.iter().map(|group| group.get("params").and_then(Value::items).map_or(0, <[_]>::len));
    let count = counts.sum::<usize>();
    let names = names_of(model, (!is_flat).then_some(count), groups.len(), given)?;
    let mut params = Vec::with_capacity(names.len());
    for name in names {
        let shape = model.get(&name).map(Tensor::size);
        let Some(param) = shape.and_then(|shape| FlatParam::new(&name, &shape)) else {
            return refuse(&path, format!("{name} is no weight of the module"), NAMES);
        };
        params.push(param);
    }
    let flats = match is_flat {
        true => cut(params, &masters).map_or_else(
            || refuse(&path, "the float32 weights of the groups do not end where parameters do", NAMES),
            Ok,
        )?,
        false => params.into_iter().map(|param| vec![param]).collect(),
    };
    partitions::of_one(&flats, &masters, &inner, wants_states, &path)
}

/// The parameters of each flat group.
fn cut(params: Vec<FlatParam>, masters: &[&Tensor]) -> Option<Vec<Vec<FlatParam>>> {
    let mut params = params.into_iter();
    let mut flats = Vec::new();
    for master in masters {
        let (mut flat, mut numel) = (Vec::new(), 0);
        while numel < master.numel() {
            let param = params.next()?;
            numel += param.numel;
            flat.push(param);
        }
        flats.push((numel == master.numel()).then_some(flat)?);
    }
    params.next().is_none().then_some(flats)
}

/// Names of the optimizer's parameters, of which there are so many if that is known.
fn names_of(
    model: &Model,
    count: Option<usize>,
    num_groups: usize,
    given: Option<&[String]>,
) -> Result<Vec<String>> {
    let found = match given {
        Some(given) => given.to_vec(),
        None if num_groups > 1 => {
            let what = format!("the optimizer has {num_groups} groups of unnamed parameters");
            return refuse(&model.rest.path, what, NAMES);
        }
        None => {
            let buffers: HashSet<&String> = model.buffers.iter().collect();
            let weights = model.weights().iter();
            let weights =
                weights.filter(|(name, tensor)| tensor.is_floating_point() && !buffers.contains(name));
            weights.map(|(name, _)| name.clone()).collect::<Vec<_>>()
        }
    };
    match count {
        Some(count) if count != found.len() => {
            let what = format!("the optimizer has {count} parameters, {} names are known", found.len());
            refuse(&model.rest.path, what, NAMES)
        }
        _ => Ok(found),
    }
}
