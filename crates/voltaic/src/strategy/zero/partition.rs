//! Which parameters form a unit.

use std::collections::HashSet;
use std::sync::Once;

use tch::Kind;

use super::config::ZeroConfig;
use super::flat::{Layout, assign};
use super::swapper::Files;
use super::unit::{NO_OPTIMIZER, Unit};
use crate::distributed::{ProcessGroup, SubMesh};
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::nn::{Module, ModuleExt, Parameter, is_member, modules_named};
use crate::strategy::offload::OffloadDevice;

/// The parameters of each optimizer, with their fqn.
pub(super) type Trained = [Vec<(String, Parameter)>];

/// Groups parameters into units.
pub(super) struct Partitioner<'a> {
    pub config: &'a ZeroConfig,
    pub dp_shard: &'a SubMesh,
    pub group: Option<&'a ProcessGroup>,
    /// The device that weights are unsharded on, and the dtype that they have there.
    pub target: Option<(tch::Device, Option<Kind>)>,
}

/// The module that a parameter is a member of, itself or in a list.
fn module_of<'a>(fqn: &'a str, modules: &HashSet<String>) -> &'a str {
    let mut outer = std::iter::successors(fqn.rsplit_once('.'), |(outer, _)| outer.rsplit_once('.'));
    outer.find(|(module, _)| modules.contains(*module)).map_or("", |(module, _)| module)
}

/// The fqns of leaf modules, the outermost of those that lie within each other.
///
/// # Errors
/// If one of the names is that of no module.
fn leaf_modules(module: &dyn Module, names: &[String]) -> Result<Vec<String>> {
    let leaves = modules_named(module, names).map_err(|name| {
        let what = format!("leaf_modules has `{name}`, and no module has that type or fqn");
        let remedy = "use the name of a module's type, or an fqn of module.named_modules()";
        ConfigError::new("trainer.strategy", what, remedy)
    })?;
    Ok(leaves.into_iter().map(|(fqn, _)| fqn).collect())
}

/// The optimizer that changes a parameter.
///
/// # Errors
/// If there are two.
fn optimizer_of(trained: &Trained, parameter: &Parameter) -> Result<usize> {
    let has =
        |(_, of): &(usize, &Vec<(String, Parameter)>)| of.iter().any(|(_, it)| it.id() == parameter.id());
    let mut optimizers = trained.iter().enumerate().filter(has);
    let first = optimizers.next();
    if let Some((fqn, _)) =
        optimizers.next().and_then(|(_, of)| of.iter().find(|(_, it)| it.id() == parameter.id()))
    {
        let what = format!("{fqn} belongs to two optimizers");
        let remedy = "give each parameter to one optimizer, or use the strategy ddp";
        return Err(ConfigError::new("configure_optimizers", what, remedy).into());
    }
    Ok(first.map_or(NO_OPTIMIZER, |(index, _)| index))
}

impl Partitioner<'_> {
    /// Units for the parameters that the optimizers change, by optimizer; those that are frozen are apart.
    pub fn by_optimizer(&self, trained: &Trained) -> Result<Vec<Unit>> {
        let mut params: Vec<(usize, &str, &Parameter)> = Vec::new();
        let mut known = HashSet::new();
        for (fqn, parameter) in trained.iter().flatten() {
            let index = optimizer_of(trained, parameter)?;
            if known.insert(parameter.id()) {
                params.push((index, fqn, parameter));
            }
        }
        let key = |(index, _, parameter): &(usize, &str, &Parameter)| {
            let is_trained = parameter.requires_grad();
            ((*index, is_trained, parameter.kind(), parameter.device()), parameter.numel())
        };
        let keys: Vec<_> = params.iter().map(key).collect();
        let unit = |members: Vec<usize>| {
            let optimizer = params[members[0]].0;
            let members = members.iter().map(|&at| (params[at].1.to_owned(), params[at].2.clone()));
            self.unit(members.collect(), optimizer, false)
        };
        assign(&keys, self.config.max_unit_len()).into_iter().map(unit).collect()
    }

    /// The layout of a unit whose shard and weight shard are where the settings say; the shard `stays` beside the weights if it is not to be
    /// offloaded.
    fn stored(&self, layout: Layout, stays: bool) -> Layout {
        let place = |offload| if offload == OffloadDevice::None { layout.device } else { tch::Device::Cpu };
        let pins = layout.device != tch::Device::Cpu && self.pins();
        let storage = if stays { layout.device } else { place(self.config.offload_optimizer.device) };
        Layout { storage, weight_shard_storage: place(self.config.offload_param.device), pins, ..layout }
    }

    /// Whether what is offloaded is in pinned memory: it is to be, and can be.
    fn pins(&self) -> bool {
        static WARNED: Once = Once::new();
        let ZeroConfig { offload_optimizer, offload_param, .. } = self.config;
        let is_asked = offload_optimizer.pin_memory || offload_param.pin_memory;
        if !is_asked {
            return false;
        }
        let Some(error) = ffi::cannot_pin() else { return true };
        WARNED.call_once(|| {
            tracing::warn!("pin_memory has no effect: memory cannot be pinned here ({error})");
        });
        false
    }

    /// Which units' shards stay beside the weights although the others' are offloaded: the first ones, as far as they have their share of
    /// all elements.
    fn stay(&self, lens: &[usize]) -> Vec<bool> {
        let share = (1.0 - self.config.offload_optimizer.ratio) * lens.iter().sum::<usize>() as f64;
        let ends = lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        ends.map(|end| end as f64 <= share).collect()
    }

    fn unit(&self, members: Vec<(String, Parameter)>, optimizer: usize, stays: bool) -> Result<Unit> {
        let layout = self.stored(Layout::of(members, self.dp_shard.size), stays);
        Unit::new(layout, optimizer, self.dp_shard.rank, self.config.master_weights)
    }

    /// Units by module, whose weights are sharded, but for small parameters, which stay unsharded. What is to be in `files` goes there.
    pub fn by_module(&self, module: &dyn Module, files: &mut Files) -> Result<Vec<Unit>> {
        type Key<'a> = (Option<&'a str>, Kind, tch::Device);
        let params = module.named_parameters();
        let modules = module.named_modules().into_iter().map(|(fqn, _)| fqn).collect();
        let leaves = leaf_modules(module, &self.config.leaf_modules)?;
        let keys: Vec<(Key<'_>, usize)> = params
            .iter()
            .map(|(fqn, parameter)| {
                let stays = parameter.numel() <= self.config.param_persistence_threshold;
                let leaf = leaves.iter().find(|leaf| is_member(fqn, leaf)).map(String::as_str);
                let module = leaf.or_else(|| (!stays).then(|| module_of(fqn, &modules)));
                let (kind, device) = self.goal(parameter);
                ((module, kind, device), parameter.numel())
            })
            .collect();
        let SubMesh { rank, size, .. } = self.dp_shard;
        let units = assign(&keys, self.config.max_unit_len());
        let lens: Vec<usize> =
            units.iter().map(|members| members.iter().map(|&at| keys[at].1).sum()).collect();
        let unit = |(number, (members, stays)): (usize, (Vec<usize>, bool))| {
            let ((module, kind, device), _) = keys[members[0]];
            let ids = members.iter().min().copied().unwrap_or(0)..=members.iter().max().copied().unwrap_or(0);
            let members = members.iter().map(|&at| params[at].clone()).collect();
            let layout = self.stored(Layout { kind, device, ..Layout::of(members, *size) }, stays);
            let [swaps_shard, swaps_weight_shard] =
                [&self.config.offload_optimizer.device, &self.config.offload_param.device]
                    .map(|device| *device == OffloadDevice::Nvme && module.is_some());
            let layout = Layout { swaps_shard: swaps_shard && !stays, swaps_weight_shard, ..layout };
            let masters = self.config.master_weights;
            let keeps_values = *rank == 0; // the others get these
            let mut unit = Unit::of_module(layout, *rank, masters, (module, keeps_values))?;
            unit.is_leaf = module.is_some_and(|module| leaves.iter().any(|leaf| leaf == module));
            if let Some(group) = self.group {
                unit.take_from_rank_zero(group)?;
            }
            unit.reshard()?; // the next one needs the room
            unit.ids = ids;
            files.take(number, &mut unit)?;
            Ok(unit)
        };
        units.into_iter().zip(self.stay(&lens)).enumerate().map(unit).collect()
    }

    /// The dtype and device that a weight has in the run.
    fn goal(&self, parameter: &Parameter) -> (Kind, tch::Device) {
        let (device, dtype) = self.target.unwrap_or((parameter.device(), None));
        let dtype = dtype.filter(|_| parameter.leaf().is_floating_point());
        (dtype.unwrap_or(parameter.kind()), device)
    }

    /// Notes which optimizer changes each unit. Parameters that stay unsharded and travel together, but belong to several, are made
    /// units of their own, behind all others. Returns whether there are some.
    ///
    /// # Errors
    /// If weights of a module that are sharded belong to several optimizers.
    pub fn give_optimizers(&self, units: &mut Vec<Unit>, trained: &Trained) -> Result<bool> {
        let mut behind = Vec::new();
        for unit in units.iter_mut() {
            let mut by_optimizer: Vec<(usize, Vec<(String, Parameter)>)> = Vec::new();
            for place in &unit.layout.places {
                let optimizer = optimizer_of(trained, &place.parameter)?;
                let member = (place.fqn.clone(), place.parameter.clone());
                match by_optimizer.iter_mut().find(|(known, _)| *known == optimizer) {
                    Some((_, members)) => members.push(member),
                    None => by_optimizer.push((optimizer, vec![member])),
                }
            }
            let of_one = |(optimizer, _): &&(usize, Vec<_>)| *optimizer != NO_OPTIMIZER;
            let changed: Vec<_> = by_optimizer.iter().filter(of_one).collect();
            match changed[..] {
                [] => {}
                [(optimizer, _)] => unit.optimizer = *optimizer,
                [(_, first), (_, second), ..] if unit.shards_weights() => {
                    let what = format!(
                        "{} and {} travel together, but belong to two optimizers",
                        second[0].0, first[0].0
                    );
                    let remedy = "give all parameters of a module to one optimizer, or use zero2";
                    return Err(ConfigError::new("configure_optimizers", what, remedy).into());
                }
                _ => {
                    let stays = !unit.layout.is_stored_apart();
                    let mut apart = by_optimizer.into_iter().map(|(optimizer, members)| {
                        members.iter().try_for_each(|(_, parameter)| parameter.detach_sharding())?;
                        self.unit(members, optimizer, stays)
                    });
                    if let Some(first) = apart.next() {
                        *unit = first?;
                    }
                    behind.extend(apart.collect::<Result<Vec<_>>>()?);
                }
            }
        }
        let has_split = !behind.is_empty();
        units.append(&mut behind);
        Ok(has_split)
    }
}
