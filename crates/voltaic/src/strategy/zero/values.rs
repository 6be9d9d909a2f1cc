//! Access by name to the weight, gradient and optimizer states of a sharded parameter.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::flat::copied;
use super::unit::Unit;
use super::unit_set::UnitSet;
use super::unsharded_params::from_shards;
use crate::checkpoint::MASTER;
use crate::distributed::{Work, collective_scope};
use crate::error::{ConfigError, Problem, Result};
use crate::ffi;
use crate::optim::{Optimizer, ParamValue, kinds, no_state, parameter, shape_problem};

/// What a rank reports to the others about a value.
#[derive(Debug, Serialize, Deserialize)]
struct ValueReport {
    /// The requested value.
    asked: String,
    problem: Option<Problem>,
    has: Has,
    /// Kinds of states that it has of the parameter.
    kinds: Vec<String>,
}

/// What a rank has of a value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Has {
    Nothing,
    /// A number, which is the same on all ranks that have it.
    Number(f64),
    Elements,
}

/// A value of a parameter in a unit.
struct Found {
    place: (usize, usize),
    /// This rank's elements as they lie in memory, or a number; shared with the optimizer.
    own: Option<Tensor>,
    /// What all ranks have together.
    has: Has,
}

/// Finds a value, and what is wrong on any rank; `check` finds further problems if there are no others.
fn find(
    set: &UnitSet,
    inner: &dyn Optimizer,
    (fqn, value): (&str, ParamValue<'_>),
    check: impl FnOnce(&Unit, usize, Option<&Tensor>) -> Option<ConfigError>,
) -> Result<Found> {
    parameter(inner.name(), inner.param_groups(), fqn)?;
    let place = set.place_of(fqn);
    let (number, index) = place.ok_or_else(|| no_state(inner.name(), fqn, &value.to_string(), &[]))?;
    let unit = &set.units[number];
    let states = inner.state_dict().tensors;
    let own = match value {
        ParamValue::State(kind) if kind != MASTER || !unit.has_master => {
            let name = format!("{kind}.{fqn}");
            states.iter().find(|(own, _)| *own == name).map(|(_, state)| state.shallow_clone())
        }
        ParamValue::Gradient => unit.grad_param_shard(index)?,
        _ => Some(unit.sharded_params[index].leaf().f_detach()?),
    };
    let is_empty = unit.range(index).is_empty();
    let has = match &own {
        Some(own) if own.dim() == 0 && !is_empty => Has::Number(own.f_double_value(&[])?),
        Some(own) if own.dim() > 0 => Has::Elements,
        _ => Has::Nothing,
    };
    let problem = check(unit, index, own.as_ref().filter(|_| has != Has::Nothing));
    let problem = problem.and_then(|error| error.problems.into_iter().next());
    let problem = problem.map(|problem| problem.problem);
    let report = ValueReport { asked: format!("{value} of {fqn}"), problem, has, kinds: kinds(&states, fqn) };
    let reports = match &set.group {
        Some(group) => group.all_gather_object(&report)?,
        None => vec![report],
    };
    if let Some((rank, other)) = reports.iter().enumerate().find(|(_, other)| other.asked != reports[0].asked)
    {
        let what = format!("rank 0 asks for the {}, rank {rank} for the {}", reports[0].asked, other.asked);
        return Err(ConfigError::new("optimizer", what, "ask for the same on all ranks").into());
    }
    if let Some((rank, problem)) =
        reports.iter().enumerate().find_map(|(rank, report)| Some((rank, report.problem.as_ref()?)))
    {
        let what =
            if reports.len() > 1 { format!("rank {rank}: {}", problem.what) } else { problem.what.clone() };
        return Err(ConfigError::new("optimizer", what, problem.remedy.clone()).into());
    }
    let has =
        reports.iter().map(|report| report.has).find(|has| *has != Has::Nothing).unwrap_or(Has::Nothing);
    if let (Has::Nothing, ParamValue::State(kind)) = (has, value) {
        let known = reports.iter().find(|report| !report.kinds.is_empty());
        let known = known.map(|report| report.kinds.as_slice()).unwrap_or_default();
        return Err(no_state(inner.name(), fqn, kind, known));
    }
    Ok(Found { place: (number, index), own, has })
}

/// The present value, including edits of weights.
fn current(set: &mut UnitSet, inner: &dyn Optimizer, fqn: &str, value: ParamValue<'_>) -> Result<Found> {
    set.take_changes()?;
    find(set, inner, (fqn, value), |_, _, _| None)
}

fn number(value: f64) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(&[value as f32])?.f_reshape([0_i64; 0])?)
}

/// See [`Optimizer::full_value`].
pub(super) fn full(
    set: &mut UnitSet,
    inner: &dyn Optimizer,
    fqn: &str,
    value: ParamValue<'_>,
) -> Result<Option<Tensor>> {
    let _no_grad = tch::no_grad_guard();
    let _named = collective_scope(format!("{value} of {fqn}"));
    let Found { place: (unit, index), own, has } = current(set, inner, fqn, value)?;
    match has {
        Has::Nothing => Ok(None),
        Has::Number(value) => number(value).map(Some),
        Has::Elements => unsharded(set, &set.units[unit], index, own.as_ref()).map(Some),
    }
}

/// An unsharded value from what each rank has of it.
fn unsharded(set: &UnitSet, unit: &Unit, index: usize, own: Option<&Tensor>) -> Result<Tensor> {
    let (layout, place) = (&unit.layout, &unit.layout.places[index]);
    let ranges: Vec<_> = (0..layout.ranks).map(|rank| layout.range(place, rank)).collect();
    let nothing = || Tensor::f_zeros([0_i64], (Kind::Float, layout.device));
    let own = own.map_or_else(nothing, |own| own.f_to_dtype(Kind::Float, false, true))?;
    let own = own.f_to_device(layout.device)?;
    let all = match &set.group {
        Some(group) if place.numel > 0 => from_shards(group, &ranges, &own)?,
        _ => own,
    };
    Ok(place.to_rows(&all)?.f_reshape(place.shape.as_slice())?)
}

/// See [`Optimizer::set_full_value`].
pub(super) fn set_full(
    set: &mut UnitSet,
    inner: &dyn Optimizer,
    fqn: &str,
    value: ParamValue<'_>,
    values: &Tensor,
) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let _named = collective_scope(format!("{value} of {fqn}"));
    widen_grad(set, fqn, value)?;
    let given = values.size();
    let check = |unit: &Unit, index: usize, own: Option<&Tensor>| {
        let is_number = own.is_some_and(|own| own.dim() == 0);
        let shape = if is_number { &[][..] } else { &unit.layout.places[index].shape };
        let is_absent = own.is_none() && matches!(value, ParamValue::State(_)); // other ranks have its shape
        if is_absent { None } else { shape_problem(fqn, value, shape, &given) }
    };
    let Found { place: (unit, index), own, has } = find(set, inner, (fqn, value), check)?;
    let unit = &mut set.units[unit];
    let own = match has {
        Has::Number(_) => return own.map_or(Ok(()), |own| Ok(own.f_detach()?.f_copy_(values)?)),
        Has::Nothing if value == ParamValue::Gradient => return Err(no_gradient(fqn)),
        _ => own,
    };
    let values = values.f_to_device(unit.layout.device)?;
    let shard = unit.param_shard_of(index, &values)?;
    match value {
        ParamValue::Gradient => set_grad(unit, index, &shard),
        ParamValue::State(kind) if kind != MASTER || !unit.has_master => {
            own.map_or(Ok(()), |own| Ok(own.f_detach()?.f_copy_(&shard)?))
        }
        _ => {
            unit.write(index, &values, &shard)?;
            unit.renew()
        }
    }
}

/// A gradient that is to be written is not rounded to 16 bits, once the optimizer has it.
fn widen_grad(set: &mut UnitSet, fqn: &str, value: ParamValue<'_>) -> Result<()> {
    match set.place_of(fqn).filter(|_| value == ParamValue::Gradient) {
        Some((unit, _)) => set.units[unit].widen_grads(),
        None => Ok(()),
    }
}

fn no_gradient(fqn: &str) -> crate::error::Error {
    let what = format!("there is no gradient of {fqn}");
    let remedy = "set it after the last backward pass of an accumulation window";
    ConfigError::new("optimizer", what, remedy).into()
}

fn set_grad(unit: &mut Unit, index: usize, shard: &Tensor) -> Result<()> {
    let Some(grad) = unit.grad_param_shard(index)? else { return Ok(()) };
    let dtype = unit.grads_dtype().unwrap_or(grad.kind());
    grad.f_detach()?.f_copy_(&shard.f_to_kind(dtype)?)?;
    if grad.numel() > 0
        && !unit.sharded_params[index].grad().defined()
        && dtype == unit.sharded_params[index].kind()
    {
        ffi::set_grad(unit.sharded_params[index].leaf(), &grad)?;
    }
    Ok(())
}

/// See [`Optimizer::local_value`].
pub(super) fn local(
    set: &mut UnitSet,
    inner: &dyn Optimizer,
    fqn: &str,
    value: ParamValue<'_>,
) -> Result<Option<Tensor>> {
    let _no_grad = tch::no_grad_guard();
    let _named = collective_scope(format!("{value} of {fqn}"));
    let Found { place: (unit, index), own, has } = current(set, inner, fqn, value)?;
    let unit = &set.units[unit];
    match (has, own) {
        (Has::Nothing, _) => Ok(None),
        (Has::Number(value), _) => Ok(Some(number(value)?.f_reshape([1_i64])?)),
        (Has::Elements, Some(own)) if own.dim() > 0 => {
            let rows = unit.layout.places[index].to_rows(&own)?;
            Ok(Some(rows.f_to_dtype(Kind::Float, false, true)?))
        }
        (Has::Elements, _) => Ok(Some(Tensor::f_zeros([0_i64], (Kind::Float, unit.layout.storage))?)),
    }
}

/// See [`Optimizer::set_local_value`].
pub(super) fn set_local(
    set: &mut UnitSet,
    inner: &dyn Optimizer,
    fqn: &str,
    value: ParamValue<'_>,
    values: &Tensor,
) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let _named = collective_scope(format!("{value} of {fqn}"));
    widen_grad(set, fqn, value)?;
    let given = values.size();
    let check = |unit: &Unit, index: usize, own: Option<&Tensor>| {
        let len = own.map_or(unit.range(index).len(), Tensor::numel) as i64;
        shape_problem(fqn, value, &[len], &given)
    };
    let Found { place: (number, index), own, has } = find(set, inner, (fqn, value), check)?;
    if has == Has::Nothing {
        return Err(no_gradient(fqn));
    }
    let unit = &set.units[number];
    if let Some(own) = own {
        let values = values.f_to_device(unit.layout.device)?;
        let values = match own.dim() {
            0 => values.f_reshape([0_i64; 0])?,
            _ => unit.layout.places[index].to_memory_order(&values)?,
        };
        own.f_detach()?.f_copy_(&copied(&values)?)?;
    }
    if value != ParamValue::Fp32Weight && value != ParamValue::State(MASTER) {
        return Ok(());
    }
    let group = set.group.clone();
    let unit = &mut set.units[number];
    unit.note_change();
    unit.wait_for_unshard()?;
    if unit.is_sharded() {
        return unit.renew();
    }
    unit.start_gather(group.as_deref())?.map_or(Ok(()), Work::wait)
}

/// See [`Optimizer::master_weights`].
pub(super) fn masters(set: &mut UnitSet, optimizer: usize) -> Result<Vec<(String, Tensor)>> {
    let _no_grad = tch::no_grad_guard();
    let _named = collective_scope("master weights");
    set.take_changes()?;
    let mut all = Vec::new();
    for unit in set.units.iter().filter(|unit| unit.optimizer == optimizer && unit.has_master) {
        let sharded_params: Vec<_> =
            unit.sharded_params.iter().map(|sharded| Some(sharded.leaf().detach())).collect();
        let values = unit.unsharded(set.group(), &sharded_params, Kind::Float)?;
        for (place, values) in unit.layout.places.iter().zip(&values) {
            all.push((place.fqn.clone(), copied(values)?));
        }
    }
    Ok(all)
}

/// See [`Optimizer::set_master_weights`].
pub(super) fn set_masters(set: &mut UnitSet, optimizer: usize, values: &[(String, Tensor)]) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let values: HashMap<&str, &Tensor> = values.iter().map(|(fqn, values)| (fqn.as_str(), values)).collect();
    for unit in set.units.iter_mut().filter(|unit| unit.optimizer == optimizer && unit.has_master) {
        for index in 0..unit.layout.places.len() {
            let Some(values) = values.get(unit.layout.places[index].fqn.as_str()) else { continue };
            let values = values.f_to_device(unit.layout.device)?;
            let shard = unit.param_shard_of(index, &values)?;
            unit.write(index, &values, &shard)?;
        }
        unit.renew()?;
    }
    Ok(())
}
