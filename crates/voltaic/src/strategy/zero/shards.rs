//! This rank's shards of units for checkpoints, saved and loaded without communication.

use tch::Tensor;

use super::unit::{STEP, Unit};
use super::unit_set::UnitSet;
use crate::checkpoint::{MASTER, Shard, ShardSpec};
use crate::error::{ConfigError, Result};
use crate::optim::OptimizerState;

/// What this rank has of a parameter in a unit.
pub(super) fn shard(set: &UnitSet, fqn: &str) -> Option<ShardSpec> {
    let (unit, index) = set.place_of(fqn)?;
    Some(spec_of(&set.units[unit], index))
}

/// The same if its weight is sharded.
pub(super) fn weight_shard(set: &UnitSet, fqn: &str) -> Option<ShardSpec> {
    let (unit, index) = set.place_of(fqn)?;
    let unit = &set.units[unit];
    unit.shards_weights().then(|| spec_of(unit, index))
}

fn spec_of(unit: &Unit, index: usize) -> ShardSpec {
    ShardSpec::flat(&unit.layout.places[index].shape, unit.range(index))
}

fn shard_of(unit: &Unit, index: usize, name: String, values: Tensor) -> Shard {
    Shard { name, spec: spec_of(unit, index), values }
}

/// This rank's shards of the weights of all units.
pub(super) fn weights(set: &UnitSet) -> Result<Vec<Shard>> {
    let _no_grad = tch::no_grad_guard();
    let places = |unit: &'_ Unit| 0..unit.layout.places.len();
    let all = set.units.iter().flat_map(|unit| places(unit).map(move |index| (unit, index)));
    all.map(|(unit, index)| {
        let fqn = unit.layout.places[index].fqn.clone();
        Ok(shard_of(unit, index, fqn, unit.weight_param_shard(index)?))
    })
    .collect()
}

/// Takes this rank's elements of a sharded weight.
pub(super) fn load_weight(set: &mut UnitSet, fqn: &str, values: &Tensor) -> Result<()> {
    let Some((unit, index)) = set.place_of(fqn) else { return Ok(()) };
    let unit = &mut set.units[unit];
    unit.reshard()?;
    if !unit.is_sharded() {
        let what = format!("{fqn} cannot be loaded while it is in use");
        return Err(ConfigError::new("ckpt_path", what, "load weights between steps").into());
    }
    let _no_grad = tch::no_grad_guard();
    let values = unit.layout.places[index].to_memory_order(values)?;
    unit.sharded_params[index].leaf().detach().f_copy_(&values)?;
    unit.renew()
}

/// The state of an optimizer's sharded parameters as numbers and shards.
pub(super) fn save_optimizer(
    set: &UnitSet,
    index: usize,
    state: OptimizerState,
) -> Result<(OptimizerState, Vec<Shard>)> {
    let OptimizerState { tensors, groups } = state;
    let (mut numbers, mut shards) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors {
        let place = name.split_once('.').and_then(|(_, fqn)| set.place_of(fqn));
        let Some((unit, index)) = place else {
            numbers.push((name, tensor));
            continue;
        };
        let unit = &set.units[unit];
        let range = unit.range(index);
        if tensor.dim() == 1 && tensor.numel() == range.len() {
            let values = unit.layout.places[index].to_rows(&tensor)?;
            shards.push(shard_of(unit, index, name, values));
        } else if range.start == 0 && !range.is_empty() {
            numbers.push((name, tensor)); // the same on all ranks that have a shard
        }
    }
    for unit in set.units.iter().filter(|unit| unit.optimizer == index && unit.has_master) {
        for (index, (place, sharded)) in unit.layout.places.iter().zip(&unit.sharded_params).enumerate() {
            let name = format!("{MASTER}.{}", place.fqn);
            shards.push(shard_of(unit, index, name, place.to_rows(&sharded.leaf().detach())?));
        }
    }
    Ok((OptimizerState { tensors: numbers, groups }, shards))
}

/// What an optimizer over sharded parameters takes of numbers and shards; master weights go to their units.
pub(super) fn load_optimizer(
    set: &mut UnitSet,
    state: OptimizerState,
    mut shards: Vec<Shard>,
) -> Result<OptimizerState> {
    let OptimizerState { mut tensors, groups } = state;
    set.make_masters_of(shards.iter().map(|shard| shard.name.as_str()))?;
    set.units.iter_mut().for_each(Unit::note_change);
    let set = &*set;
    let place_of = |name: &str| name.split_once('.').and_then(|(_, fqn)| set.place_of(fqn));
    tensors.retain(|(name, _)| {
        place_of(name).is_none_or(|(unit, index)| !set.units[unit].range(index).is_empty())
    });
    // of a parameter that is a number states are numbers, of which a rank has all or nothing
    let is_like_parameter = |(name, _): &mut (String, Tensor)| {
        let is_count = name.split_once('.').is_some_and(|(state, _)| state == STEP);
        !is_count && place_of(name).is_some()
    };
    for (name, number) in tensors.extract_if(.., is_like_parameter).collect::<Vec<_>>() {
        let (spec, values) = (ShardSpec::whole(&number.size()), number.f_reshape([-1_i64])?);
        shards.push(Shard { name, spec, values });
    }
    for Shard { name, values, .. } in shards {
        let Some((unit, index)) = place_of(&name) else {
            tensors.push((name, values)); // refused by the optimizer
            continue;
        };
        let unit = &set.units[unit];
        if values.numel() == 0 {
            continue;
        }
        let values = unit.layout.places[index].to_memory_order(&values)?;
        if unit.has_master && name.split_once('.').is_some_and(|(state, _)| state == MASTER) {
            let _no_grad = tch::no_grad_guard();
            unit.sharded_params[index].leaf().detach().f_copy_(&values)?;
            continue;
        }
        tensors.push((name, values));
    }
    Ok(OptimizerState { tensors, groups })
}

/// This rank's shards of pending gradients, and which have had one on this rank.
pub(super) fn grads(set: &UnitSet) -> Result<(Vec<Shard>, Vec<String>)> {
    let (mut shards, mut had_grad) = (Vec::new(), Vec::new());
    for unit in &set.units {
        for (index, (fqn, had, grad)) in unit.pending()?.into_iter().enumerate() {
            if had {
                had_grad.push(fqn.to_owned());
            }
            shards.push(shard_of(unit, index, fqn.to_owned(), grad));
        }
    }
    Ok((shards, had_grad))
}

/// Takes this rank's elements of a pending gradient.
pub(super) fn load_grad(set: &mut UnitSet, fqn: &str, values: &Tensor) -> Result<()> {
    let Some((unit, index)) = set.place_of(fqn) else { return Ok(()) };
    set.units[unit].restore_pending(index, true, values)
}
