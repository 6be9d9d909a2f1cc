//! Training with states divided among ranks: ZeRO (arXiv:1910.02054).

pub(super) mod config;
mod flat;
mod keeper;
mod optimizer;
mod reducer;
mod unit;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::peers::{agree, broadcast_buffers, start_equal};
use super::strategy::{PART, Strategy, grads_of, set_grads_of};
use super::votes::Votes;
use crate::distributed::{ProcessGroup, World};
use crate::error::{ConfigError, Result};
use crate::ffi::GradHook;
use crate::nn::{Module, ModuleHooks, Parameter};
use crate::optim::{ConfiguredOptimizer, Optimizer, OptimizerState, Optimizers};
use config::ZeroConfig;
use flat::{Layout, assign};
use keeper::Keeper;
use optimizer::{ZeroOptimizer, part_of_state, whole_state};
use reducer::Reducer;
use unit::Unit;

/// Data-parallel training in which each rank keeps a part of the optimizer states, from stage 2 on of the gradients too.
///
/// Which parameters are trained is read when a fit starts; freezing or unfreezing some later is not seen.
#[derive(Debug)]
pub struct Zero {
    world: World,
    config: ZeroConfig,
    reducer: Option<Arc<Mutex<Reducer>>>,
    hooks: Vec<GradHook>,
    /// Parameters with master weights, whose changes must be known.
    kept: Vec<Parameter>,
}

impl Zero {
    /// Of these ranks, or of a process alone.
    pub fn new(world: World, config: ZeroConfig) -> Self {
        Self { world, config, reducer: None, hooks: Vec::new(), kept: Vec::new() }
    }

    /// The group, if there is anybody to talk to.
    fn peers(&self) -> Option<&Arc<ProcessGroup>> {
        self.world.group().filter(|group| group.world_size() > 1)
    }

    fn reducer(&self) -> Option<MutexGuard<'_, Reducer>> {
        let reducer = self.reducer.as_ref()?;
        Some(reducer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Units for the parameters that the optimizers change, by optimizer.
    fn units(&self, trained: &[Vec<(String, Parameter)>]) -> Result<Vec<Unit>> {
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
        let (rank, ranks) = (self.world.rank, self.world.world_size);
        let unit = |members: Vec<usize>| {
            let optimizer = params[members[0]].0;
            let members = members.iter().map(|&at| (params[at].1.to_owned(), params[at].2.clone()));
            Unit::new(Layout::of(members.collect(), ranks), optimizer, rank)
        };
        assign(&keys, self.config.reduce_bucket_size).into_iter().map(unit).collect()
    }

    fn hook_gradients(&mut self, reducer: &Arc<Mutex<Reducer>>) -> Result<()> {
        let leaves: Vec<(usize, usize, Tensor)> = {
            let reducer = reducer.lock().unwrap_or_else(PoisonError::into_inner);
            let of = |(number, unit): (usize, &Unit)| {
                let leaves = unit.leaves().map(Tensor::shallow_clone).enumerate();
                leaves.map(|(index, leaf)| (number, index, leaf)).collect::<Vec<_>>()
            };
            reducer.units.iter().enumerate().flat_map(of).collect()
        };
        for (unit, index, leaf) in leaves {
            let shared = reducer.clone();
            self.hooks.push(GradHook::register(&leaf, move || {
                let mut reducer = shared.lock().unwrap_or_else(PoisonError::into_inner);
                reducer.ready(unit, index).map_err(|error| {
                    reducer.is_active = false;
                    reducer.failure = Some(error);
                    anyhow::anyhow!("gradients could not be averaged")
                })
            })?);
        }
        Ok(())
    }

    /// The name of this rank's part of a gradient, and whether one came on this rank.
    fn part_name(&self, fqn: &str, had_grad: bool) -> String {
        let (rank, ranks) = (self.world.rank, self.world.world_size);
        let note = if had_grad { "" } else { ", of others" };
        format!("{fqn}{PART} {rank} of {ranks}{note})")
    }
}

impl Strategy for Zero {
    fn name(&self) -> &'static str {
        self.config.stage.name()
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn prepare(&mut self, module: &dyn Module, _calls: &ModuleHooks) -> Result<()> {
        self.teardown();
        self.peers().map_or(Ok(()), |group| start_equal(group, module))
    }

    fn optimizers(&mut self, asked: Optimizers, module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        if let Some(name) = asked.not_elementwise().next()
            && !self.config.allow_untested_optimizer
        {
            let (strategy, what) = (self.name(), "is not known to update each element by itself");
            let what = format!("{name} with {strategy}: it {what}, and ranks have parts of parameters");
            let remedy = "use AdamW, Adam or SGD, or the strategy ddp";
            return Err(ConfigError::new("configure_optimizers", what, remedy).into());
        }
        let units = self.units(&asked.parameters(module))?;
        let slices: Vec<(u64, Parameter)> = units
            .iter()
            .flat_map(|unit| unit.layout.places.iter().zip(&unit.slices))
            .map(|(place, slice)| (place.parameter.id(), slice.clone()))
            .collect();
        let in_place_of = |parameter: &Parameter| {
            let slice = slices.iter().find(|(id, _)| *id == parameter.id());
            slice.map_or_else(|| parameter.clone(), |(_, slice)| slice.clone()) // frozen ones stay whole
        };
        let built = asked.build_over(module, &in_place_of)?;
        let masters = units.iter().filter(|unit| unit.has_master).flat_map(|unit| &unit.layout.places);
        let masters: Vec<Parameter> = masters.map(|place| place.parameter.clone()).collect();
        let reducer = Reducer::new(self.config.clone(), self.peers().cloned(), units);
        let reducer = Arc::new(Mutex::new(reducer));
        self.hook_gradients(&reducer)?;
        self.reducer = Some(reducer.clone());
        self.kept = masters;
        self.kept.iter().try_for_each(|parameter| parameter.attach(Arc::new(Keeper(reducer.clone()))))?;
        let wrap = |(index, built): (usize, ConfiguredOptimizer)| {
            let inner = built.optimizer;
            let optimizer = Box::new(ZeroOptimizer { inner, index, reducer: reducer.clone() });
            ConfiguredOptimizer { optimizer, ..built }
        };
        Ok(built.into_iter().enumerate().map(wrap).collect())
    }

    fn divides_state(&self) -> bool {
        self.peers().is_some()
    }

    fn begin_forward(&mut self, module: &dyn Module) -> Result<()> {
        match self.peers() {
            Some(group) if self.config.broadcast_buffers => broadcast_buffers(group, module),
            _ => Ok(()),
        }
    }

    fn begin_backward(&mut self, _loss: &Tensor, syncs: bool, votes: Votes) -> Result<()> {
        if let Some(mut reducer) = self.reducer() {
            reducer.begin(syncs, votes);
        }
        Ok(())
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        let Some(mut reducer) = self.reducer() else { return done.map(|()| Votes::default()) };
        reducer.is_in_backward = false;
        let was_active = std::mem::take(&mut reducer.is_active);
        match done {
            Err(error) => {
                reducer.abandon();
                Err(reducer.failure.take().unwrap_or(error))
            }
            Ok(()) if was_active => reducer.finish(),
            Ok(()) => Ok(Votes::default()),
        }
    }

    fn check_averaged(&self) -> Result<()> {
        self.reducer().map_or(Ok(()), |reducer| reducer.check_averaged())
    }

    fn grads(&self, module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
        let mut grads = grads_of(module);
        if let Some(reducer) = self.reducer() {
            for unit in &reducer.units {
                let parts = unit.pending()?.into_iter();
                grads.extend(parts.map(|(fqn, had, grad)| (self.part_name(fqn, had), grad)));
            }
        }
        Ok(grads)
    }

    fn set_grads(&mut self, module: &dyn Module, grads: &[(String, Tensor)]) -> Result<()> {
        let mut others = Vec::new();
        for (name, grad) in grads {
            let place = name.split_once(PART).and_then(|(fqn, _)| {
                let (unit, index) = self.reducer()?.place_of(fqn)?;
                let had = [true, false].into_iter().find(|had| self.part_name(fqn, *had) == *name)?;
                Some((unit, index, had))
            });
            match (place, self.reducer()) {
                (Some((unit, index, had)), Some(mut reducer)) => {
                    reducer.units[unit].restore_pending(index, had, grad)?;
                }
                _ => others.push((name.clone(), grad.shallow_clone())),
            }
        }
        set_grads_of(module, &others)
    }

    fn save_optimizer(&self, index: usize, optimizer: &dyn Optimizer) -> Result<OptimizerState> {
        let state = optimizer.state_dict();
        match self.reducer() {
            Some(reducer) => whole_state(&reducer, index, &state),
            None => Ok(state),
        }
    }

    fn load_optimizer(
        &self,
        _index: usize,
        optimizer: &mut dyn Optimizer,
        state: OptimizerState,
    ) -> Result<()> {
        let state = match self.reducer() {
            Some(reducer) => part_of_state(&reducer, state)?,
            None => state,
        };
        optimizer.load_state_dict(state)
    }

    fn agree(&self, votes: Votes) -> Result<Votes> {
        self.peers().map_or(Ok(votes), |group| agree(group, votes))
    }

    fn teardown(&mut self) {
        self.hooks.clear();
        for parameter in self.kept.drain(..) {
            if let Err(error) = parameter.detach_keeper() {
                tracing::warn!("a weight could not be given back: {error}");
            }
        }
        self.reducer = None;
    }
}
