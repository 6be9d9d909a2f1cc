//! ZeRO (arXiv:1910.02054): optimizer states, gradients and weights are sharded over ranks. [`Zero`] is the strategy.
//!
//! A unit (`unit`) is what FSDP2 calls a parameter group: parameters that are communicated together, in one flat tensor (`flat`), of
//! which each rank has a part. A step passes through the files in this order:
//!
//! 1. `partition` groups parameters into units, when a call begins: by module in stage 3, by optimizer before.
//! 2. Forward: `access` unshards a unit before the call of its module, and reshards it afterwards (stage 3). `prefetch` gathers the
//!    next units ahead, in the order of the last step (`order`); `gathered_storage` has their memory, `gathered` what ranks compare.
//! 3. Backward: `reducer` reduces the gradients of a unit once they are complete, and keeps this rank's part.
//! 4. `optimizer` steps the parts. `whole` gathers single parameters for optimizers that need whole ones.
//!
//! `weight_shard` has what weights are gathered from if the optimizer's part is offloaded, `swapper` what is in files between steps, and
//! `update` how a step gets on with them; `host_states` moves states to the host between phases. `shards` gives and takes the parts of checkpoints, `values` single values by name, and `report` counts memory.

mod access;
pub(super) mod config;
mod flat;
mod gathered;
mod gathered_storage;
mod host_states;
mod modules;
mod optimizer;
mod order;
mod partition;
mod prefetch;
mod reducer;
mod report;
mod shards;
mod swapper;
mod unit;
mod update;
mod values;
mod weight_shard;
mod whole;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tch::{Kind, Tensor};

use super::peers::{SentVotes, broadcast_buffers, same_modules, start_equal};
use super::sharded::{ShardedGrads, ShardedState};
use super::strategy::{PART, Strategy, drop_grads_of, grads_of, set_grads_of};
use super::votes::Votes;
use crate::checkpoint::{Part, ShardSpec};
use crate::device::Device;
use crate::distributed::{DeviceMesh, ProcessGroup, SubMesh, World};
use crate::error::{ConfigError, Result};
use crate::ffi::GradHook;
use crate::nn::{Module, ModuleExt, ModuleHooks, Parameter, RemovableHandle};
use crate::optim::{
    ConfiguredOptimizer, DividedLeaves, GradShare, OffloadState, Optimizer, OptimizerState, Optimizers,
};
use crate::precision::{LossScaler, Precision, StaticLossScaler};
use access::{GatherOnAccess, Phase, Phases, explained, watch};
use config::{ZeroConfig, ZeroStage};
use modules::{has_all, has_some, move_buffers};
use optimizer::{ZeroOptimizer, check_divisible};
use partition::Partitioner;
use reducer::{Reducer, hook_leaves};
use report::{MemoryReport, moved_per_step, swapped_per_step};
use swapper::Files;
use unit::Unit;
use whole::Whole;

/// Data-parallel training in which each rank keeps a part of the optimizer states, from stage 2 on of the gradients, in stage 3
/// of the weights.
///
/// Parameters may be frozen and unfrozen during a fit, the same on all ranks.
#[derive(Debug)]
pub struct Zero {
    world: World,
    config: ZeroConfig,
    reducer: Option<Arc<Mutex<Reducer>>>,
    hooks: Vec<GradHook>,
    /// Parameters whose changes must be known: those of units with a part of their own ([`Unit::has_own_part`]).
    kept: Vec<Parameter>,
    /// Hooks of the calls of modules.
    calls: Vec<RemovableHandle>,
    /// Device and dtype of sharded weights.
    target: Option<(tch::Device, Option<Kind>)>,
    /// Marks the leaves whose gradients are not on this rank.
    divided: DividedLeaves,
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
                "gather_after_fit=false has no effect: stage {stage} leaves the weights whole, only stage 3 divides them"
            );
        }
        let (kept, phase) = (Vec::new(), Arc::default());
        let (hooks, calls) = (Vec::new(), Vec::new());
        let (divided, stays_sharded) = (DividedLeaves::default(), false);
        Self { world, config, reducer: None, hooks, kept, calls, target: None, divided, phase, stays_sharded }
    }

    /// The ranks that shard states among each other, if there are some.
    fn peers(&self) -> Option<&Arc<ProcessGroup>> {
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

    fn reducer(&self) -> Option<MutexGuard<'_, Reducer>> {
        let reducer = self.reducer.as_ref()?;
        Some(reducer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The reducer, after edits of the weights were taken into the parts.
    fn with_changes(&self) -> Result<Option<MutexGuard<'_, Reducer>>> {
        let Some(mut reducer) = self.reducer() else { return Ok(None) };
        reducer.take_changes()?;
        Ok(Some(reducer))
    }

    fn partitioner(&self) -> Partitioner<'_> {
        let peers = self.peers().map(Arc::as_ref);
        Partitioner {
            config: &self.config,
            dp_shard: &self.world.mesh().dp_shard,
            peers,
            target: self.target,
        }
    }

    /// Uses these units from now on.
    fn keep(&mut self, units: Vec<Unit>, files: Files) -> Result<()> {
        let reducer = Reducer::new(self.config.clone(), self.peers().cloned(), units, files);
        self.reducer = Some(Arc::new(Mutex::new(reducer)));
        self.phase = Arc::default();
        self.follow_units()
    }

    /// Hooks the gradients of all units, and attaches to the weights that need it and are not attached yet.
    fn follow_units(&mut self) -> Result<()> {
        let Some(reducer) = self.reducer.clone() else { return Ok(()) };
        let locked = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        let units = &locked.units;
        let kept = units.iter().filter(|unit| unit.has_own_part());
        self.kept = kept.flat_map(|unit| &unit.layout.places).map(|place| place.parameter.clone()).collect();
        drop(locked);
        self.watch_gradients(&reducer)?;
        let gather = Arc::new(GatherOnAccess { reducer, phase: self.phase.clone() });
        let new = self.kept.iter().filter(|parameter| !parameter.is_kept());
        new.into_iter().try_for_each(|parameter| parameter.attach_gather(gather.clone()))
    }

    /// Hooks the gradients, and marks the leaves without one.
    fn watch_gradients(&mut self, reducer: &Arc<Mutex<Reducer>>) -> Result<()> {
        let locked = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        let leaves = locked.units.iter().flat_map(Unit::leaves).map(|leaf| (leaf, GradShare::Nothing));
        let slices = locked.units.iter().flat_map(|unit| &unit.slices);
        let slices = slices.map(|slice| (slice.leaf(), GradShare::Part));
        self.divided = DividedLeaves::new(leaves.chain(slices))?;
        drop(locked);
        self.hook_gradients(reducer)
    }

    /// Resumes with the weights that the last call has left sharded, if they are this module's.
    fn resume(&mut self, module: &dyn Module) -> Result<bool> {
        let Some(reducer) = self.reducer.clone().filter(|_| self.phase.is(Phase::Parked)) else {
            return Ok(false);
        };
        let mut locked = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        if has_all(&locked, module) {
            locked.units.iter_mut().try_for_each(Unit::begin_call)?;
            locked.begin_call();
            drop(locked);
            self.phase.set(Phase::Running);
            return self.watch_gradients(&reducer).map(|()| true);
        }
        if !has_some(&locked, module) && locked.is_orphaned() {
            locked.clear();
            (self.reducer, self.kept) = (None, Vec::new());
            return Ok(false);
        }
        let what = "the module of the last call has left its weights divided among the ranks, and this is another one";
        let remedy = "call trainer.gather_weights(&module) on that one first, or use a trainer for each";
        Err(ConfigError::new("trainer.strategy", what, remedy).into())
    }

    /// Unshards all weights, on the host if they do not fit on the device together.
    fn unshard_all(&mut self, module: &dyn Module) -> Result<()> {
        let is_on_host = self.target.is_none_or(|(device, _)| device == tch::Device::Cpu);
        let Some(mut reducer) = self.reducer() else { return Ok(()) };
        let fits_on_device = is_on_host || reducer.fits_on_device()?;
        for number in 0..reducer.units.len() {
            if fits_on_device {
                reducer.gather(number)?;
                reducer.units[number].pin();
            } else {
                reducer.with_unit(number, Unit::leave_on_host)?;
            }
        }
        if fits_on_device {
            return Ok(());
        }
        tracing::warn!("all weights together do not fit on the device: the module is on the host now");
        move_buffers(module, tch::Device::Cpu, None)
    }

    /// Leaves the weights sharded, with only this rank's parts in memory.
    fn park(&mut self) -> Result<()> {
        self.phase.set(Phase::Parked);
        let Some(mut reducer) = self.reducer() else { return Ok(()) };
        reducer.units.iter_mut().try_for_each(Unit::end_call)
    }

    /// Reshards all weights that are not in use.
    fn release_all(&self) -> Result<()> {
        self.reducer()
            .map_or(Ok(()), |mut reducer| reducer.units.iter_mut().try_for_each(Unit::release_after_step))
    }

    /// Unshards and reshards units around the calls of their modules.
    fn watch_calls(&mut self, calls: &ModuleHooks) {
        let Some(reducer) = self.reducer.clone() else { return };
        let mut by_module: HashMap<String, Vec<usize>> = HashMap::new();
        let locked = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        let modules = locked.units.iter().map(|unit| unit.module.as_ref()).enumerate();
        for (number, module) in modules.filter_map(|(number, module)| Some((number, module?))) {
            by_module.entry(module.clone()).or_default().push(number);
        }
        drop(locked);
        self.calls = watch(calls, &reducer, by_module);
    }

    fn hook_gradients(&mut self, reducer: &Arc<Mutex<Reducer>>) -> Result<()> {
        let leaves: Vec<(usize, usize, Tensor)> = {
            let reducer = reducer.lock().unwrap_or_else(PoisonError::into_inner);
            let of = |(number, unit): (usize, &Unit)| {
                let leaves = unit.leaves().map(Tensor::shallow_clone).enumerate();
                let leaves = leaves.filter(|(_, leaf)| leaf.requires_grad());
                leaves.map(|(index, leaf)| (number, index, leaf)).collect::<Vec<_>>()
            };
            reducer.units.iter().enumerate().flat_map(of).collect()
        };
        self.hooks = hook_leaves(reducer, leaves)?;
        Ok(())
    }

    /// Includes parameters that were unfrozen since the last step.
    fn follow_unfrozen(&mut self) -> Result<()> {
        let mut has_unfrozen = false;
        if let Some(mut reducer) = self.reducer() {
            for unit in &mut reducer.units {
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

    /// The name of this rank's part of a gradient, and whether one came on this rank.
    fn part_name(&self, fqn: &str, had_grad: bool) -> String {
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
            return self.peers().map_or(Ok(()), |group| start_equal(group, module));
        }
        // weights become rank 0's unit by unit
        self.peers().map_or(Ok(()), |group| {
            same_modules(group, module)?;
            broadcast_buffers(group, module)
        })?;
        if !self.resume(module)? {
            self.teardown();
            let is_deferred = module.parameters().iter().any(Parameter::is_provisional);
            let stays_sharded = self.peers().is_some() && (is_deferred || !self.config.gather_after_fit);
            self.stays_sharded = self.world.of_rank_zero(stays_sharded)?;
            let dtype = self.target.and_then(|(_, dtype)| dtype).unwrap_or(Kind::Float);
            let mut files = Files::open(&self.config, self.world.rank, dtype)?;
            let units = self.partitioner().by_module(module, &mut files)?;
            files.begin_call();
            self.keep(units, files)?;
        }
        self.watch_calls(calls);
        self.release_all()
    }

    fn optimizers(&mut self, asked: Optimizers, module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        check_divisible(&asked, self.name(), self.config.allow_untested_optimizer)?;
        let trained = asked.parameters(module);
        if self.reducer.is_none() {
            let units = self.partitioner().by_optimizer(&trained)?;
            self.keep(units, Files::default())?;
        }
        let Some(reducer) = self.reducer.clone() else { return Ok(Vec::new()) };
        let mut locked = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        if self.config.stage == ZeroStage::Three {
            let mut units = std::mem::take(&mut locked.units);
            let given = self.partitioner().give_optimizers(&mut units, &trained);
            let files = std::mem::take(&mut locked.files);
            *locked = Reducer::new(self.config.clone(), self.peers().cloned(), units, files);
            drop(locked);
            if given? {
                self.follow_units()?;
            }
            locked = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        }
        let held = MemoryReport::of(module, &locked.units, &self.config);
        let World { rank, world_size, .. } = &self.world;
        tracing::info!(
            "{}: rank {rank} of {world_size} holds {held}; optimizer states come with the first step",
            self.name()
        );
        let slices: Vec<(u64, Parameter)> = locked
            .units
            .iter()
            .flat_map(|unit| unit.layout.places.iter().zip(&unit.slices))
            .map(|(place, slice)| (place.parameter.id(), slice.clone()))
            .collect();
        let in_place_of = |parameter: &Parameter| {
            let slice = slices.iter().find(|(id, _)| *id == parameter.id());
            slice.map_or_else(|| parameter.clone(), |(_, slice)| slice.clone()) // frozen ones stay whole
        };
        let whole = Arc::new(Whole::of(&reducer, &locked));
        drop(locked);
        let asked = if self.config.float32_states { asked.with_float32_states() } else { asked };
        let built = asked.build_over_parts(module, &in_place_of, Some(whole))?;
        let wrap = |(index, built): (usize, ConfiguredOptimizer)| {
            let inner = built.optimizer;
            let mut locked = reducer.lock().unwrap_or_else(PoisonError::into_inner);
            let units = locked.units.iter_mut().filter(|unit| unit.optimizer == index);
            units.for_each(|unit| unit.takes_narrow_grads = inner.takes_narrow_grads());
            drop(locked);
            let (reducer, has_logged_size, has_offloaded) = (reducer.clone(), false, false);
            let optimizer = Box::new(ZeroOptimizer { inner, index, reducer, has_logged_size, has_offloaded });
            ConfiguredOptimizer { optimizer, ..built }
        };
        Ok(built.into_iter().enumerate().map(wrap).collect())
    }

    fn sharded_state(&self) -> Option<&dyn ShardedState> {
        Some(self)
    }

    fn begin_forward(&mut self, module: &dyn Module, opens: bool) -> Result<()> {
        self.release_all()?;
        if let Some(mut reducer) = self.reducer() {
            reducer.take_changes()?;
            let Reducer { order, units, .. } = &mut *reducer;
            order.begin(|unit| units[unit].layout.len());
            units.iter_mut().for_each(|unit| unit.open_calls = 0);
        }
        match self.peers() {
            Some(group) if opens && self.config.broadcast_buffers => broadcast_buffers(group, module),
            _ => Ok(()),
        }
    }

    fn begin_evaluation(&mut self, _module: &dyn Module, num_batches: &[Vec<usize>]) -> Result<()> {
        if let Some(mut reducer) = self.reducer() {
            reducer.order.end();
        }
        let differ = num_batches.iter().any(|other| *other != num_batches[0]);
        let must_stay = differ && self.config.stage == ZeroStage::Three;
        let Some(mut reducer) = self.reducer().filter(|_| must_stay) else { return Ok(()) };
        tracing::info!(
            "ranks have different numbers of batches ({num_batches:?}): weights stay whole meanwhile"
        );
        for number in 0..reducer.units.len() {
            reducer.units[number].keep_until_step_end();
            reducer.gather(number)?;
        }
        Ok(())
    }

    fn begin_backward(&mut self, _loss: &Tensor, syncs: bool, votes: Votes) -> Result<()> {
        self.follow_unfrozen()?;
        let votes = self.exchange_votes(syncs, votes)?;
        if let Some(mut reducer) = self.reducer() {
            reducer.take_changes()?;
            reducer.begin(syncs, votes);
        }
        Ok(())
    }

    fn without_loss(&mut self, syncs: bool, votes: Votes) -> Result<Votes> {
        let votes = self.exchange_votes(syncs, Votes { without_loss: 1, ..votes })?;
        let Some(mut reducer) = self.reducer().filter(|_| syncs) else { return Ok(votes) };
        reducer.take_changes()?;
        reducer.begin(true, votes);
        (reducer.is_in_backward, reducer.is_active) = (false, false);
        reducer.finish()
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        let Some(mut reducer) = self.reducer() else { return done.map(|()| Votes::default()) };
        reducer.is_in_backward = false;
        let ended = reducer.end_step();
        let was_active = std::mem::take(&mut reducer.is_active);
        match done {
            Err(error) => {
                reducer.abandon();
                let of_hook = || explained(GradHook::failure_or(&self.hooks, error));
                Err(reducer.failure.take().unwrap_or_else(of_hook))
            }
            Ok(()) if was_active => ended.and_then(|()| reducer.finish()),
            Ok(()) => ended.and_then(|()| reducer.keep_sums()).map(|()| Votes::default()),
        }
    }

    fn check_averaged(&self) -> Result<()> {
        self.reducer().map_or(Ok(()), |reducer| reducer.check_averaged())
    }

    fn grads(&self, module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
        let mut grads = grads_of(module);
        if let Some(reducer) = self.reducer() {
            for unit in &reducer.units {
                grads.extend(unit.own_sums()?.into_iter().map(|(fqn, sums)| (fqn.to_owned(), sums)));
                let parts = unit.pending()?.into_iter();
                grads.extend(parts.map(|(fqn, had, grad)| (self.part_name(fqn, had), grad)));
            }
        }
        Ok(grads)
    }

    fn drop_grads(&mut self, module: &dyn Module) -> Result<()> {
        if let Some(mut reducer) = self.reducer() {
            reducer.units.iter_mut().try_for_each(Unit::drop_grads)?;
        }
        drop_grads_of(module)
    }

    fn set_grads(&mut self, module: &dyn Module, grads: &[(String, Tensor)]) -> Result<()> {
        let mut others = Vec::new();
        for (name, grad) in grads {
            let place = name.split_once(PART).and_then(|(fqn, _)| {
                let (unit, index) = self.reducer()?.place_of(fqn)?;
                let had = [true, false].into_iter().find(|had| self.part_name(fqn, *had) == *name)?;
                Some((unit, index, had))
            });
            if let Some(mut reducer) = self.reducer()
                && let Some((unit, index)) = reducer.place_of(name)
                && let Some(dtype) = reducer.sums_dtype(unit)
            {
                reducer.units[unit].restore_sums(index, dtype, grad)?;
                continue;
            }
            match (place, self.reducer()) {
                (Some((unit, index, had)), Some(mut reducer)) => {
                    reducer.units[unit].restore_pending(index, had, grad)?;
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
        self.peers().map_or(Ok(votes), |group| SentVotes::start(group, votes)?.receive())
    }

    fn finish(&mut self, module: &dyn Module) -> Result<()> {
        let Some(mut reducer) = self.reducer() else { return Ok(()) };
        reducer.check_order()?;
        let held = MemoryReport::of(module, &reducer.units, &self.config);
        let held = held.with(reducer.peaks, reducer.max_live, &reducer.units);
        let moved = moved_per_step(&reducer.moved);
        let swapped =
            reducer.files.stats().map(|stats| swapped_per_step(stats, &reducer.files, &reducer.moved));
        drop(reducer);
        let World { rank, world_size, .. } = &self.world;
        tracing::info!("{}: rank {rank} of {world_size} held at most {held}", self.name());
        if let Some(moved) = moved {
            tracing::info!("{}: rank {rank} of {world_size} moved {moved}", self.name());
        }
        if let Some(swapped) = swapped {
            tracing::info!("{}: rank {rank} of {world_size} had {swapped}", self.name());
        }
        if self.stays_sharded { self.park() } else { self.unshard_all(module) }
    }

    fn keeps(&self, module: &dyn Module) -> bool {
        self.reducer().is_some_and(|reducer| has_some(&reducer, module))
    }

    fn gather_weights(&mut self, module: &dyn Module) -> Result<()> {
        if !self.phase.is(Phase::Parked) || !self.keeps(module) {
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
        self.divided = DividedLeaves::default();
        if self.phase.is(Phase::Parked) && self.reducer.is_some() {
            return;
        }
        self.phase.set(Phase::Failed);
        let failed: Vec<_> =
            self.kept.drain(..).filter_map(|parameter| parameter.detach_gather().err()).collect();
        if let Some(error) = failed.first() {
            let number = failed.len();
            tracing::warn!(
                "{number} weights stay divided among the ranks, and the module is not whole: load the last checkpoint into a new one ({error})"
            );
        }
        self.reducer = None;
    }
}

impl Drop for Zero {
    /// Marks weights that are left sharded: they cannot be gathered any more.
    fn drop(&mut self) {
        if !self.phase.is(Phase::Parked) {
            return;
        }
        self.phase.set(Phase::Gone);
        let whole = self.kept.drain(..).filter(|parameter| !parameter.is_away());
        whole.for_each(|parameter| drop(parameter.detach_gather()));
        self.reducer().into_iter().for_each(|mut reducer| reducer.clear());
    }
}

impl ShardedState for Zero {
    fn save_weights(&self) -> Result<Vec<Part>> {
        let Some(reducer) = self.with_changes()? else { return Ok(Vec::new()) };
        reducer.check_whole()?;
        shards::weights(&reducer)
    }

    fn weight_shard(&self, fqn: &str) -> Option<ShardSpec> {
        shards::weight_shard(&*self.reducer()?, fqn)
    }

    fn load_weight(&self, fqn: &str, values: &Tensor) -> Result<()> {
        self.reducer().map_or(Ok(()), |mut reducer| shards::load_weight(&mut reducer, fqn, values))
    }

    fn state_shard(&self, fqn: &str) -> Option<ShardSpec> {
        shards::shard(&*self.reducer()?, fqn)
    }

    fn save_optimizer(&self, index: usize, optimizer: &dyn Optimizer) -> Result<(OptimizerState, Vec<Part>)> {
        let reducer = self.with_changes()?;
        reducer.as_ref().map_or(Ok(()), |reducer| reducer.check_whole())?;
        let state = optimizer.state_dict();
        match reducer {
            Some(reducer) => shards::save_optimizer(&reducer, index, state),
            None => Ok((state, Vec::new())),
        }
    }

    fn load_optimizer(
        &self,
        optimizer: &mut dyn Optimizer,
        state: OptimizerState,
        parts: Vec<Part>,
    ) -> Result<()> {
        optimizer.reload_states(&OffloadState::ALL)?;
        let state = match self.reducer() {
            Some(mut reducer) => shards::load_optimizer(&mut reducer, state, parts)?,
            None => state,
        };
        optimizer.take_state_dict(state)
    }

    fn save_grads(&self, module: &dyn Module) -> Result<ShardedGrads> {
        let mut own = grads_of(module);
        let Some(reducer) = self.reducer() else { return Ok(ShardedGrads { own, ..Default::default() }) };
        for unit in &reducer.units {
            own.extend(unit.own_sums()?.into_iter().map(|(fqn, sums)| (fqn.to_owned(), sums)));
        }
        let (parts, had_grad) = shards::grads(&reducer)?;
        Ok(ShardedGrads { own, parts, had_grad })
    }

    fn grad_shard(&self, fqn: &str) -> Option<ShardSpec> {
        let reducer = self.reducer()?;
        shards::shard(&reducer, fqn)
    }

    fn load_grad(&self, fqn: &str, values: &Tensor) -> Result<()> {
        self.reducer().map_or(Ok(()), |mut reducer| shards::load_grad(&mut reducer, fqn, values))
    }
}
