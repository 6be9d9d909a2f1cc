//! Unsharded tensors, such as gradients, from the ranks' shards, for optimizers that need unsharded parameters.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::flat::narrow;
use super::unit_set::UnitSet;
use crate::distributed::{ProcessGroup, Work, collective_scope};
use crate::error::Result;
use crate::nn::Parameter;
use crate::optim::UnshardedParameters;

/// Unshards one parameter at a time. One whose elements a single rank has needs no communication.
#[derive(Debug)]
pub(super) struct UnshardedParams {
    set: Arc<Mutex<UnitSet>>,
    /// Unit and index there, by the id of the sharded parameter.
    places: HashMap<u64, (usize, usize)>,
}

impl UnshardedParams {
    /// Of all units of `set`, which is `locked` now.
    pub fn of(set: &Arc<Mutex<UnitSet>>, locked: &UnitSet) -> Self {
        let mut places = HashMap::new();
        for (number, unit) in locked.units.iter().enumerate() {
            places.extend(
                unit.sharded_params
                    .iter()
                    .enumerate()
                    .map(|(index, sharded)| (sharded.id(), (number, index))),
            );
        }
        Self { set: set.clone(), places }
    }

    fn set(&self) -> MutexGuard<'_, UnitSet> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place_of(&self, sharded: &Parameter) -> Option<(usize, usize)> {
        self.places.get(&sharded.id()).copied()
    }
}

impl UnshardedParameters for UnshardedParams {
    fn shape(&self, shard: &Parameter) -> Option<Vec<i64>> {
        let (unit, index) = self.place_of(shard)?;
        Some(self.set().units[unit].layout.places[index].shape.clone())
    }

    fn unit(&self, shard: &Parameter) -> usize {
        self.place_of(shard).map_or(0, |(unit, _)| unit)
    }

    fn claim(&self, shard: &Parameter) {
        if let Some((unit, index)) = self.place_of(shard) {
            self.set().units[unit].claim(index);
        }
    }

    fn rounded(&self, shard: &Parameter) -> Option<Tensor> {
        let (unit, index) = self.place_of(shard)?;
        let rounded = self.set().units[unit].rounded_param_shard(index);
        rounded.unwrap_or_default() // without, the unit rounds by itself
    }

    fn has_master(&self, shard: &Parameter) -> bool {
        self.place_of(shard).is_some_and(|(unit, _)| self.set().units[unit].wants_master)
    }

    fn unshard(&self, shard: &Parameter, values: &Tensor) -> Result<Option<Tensor>> {
        let Some((unit, index)) = self.place_of(shard) else { return Ok(Some(values.shallow_clone())) };
        let set = self.set();
        let unit = &set.units[unit];
        let place = &unit.layout.places[index];
        let _no_grad = tch::no_grad_guard();
        let _named = collective_scope(format!("update of {}", place.fqn));
        let ranges: Vec<Range<usize>> =
            (0..unit.layout.ranks).map(|rank| unit.layout.range(place, rank)).collect();
        let num_holders = ranges.iter().filter(|range| !range.is_empty()).count();
        let values = values.f_to_device(unit.layout.device)?;
        let all = match set.group() {
            Some(group) if num_holders > 1 => from_shards(group, &ranges, &values)?,
            _ => values,
        };
        if unit.range(index).is_empty() { Ok(None) } else { place.shaped(&all).map(Some) }
    }

    fn shard_of(&self, shard: &Parameter, unsharded: &Tensor) -> Result<Tensor> {
        match self.place_of(shard) {
            Some((unit, index)) => {
                let unit = &self.set().units[unit];
                Ok(unit.param_shard_of(index, unsharded)?.f_to_device(unit.layout.storage)?)
            }
            None => Ok(unsharded.shallow_clone()),
        }
    }
}

/// All elements, of which the ranks have these; this one has `own`.
///
/// # Collective
/// All ranks must call it.
pub(super) fn from_shards(group: &ProcessGroup, ranges: &[Range<usize>], own: &Tensor) -> Result<Tensor> {
    let longest = ranges.iter().map(Range::len).max().unwrap_or(0);
    let numel = ranges.iter().map(Range::len).sum::<usize>();
    let options = (own.kind(), own.device());
    if longest * ranges.len() <= 2 * numel {
        let mut padded = Tensor::f_zeros([longest as i64], options)?;
        narrow(&padded, 0..ranges[group.rank()].len())?.f_copy_(own)?;
        padded = group.all_gather(&padded)?;
        let shards = ranges.iter().enumerate().filter(|(_, range)| !range.is_empty());
        let shards = shards.map(|(rank, range)| narrow(&padded.f_get(rank as i64)?, 0..range.len()));
        return Ok(Tensor::f_cat(&shards.collect::<Result<Vec<_>>>()?, 0)?);
    }
    // few ranks have elements: a shard for every rank would take much more memory than the parameter
    let unsharded = Tensor::f_empty([numel as i64], options)?;
    let mut works = Vec::new();
    for (rank, range) in ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
        let shard = narrow(&unsharded, range.clone())?;
        if rank == group.rank() {
            shard.shallow_clone().f_copy_(own)?;
        }
        works.push(group.start_broadcast(&shard, rank)?);
    }
    works.into_iter().try_for_each(Work::wait)?;
    Ok(unsharded)
}
