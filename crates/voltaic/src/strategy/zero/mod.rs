//! ZeRO (arXiv:1910.02054): optimizer states, gradients and weights are sharded over ranks. [`Zero`] is the strategy.
//!
//! A unit (`unit`) is what FSDP2 calls a parameter group: parameters that are communicated together, in one flat tensor (`flat`), of
//! which each rank has a shard. A step passes through the files in this order:
//!
//! 1. `partition` groups parameters into units, when a call begins: by module in stage 3, by optimizer before.
//! 2. Forward: `access` unshards a unit before the call of its module, and reshards it afterwards (stage 3). `prefetch` gathers the
//!    next units ahead, in the order of the last step (`order`); `unsharded_storage` has their memory. Ranks compare in which
//!    order they have unsharded units (`order_digest`).
//! 3. Backward: `unit_set` reduces the gradients of a unit once they are complete, and keeps this rank's shard (`grads`).
//! 4. `optimizer` steps the shards. `unsharded_params` unshards single parameters for optimizers that need them so.
//!
//! `weight_shard` has what weights are gathered from if the optimizer's shard is offloaded, `swapper` what is in files between steps, and
//! `update` what a step does with these files; `host_states` moves states to the host between phases. `shards` has this rank's shards of a
//! checkpoint, `values` single values by name, and `report` counts memory.

mod access;
pub(super) mod config;
mod flat;
mod grads;
mod host_states;
mod modules;
mod optimizer;
mod order;
mod order_digest;
mod partition;
mod prefetch;
mod report;
mod shards;
mod swapper;
mod unit;
mod unit_set;
mod unsharded_params;
mod unsharded_storage;
mod update;
mod values;
mod weight_shard;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tch::{Kind, Tensor};

use super::peers::{SentVotes, broadcast_buffers, same_modules, start_equal};
use super::sharded::{ShardedGrads, ShardedState};
use super::strategy::{PART, Strategy, drop_grads_of, grads_of, set_grads_of};
use super::votes::Votes;
use crate::checkpoint::{Shard, ShardSpec};
use crate::device::Device;
use crate::distributed::{DeviceMesh, ProcessGroup, SubMesh, World};
use crate::error::{ConfigError, Result};
use crate::ffi::GradHook;
use crate::nn::{GradShare, Module, ModuleExt, ModuleHooks, Parameter, RemovableHandle};
use crate::optim::{ConfiguredOptimizer, OffloadState, Optimizer, OptimizerState, Optimizers};
use crate::precision::{LossScaler, Precision, StaticLossScaler};
use access::{Phase, Phases, UnshardOnAccess, explained, watch};
use config::{ZeroConfig, ZeroStage};
use modules::{has_all, has_some, move_buffers};
use optimizer::{ZeroOptimizer, check_divisible};
use partition::Partitioner;
use report::{MemoryReport, moved_per_step, swapped_per_step};
use swapper::Files;
use unit::Unit;
use unit_set::{UnitSet, hook_leaves};
use unsharded_params::UnshardedParams;

/// Data-parallel training in which each rank keeps a shard of the optimizer states, from stage 2 on of the gradients, in stage 3
/// of the weights.
///
/// Parameters may be frozen and unfrozen during a fit, the same on all ranks.
#[derive(Debug)]
pub struct Zero {
    world: World,
    config: ZeroConfig,
    set: Option<Arc<Mutex<UnitSet>>>,
    hooks: Vec<GradHook>,
    /// Parameters whose changes must be known: those of units with a shard of their own ([`Unit::has_own_shard`]).
    kept: Vec<Parameter>,
    /// Hooks of the calls of modules.
    calls: Vec<RemovableHandle>,
    /// Device and dtype of sharded weights.
    target: Option<(tch::Device, Option<Kind>)>,
    /// The state of the call that `kept` belongs to.
    phase: Arc<Phases>,
    /// Whether the weights stay sharded after a successful call, until `gather_weights`.
    stays_sharded: bool,
}

impl Zero {
    /// For these ranks, or for a single process.
    pub fn new(world: World, config: ZeroConfig) -> Self {
        if !config.gather_after_fit && config.stage < ZeroStage::Three && world.is_global_zero() {
            let stage = config.stage.number();
            tracing::warn!(
                "gather_after_fit=false has no effect: stage {stage} leaves the weights unsharded, only stage 3 shards them"
            );
        }
        let (kept, phase) = (Vec::new(), Arc::default());
        let (hooks, calls) = (Vec::new(), Vec::new());
        Self { world, config, set: None, hooks, kept, calls, target: None, phase, stays_sharded: false }
    }

    /// The ranks that shard states among each other, if there are some.
    fn group(&self) -> Option<&Arc<ProcessGroup>> {
        self.world.mesh().dp_shard.group()
    }

    /// An error if the mesh has ranks besides those that shard states among each other.
    fn check_mesh(&self) -> Result<()> {
        let DeviceMesh { dims, dp_shard, tp, .. } = self.world.mesh();
        if dp_shard.size * tp.size == self.world.world_size {
            return Ok(());
        }
        let what = format!("{dims}, of which {} shards along dp_shard only", self.name());
        Err(ConfigError::new("device mesh", what, "give dp_shard all ranks but those along tp, or use ddp")
            .into())
    }

    fn set(&self) -> Option<MutexGuard<'_, UnitSet>> {
        let set = self.set.as_ref()?;
        Some(set.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The set, after edits of the weights were taken into the shards.
    fn with_changes(&self) -> Result<Option<MutexGuard<'_, UnitSet>>> {
        let Some(mut set) = self.set() else { return Ok(None) };
        set.take_changes()?;
        Ok(Some(set))
    }

    fn partitioner(&self) -> Partitioner<'_> {
        let group = self.group().map(Arc::as_ref);
        Partitioner {
            config: &self.config,
            dp_shard: &self.world.mesh().dp_shard,
            group,
            target: self.target,
        }
    }

    /// Uses these units from now on.
    fn keep(&mut self, units: Vec<Unit>, files: Files) -> Result<()> {
        let set = UnitSet::new(self.config.clone(), self.group().cloned(), units, files);
        self.set = Some(Arc::new(Mutex::new(set)));
        self.phase = Arc::default();
        self.follow_units()
    }

    /// Hooks the gradients of all units, and attaches to the weights that need it and are not attached yet.
    fn follow_units(&mut self) -> Result<()> {
        let Some(set) = self.set.clone() else { return Ok(()) };
        let locked = set.lock().unwrap_or_else(PoisonError::into_inner);
        let units = &locked.units;
        let kept = units.iter().filter(|unit| unit.has_own_shard());
        self.kept = kept.flat_map(|unit| &unit.layout.places).map(|place| place.parameter.clone()).collect();
        drop(locked);
        self.watch_gradients(&set)?;
        let sharding = Arc::new(UnshardOnAccess { set, phase: self.phase.clone() });
        let new = self.kept.iter().filter(|parameter| !parameter.is_kept());
        new.into_iter().try_for_each(|parameter| parameter.attach_sharding(sharding.clone()))
    }

    /// Says of all parameters in units what their gradients are.
    fn set_grad_share(&self, share: GradShare) {
        let Some(set) = self.set() else { return };
        let places = set.units.iter().flat_map(|unit| &unit.layout.places);
        places.for_each(|place| place.parameter.set_grad_share(share));
    }

    /// Hooks the gradients, and says that they are not in the parameters.
    fn watch_gradients(&mut self, set: &Arc<Mutex<UnitSet>>) -> Result<()> {
        self.set_grad_share(GradShare::Nothing);
        self.hook_gradients(set)
    }

    /// Resumes with the weights that the last call has left sharded, if they are this module's.
    fn resume(&mut self, module: &dyn Module) -> Result<bool> {
        let Some(set) = self.set.clone().filter(|_| self.phase.is(Phase::LeftSharded)) else {
            return Ok(false);
        };
        let mut locked = set.lock().unwrap_or_else(PoisonError::into_inner);
        if has_all(&locked, module) {
            locked.units.iter_mut().try_for_each(Unit::begin_call)?;
            locked.begin_call();
            drop(locked);
            self.phase.set(Phase::Running);
            return self.watch_gradients(&set).map(|()| true);
        }
        if !has_some(&locked, module) && locked.is_orphaned() {
            locked.clear();
            (self.set, self.kept) = (None, Vec::new());
            return Ok(false);
        }
        let what = "the module of the last call has left its weights sharded over the ranks, and this is another one";
        let remedy = "call trainer.gather_weights(&module) on that one first, or use a trainer for each";
        Err(ConfigError::new("trainer.strategy", what, remedy).into())
    }

    /// Unshards all weights, on the host if they do not fit on the device together.
    fn unshard_all(&mut self, module: &dyn Module) -> Result<()> {
        let is_on_host = self.target.is_none_or(|(device, _)| device == tch::Device::Cpu);
        let Some(mut set) = self.set() else { return Ok(()) };
        let fits_on_device = is_on_host || set.fits_on_device()?;
        for number in 0..set.units.len() {
            if fits_on_device {
                set.unshard_alone(number)?;
                set.units[number].begin_use();
            } else {
                set.with_unit(number, Unit::leave_on_host)?;
            }
        }
        if fits_on_device {
            return Ok(());
        }
        tracing::warn!("all weights together do not fit on the device: the module is on the host now");
        move_buffers(module, tch::Device::Cpu, None)
    }

    /// Leaves the weights sharded, with only this rank's shards in memory.
    fn leave_sharded(&mut self) -> Result<()> {
        self.phase.set(Phase::LeftSharded);
        let Some(mut set) = self.set() else { return Ok(()) };
        set.units.iter_mut().try_for_each(Unit::end_call)
    }

    /// Reshards all weights that are not in use.
    fn reshard_all(&self) -> Result<()> {
        self.set().map_or(Ok(()), |mut set| set.units.iter_mut().try_for_each(Unit::reshard_after_step))
    }

    /// Unshards and reshards units around the calls of their modules.
    fn watch_calls(&mut self, calls: &ModuleHooks) {
        let Some(set) = self.set.clone() else { return };
        let mut by_module: HashMap<String, Vec<usize>> = HashMap::new();
        let locked = set.lock().unwrap_or_else(PoisonError::into_inner);
        let modules = locked.units.iter().map(|unit| unit.module.as_ref()).enumerate();
        for (number, module) in modules.filter_map(|(number, module)| Some((number, module?))) {
            by_module.entry(module.clone()).or_default().push(number);
        }
        drop(locked);
        self.calls = watch(calls, &set, by_module);
    }

    fn hook_gradients(&mut self, set: &Arc<Mutex<UnitSet>>) -> Result<()> {
        let leaves: Vec<(usize, usize, Tensor)> = {
            let set = set.lock().unwrap_or_else(PoisonError::into_inner);
            let of = |(number, unit): (usize, &Unit)| {
                let leaves = unit.leaves().map(Tensor::shallow_clone).enumerate();
                let leaves = leaves.filter(|(_, leaf)| leaf.requires_grad());
                leaves.map(|(index, leaf)| (number, index, leaf)).collect::<Vec<_>>()
            };
            set.units.iter().enumerate().flat_map(of).collect()
        };
        self.hooks = hook_leaves(set, leaves)?;
        Ok(())
    }

    /// Includes parameters that were unfrozen since the last step.
    fn follow_unfrozen(&mut self) -> Result<()> {
        let mut has_unfrozen = false;
        if let Some(mut set) = self.set() {
            for unit in &mut set.units {
                has_unfrozen |= unit.unfreeze()?;
            }
        }
        if has_unfrozen { self.follow_units() } else { Ok(()) }
    }

    /// Exchanges votes before gradients are reduced. An error on all ranks if only some of them have a loss: the others would wait for
    /// their gradients, and take those of the next batch. Returns the votes of all ranks if a window is complete.
    fn exchange_votes(&self, syncs: bool, votes: Votes) -> Result<Votes> {
        if !syncs && self.config.stage < ZeroStage::Two {
            return Ok(Votes::default());
        }
        let votes = self.agree(votes)?;
        Ok(if syncs { votes } else { Votes::default() })
    }

    /// The name of this rank's shard of a gradient, and whether one came on this rank.
    fn shard_name(&self, fqn: &str, had_grad: bool) -> String {
        let SubMesh { rank, size: ranks, .. } = &self.world.mesh().dp_shard;
        let note = if had_grad { "" } else { ", of others" };
        format!("{fqn}{PART} {rank} of {ranks}{note})")
    }
}

impl Strategy for Zero {
    fn name(&self) -> &'static str {
        self.config.stage.name()
    }

    fn excludes_frozen_parameters(&self) -> bool {
        self.config.exclude_frozen_parameters
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn timeout(&self) -> Option<Duration> {
        Some(self.config.timeout)
    }

    fn allowed_differences(&self) -> Vec<String> {
        self.config.allow_differences.clone()
    }

    fn place(&mut self, module: &dyn Module, device: Device, dtype: Option<Kind>) -> Result<()> {
        if self.config.stage < ZeroStage::Three {
            module.to_device(device)?;
            return dtype.map_or(Ok(()), |dtype| module.to_dtype(dtype));
        }
        self.target = Some((device.tch(), dtype));
        move_buffers(module, device.tch(), dtype)
    }

    fn prepare(&mut self, module: &dyn Module, calls: &ModuleHooks) -> Result<()> {
        self.check_mesh()?;
        if self.config.stage < ZeroStage::Three {
            self.teardown();
            return self.group().map_or(Ok(()), |group| start_equal(group, module));
        }
        // weights become rank 0's unit by unit
        self.group().map_or(Ok(()), |group| {
            same_modules(group, module)?;
            broadcast_buffers(group, module)
        })?;
        if !self.resume(module)? {
            self.teardown();
            let is_deferred = module.parameters().iter().any(Parameter::is_provisional);
            let stays_sharded = self.group().is_some() && (is_deferred || !self.config.gather_after_fit);
            self.stays_sharded = self.world.of_rank_zero(stays_sharded)?;
            let dtype = self.target.and_then(|(_, dtype)| dtype).unwrap_or(Kind::Float);
            let mut files = Files::open(&self.config, self.world.rank, dtype)?;
            let units = self.partitioner().by_module(module, &mut files)?;
            files.begin_call();
            self.keep(units, files)?;
        }
        self.watch_calls(calls);
        self.reshard_all()
    }

    fn optimizers(&mut self, asked: Optimizers, module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        check_divisible(&asked, self.name(), self.config.allow_untested_optimizer)?;
        let trained = asked.parameters(module);
        if self.set.is_none() {
            let units = self.partitioner().by_optimizer(&trained)?;
            self.keep(units, Files::default())?;
        }
        let Some(set) = self.set.clone() else { return Ok(Vec::new()) };
        let mut locked = set.lock().unwrap_or_else(PoisonError::into_inner);
        if self.config.stage == ZeroStage::Three {
            let mut units = std::mem::take(&mut locked.units);
            let given = self.partitioner().give_optimizers(&mut units, &trained);
            let files = std::mem::take(&mut locked.files);
            *locked = UnitSet::new(self.config.clone(), self.group().cloned(), units, files);
            drop(locked);
            if given? {
                self.follow_units()?;
            }
            locked = set.lock().unwrap_or_else(PoisonError::into_inner);
        }
        let held = MemoryReport::of(module, &locked.units, &self.config);
        let World { rank, world_size, .. } = &self.world;
        tracing::info!(
            "{}: rank {rank} of {world_size} holds {held}; optimizer states come with the first step",
            self.name()
        );
        let sharded_params: Vec<(u64, Parameter)> = locked
            .units
            .iter()
            .flat_map(|unit| unit.layout.places.iter().zip(&unit.sharded_params))
            .map(|(place, sharded)| (place.parameter.id(), sharded.clone()))
            .collect();
        let in_place_of = |parameter: &Parameter| {
            let sharded = sharded_params.iter().find(|(id, _)| *id == parameter.id());
            sharded.map_or_else(|| parameter.clone(), |(_, sharded)| sharded.clone()) // frozen ones are not sharded
        };
        let unsharded = Arc::new(UnshardedParams::of(&set, &locked));
        drop(locked);
        let asked = if self.config.float32_states { asked.with_float32_states() } else { asked };
        let built = asked.build_over_shards(module, &in_place_of, Some(unsharded))?;
        let wrap = |(index, built): (usize, ConfiguredOptimizer)| {
            let inner = built.optimizer;
            let mut locked = set.lock().unwrap_or_else(PoisonError::into_inner);
            let units = locked.units.iter_mut().filter(|unit| unit.optimizer == index);
            units.for_each(|unit| unit.takes_narrow_grads = inner.takes_narrow_grads());
            drop(locked);
            let (set, has_logged_size, has_offloaded) = (set.clone(), false, false);
            let optimizer = Box::new(ZeroOptimizer { inner, index, set, has_logged_size, has_offloaded });
            ConfiguredOptimizer { optimizer, ..built }
        };
        Ok(built.into_iter().enumerate().map(wrap).collect())
    }

    fn sharded_state(&self) -> Option<&dyn ShardedState> {
        Some(self)
    }

    fn begin_forward(&mut self, module: &dyn Module, opens: bool) -> Result<()> {
        self.reshard_all()?;
        if let Some(mut set) = self.set() {
            set.take_changes()?;
            let UnitSet { order, units, .. } = &mut *set;
            order.begin(|unit| units[unit].layout.len());
            units.iter_mut().for_each(|unit| unit.open_calls = 0);
        }
        match self.group() {
            Some(group) if opens && self.config.broadcast_buffers => broadcast_buffers(group, module),
            _ => Ok(()),
        }
    }

    fn begin_evaluation(&mut self, _module: &dyn Module, num_batches: &[Vec<usize>]) -> Result<()> {
        if let Some(mut set) = self.set() {
            set.order.end();
        }
        let differ = num_batches.iter().any(|other| *other != num_batches[0]);
        let must_stay = differ && self.config.stage == ZeroStage::Three;
        let Some(mut set) = self.set().filter(|_| must_stay) else { return Ok(()) };
        tracing::info!(
            "ranks have different numbers of batches ({num_batches:?}): weights stay unsharded meanwhile"
        );
        for number in 0..set.units.len() {
            set.units[number].keep_until_step_end();
            set.unshard_alone(number)?;
        }
        Ok(())
    }

    fn begin_backward(&mut self, _loss: &Tensor, syncs: bool, votes: Votes) -> Result<()> {
        self.follow_unfrozen()?;
        let votes = self.exchange_votes(syncs, votes)?;
        if let Some(mut set) = self.set() {
            set.take_changes()?;
            set.begin(syncs, votes);
        }
        Ok(())
    }

    fn without_loss(&mut self, syncs: bool, votes: Votes) -> Result<Votes> {
        let votes = self.exchange_votes(syncs, Votes { without_loss: 1, ..votes })?;
        let Some(mut set) = self.set().filter(|_| syncs) else { return Ok(votes) };
        set.take_changes()?;
        set.begin(true, votes);
        (set.is_in_backward, set.is_active) = (false, false);
        set.finish()
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        let Some(mut set) = self.set() else { return done.map(|()| Votes::default()) };
        set.is_in_backward = false;
        let ended = set.end_step();
        let was_active = std::mem::take(&mut set.is_active);
        match done {
            Err(error) => {
                set.abandon();
                let of_hook = || explained(GradHook::failure_or(&self.hooks, error));
                Err(set.failure.take().unwrap_or_else(of_hook))
            }
            Ok(()) if was_active => ended.and_then(|()| set.finish()),
            Ok(()) => ended.and_then(|()| set.keep_sums()).map(|()| Votes::default()),
        }
    }

    fn check_averaged(&self) -> Result<()> {
        self.set().map_or(Ok(()), |set| set.check_averaged())
    }

    fn grads(&self, module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
        let mut grads = grads_of(module);
        if let Some(set) = self.set() {
            for unit in &set.units {
                grads.extend(unit.own_sums()?.into_iter().map(|(fqn, sums)| (fqn.to_owned(), sums)));
                let shards = unit.pending()?.into_iter();
                grads.extend(shards.map(|(fqn, had, grad)| (self.shard_name(fqn, had), grad)));
            }
        }
        Ok(grads)
    }

    fn drop_grads(&mut self, module: &dyn Module) -> Result<()> {
        if let Some(mut set) = self.set() {
            set.units.iter_mut().try_for_each(Unit::drop_grads)?;
        }
        drop_grads_of(module)
    }

    fn set_grads(&mut self, module: &dyn Module, grads: &[(String, Tensor)]) -> Result<()> {
        let mut others = Vec::new();
        for (name, grad) in grads {
            let place = name.split_once(PART).and_then(|(fqn, _)| {
                let (unit, index) = self.set()?.place_of(fqn)?;
                let had = [true, false].into_iter().find(|had| self.shard_name(fqn, *had) == *name)?;
                Some((unit, index, had))
            });
            if let Some(mut set) = self.set()
                && let Some((unit, index)) = set.place_of(name)
                && let Some(dtype) = set.sums_dtype(unit)
            {
                set.units[unit].restore_sums(index, dtype, grad)?;
                continue;
            }
            match (place, self.set()) {
                (Some((unit, index, had)), Some(mut set)) => {
                    set.units[unit].restore_pending(index, had, grad)?;
                }
                _ => others.push((name.clone(), grad.shallow_clone())),
            }
        }
        set_grads_of(module, &others)
    }

    fn loss_scaler(&self, precision: Precision) -> Option<LossScaler> {
        match precision {
            Precision::Fp16True => Some(self.config.fp16.build()),
            Precision::Bf16True if self.config.check_grad_overflow => {
                Some(LossScaler::Static(StaticLossScaler::new(1.0)))
            }
            _ => None,
        }
    }

    fn agree(&self, votes: Votes) -> Result<Votes> {
        self.group().map_or(Ok(votes), |group| SentVotes::start(group, votes)?.receive())
    }

    fn finish(&mut self, module: &dyn Module) -> Result<()> {
        let Some(mut set) = self.set() else { return Ok(()) };
        set.check_order()?;
        let held = MemoryReport::of(module, &set.units, &self.config);
        let held = held.with(set.peaks, set.max_live, &set.units);
        let moved = moved_per_step(&set.moved);
        let swapped = set.files.stats().map(|stats| swapped_per_step(stats, &set.files, &set.moved));
        drop(set);
        let World { rank, world_size, .. } = &self.world;
        tracing::info!("{}: rank {rank} of {world_size} held at most {held}", self.name());
        if let Some(moved) = moved {
            tracing::info!("{}: rank {rank} of {world_size} moved {moved}", self.name());
        }
        if let Some(swapped) = swapped {
            tracing::info!("{}: rank {rank} of {world_size} had {swapped}", self.name());
        }
        if self.stays_sharded { self.leave_sharded() } else { self.unshard_all(module) }
    }

    fn keeps(&self, module: &dyn Module) -> bool {
        self.set().is_some_and(|set| has_some(&set, module))
    }

    fn gather_weights(&mut self, module: &dyn Module) -> Result<()> {
        if !self.phase.is(Phase::LeftSharded) || !self.keeps(module) {
            return Ok(());
        }
        self.phase.set(Phase::Running);
        let done = self.unshard_all(module);
        self.teardown();
        done
    }

    fn teardown(&mut self) {
        self.hooks.clear();
        self.calls.drain(..).for_each(|handle| handle.remove());
        self.set_grad_share(GradShare::All);
        if self.phase.is(Phase::LeftSharded) && self.set.is_some() {
            return;
        }
        self.phase.set(Phase::Failed);
        let failed: Vec<_> =
            self.kept.drain(..).filter_map(|parameter| parameter.detach_sharding().err()).collect();
        if let Some(error) = failed.first() {
            let number = failed.len();
            tracing::warn!(
                "{number} weights stay sharded over the ranks, and the module cannot be used: load the last checkpoint into a new one ({error})"
            );
        }
        self.set = None;
    }
}

impl Drop for Zero {
    /// Marks weights that are left sharded: they cannot be unsharded any more.
    fn drop(&mut self) {
        self.set_grad_share(GradShare::All);
        if !self.phase.is(Phase::LeftSharded) {
            return;
        }
        self.phase.set(Phase::Gone);
        let unsharded = self.kept.drain(..).filter(|parameter| !parameter.is_sharded());
        unsharded.for_each(|parameter| drop(parameter.detach_sharding()));
        self.set().into_iter().for_each(|mut set| set.clear());
    }
}

impl ShardedState for Zero {
    fn save_weights(&self) -> Result<Vec<Shard>> {
        let Some(set) = self.with_changes()? else { return Ok(Vec::new()) };
        set.check_not_torn()?;
        shards::weights(&set)
    }

    fn weight_shard(&self, fqn: &str) -> Option<ShardSpec> {
        shards::weight_shard(&*self.set()?, fqn)
    }

    fn load_weight(&self, fqn: &str, values: &Tensor) -> Result<()> {
        self.set().map_or(Ok(()), |mut set| shards::load_weight(&mut set, fqn, values))
    }

    fn state_shard(&self, fqn: &str) -> Option<ShardSpec> {
        shards::shard(&*self.set()?, fqn)
    }

    fn save_optimizer(
        &self,
        index: usize,
        optimizer: &dyn Optimizer,
    ) -> Result<(OptimizerState, Vec<Shard>)> {
        let set = self.with_changes()?;
        set.as_ref().map_or(Ok(()), |set| set.check_not_torn())?;
        let state = optimizer.state_dict();
        match set {
            Some(set) => shards::save_optimizer(&set, index, state),
            None => Ok((state, Vec::new())),
        }
    }

    fn load_optimizer(
        &self,
        optimizer: &mut dyn Optimizer,
        state: OptimizerState,
        shards: Vec<Shard>,
    ) -> Result<()> {
        optimizer.reload_states(&OffloadState::ALL)?;
        let state = match self.set() {
            Some(mut set) => shards::load_optimizer(&mut set, state, shards)?,
            None => state,
        };
        optimizer.take_state_dict(state)
    }

    fn save_grads(&self, module: &dyn Module) -> Result<ShardedGrads> {
        let mut own = grads_of(module);
        let Some(set) = self.set() else { return Ok(ShardedGrads { own, ..Default::default() }) };
        for unit in &set.units {
            own.extend(unit.own_sums()?.into_iter().map(|(fqn, sums)| (fqn.to_owned(), sums)));
        }
        let (shards, had_grad) = shards::grads(&set)?;
        Ok(ShardedGrads { own, shards, had_grad })
    }

    fn grad_shard(&self, fqn: &str) -> Option<ShardSpec> {
        let set = self.set()?;
        shards::shard(&set, fqn)
    }

    fn load_grad(&self, fqn: &str, values: &Tensor) -> Result<()> {
        self.set().map_or(Ok(()), |mut set| shards::load_grad(&mut set, fqn, values))
    }
}
