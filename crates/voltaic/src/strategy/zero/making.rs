//! Which parameters travel together.

use tch::Kind;

use super::config::ZeroConfig;
use super::flat::{Layout, assign};
use super::modules::module_of;
use super::unit::Unit;
use crate::distributed::World;
use crate::error::{ConfigError, Result};
use crate::nn::{Module, ModuleExt, Parameter};

/// Units for the parameters that the optimizers change, by optimizer.
pub(super) fn units(
    world: &World,
    config: &ZeroConfig,
    trained: &[Vec<(String, Parameter)>],
) -> Result<Vec<Unit>> {
    let mut params: Vec<(usize, &str, &Parameter)> = Vec::new();
    for (index, params_of) in trained.iter().enumerate() {
        for (fqn, parameter) in params_of.iter().filter(|(_, parameter)| parameter.requires_grad()) {
            if let Some((other, ..)) = params.iter().find(|(_, _, known)| known.id() == parameter.id())
                && *other != index
            {
                let what = format!("{fqn} belongs to two optimizers");
                let remedy = "give each parameter to one optimizer, or use the strategy ddp";
                return Err(ConfigError::new("configure_optimizers", what, remedy).into());
            }
            if !params.iter().any(|(_, _, known)| known.id() == parameter.id()) {
                params.push((index, fqn, parameter));
            }
        }
    }
    let key = |(index, _, parameter): &(usize, &str, &Parameter)| {
        ((*index, parameter.kind(), parameter.device()), parameter.numel())
    };
    let keys: Vec<((usize, Kind, tch::Device), usize)> = params.iter().map(key).collect();
    let unit = |members: Vec<usize>| {
        let optimizer = params[members[0]].0;
        let members = members.iter().map(|&at| (params[at].1.to_owned(), params[at].2.clone()));
        let layout = Layout::of(members.collect(), world.world_size);
        Unit::new(layout, optimizer, world.rank, config.master_weights)
    };
    assign(&keys, config.reduce_bucket_size).into_iter().map(unit).collect()
}

/// Units by module, whose weights come and go, but for small parameters, which stay. `target` is where they go, and the dtype that
/// they get there.
///
/// # Collective
/// All ranks must call it.
pub(super) fn divided_units(
    world: &World,
    config: &ZeroConfig,
    target: Option<(tch::Device, Option<Kind>)>,
    module: &dyn Module,
) -> Result<Vec<Unit>> {
    type Key<'a> = (Option<&'a str>, Kind, tch::Device);
    let params = module.named_parameters();
    let keys: Vec<(Key<'_>, usize)> = params
        .iter()
        .map(|(fqn, parameter)| {
            let stays = parameter.numel() <= config.param_persistence_threshold;
            let module = (!stays).then(|| module_of(fqn));
            let (kind, device) = goal(target, parameter);
            ((module, kind, device), parameter.numel())
        })
        .collect();
    let unit = |members: Vec<usize>| {
        let ((module, kind, device), _) = keys[members[0]];
        let members = members.iter().map(|&at| params[at].clone()).collect();
        let layout = Layout { kind, device, ..Layout::of(members, world.world_size) };
        let keeps_values = world.rank == 0; // the others get these
        let way = (module.is_some(), keeps_values);
        let mut unit = Unit::of_module(layout, world.rank, config.master_weights, way)?;
        if let Some(group) = world.group().filter(|group| group.world_size() > 1) {
            unit.take_from_rank_zero(group)?;
        }
        unit.release()?; // the next one needs the room
        Ok(unit)
    };
    assign(&keys, config.reduce_bucket_size).into_iter().map(unit).collect()
}

/// The dtype and device that a weight has in the run.
fn goal(target: Option<(tch::Device, Option<Kind>)>, parameter: &Parameter) -> (Kind, tch::Device) {
    let (device, dtype) = target.unwrap_or((parameter.device(), None));
    let dtype = dtype.filter(|_| parameter.leaf().is_floating_point());
    (dtype.unwrap_or(parameter.kind()), device)
}
