//! Unshards the weights of a unit when one is accessed, and around the calls of modules.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::unit_set::UnitSet;
use crate::error::{ConfigError, Error, Result};
use crate::ffi;
use crate::nn::{CallWatcher, ModuleCall, ModuleHooks, Parameter, RemovableHandle, Sharding, is_recomputing};

/// The state of the trainer's call for which weights are sharded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// All ranks take part.
    #[default]
    Running,
    /// It has failed: the other ranks take part in no collectives any more.
    Failed,
    /// It is over, and the weights stay sharded until the next call.
    LeftSharded,
    /// The strategy that could unshard the weights is gone.
    Gone,
}

/// A shared [`Phase`].
#[derive(Debug, Default)]
pub(super) struct Phases(Mutex<Phase>);

impl Phases {
    /// Whether it is this one.
    pub fn is(&self, phase: Phase) -> bool {
        self.get() == phase
    }

    /// Begins another one.
    pub fn set(&self, phase: Phase) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    fn get(&self) -> Phase {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unshards weights when they are accessed, and notes edits of weights that have master weights.
#[derive(Debug)]
pub(super) struct UnshardOnAccess {
    pub set: Arc<Mutex<UnitSet>>,
    pub phase: Arc<Phases>,
}

impl UnshardOnAccess {
    /// An error if a sharded weight cannot be unsharded, since the other ranks do not take part.
    fn check(&self, parameter: &Parameter) -> Result<()> {
        if !parameter.is_sharded() {
            return Ok(());
        }
        let (why, remedy) = match self.phase.get() {
            Phase::Running => return Ok(()),
            Phase::Failed => (
                "and the fit that could unshard it has failed",
                "make the module again, and load the last checkpoint",
            ),
            Phase::LeftSharded => (
                "and no call of the trainer runs that could unshard it",
                "write it with trainer.save_weights, or unshard the module with trainer.gather_weights, on all ranks",
            ),
            Phase::Gone => (
                "and the trainer that could unshard it is gone",
                "keep the trainer until trainer.save_weights or trainer.gather_weights was called",
            ),
        };
        let name = parameter.fqn().unwrap_or_else(|| Arc::from("a parameter"));
        let what = format!("{name} is sharded over the ranks, {why}");
        Err(ConfigError::new("trainer.strategy", what, remedy).into())
    }
}

fn lock(set: &Mutex<UnitSet>) -> MutexGuard<'_, UnitSet> {
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sharding for UnshardOnAccess {
    fn unshard(&self, parameter: &Parameter) -> Result<()> {
        self.check(parameter)?;
        let mut set = lock(&self.set);
        let Some((unit, _)) = set.place_of_id(parameter.id()) else { return Ok(()) };
        set.unshard(unit)?;
        set.units[unit].keep_until_step_end(); // the end of its use is not known
        Ok(())
    }

    fn keep_unsharded(&self, parameter: &Parameter) -> Result<()> {
        let mut set = lock(&self.set);
        if let Some((unit, _)) = set.place_of_id(parameter.id()) {
            set.units[unit].keep_unsharded();
        }
        Ok(())
    }

    fn unshard_for_use(&self, parameter: &Parameter) -> Result<()> {
        self.check(parameter)?;
        let mut set = lock(&self.set);
        let Some((unit, _)) = set.place_of_id(parameter.id()) else { return Ok(()) };
        set.unshard_for_use(unit)?;
        if ffi::grad_is_enabled() {
            set.units[unit].keep_until_step_end(); // backward may need it
        }
        Ok(())
    }

    fn reshard(&self, parameter: &Parameter, is_changed: bool) -> Result<()> {
        let mut set = lock(&self.set);
        let Some((unit, index)) = set.place_of_id(parameter.id()) else { return Ok(()) };
        if is_changed {
            set.units[unit].write_back(index)?;
        }
        set.reshard_after_use(unit)
    }
}

/// Unshards the weights of a module before its call, and reshards them after it.
struct Watcher {
    set: Arc<Mutex<UnitSet>>,
    /// By the module's fqn.
    units: Arc<HashMap<String, Vec<usize>>>,
    /// Those of the calls in progress.
    open: Vec<Vec<usize>>,
}

impl CallWatcher for Watcher {
    fn before_forward(&mut self, call: &ModuleCall<'_>, _inputs: &[Tensor]) -> anyhow::Result<()> {
        self.open.push(Vec::new());
        for unit in self.units.get(call.fqn()).into_iter().flatten() {
            let mut set = lock(&self.set);
            set.unshard_for_use(*unit)?;
            set.units[*unit].open_calls += usize::from(ffi::grad_is_enabled() && !is_recomputing());
            drop(set);
            self.open.last_mut().into_iter().for_each(|open| open.push(*unit));
        }
        Ok(())
    }

    fn end(&mut self) {
        for unit in self.open.pop().into_iter().flatten() {
            let mut set = lock(&self.set);
            if is_recomputing() {
                set.keep_for_backward(unit);
            }
            if let Err(error) = set.reshard_after_use(unit) {
                tracing::warn!("the memory of weights could not be freed: {error}");
            }
        }
    }
}

/// Unshards and reshards units around the calls of their modules, given by fqn.
pub(super) fn watch(
    hooks: &ModuleHooks,
    set: &Arc<Mutex<UnitSet>>,
    units: HashMap<String, Vec<usize>>,
) -> Vec<RemovableHandle> {
    let units = Arc::new(units);
    let watcher = Watcher { set: set.clone(), units: units.clone(), open: Vec::new() };
    let mut handles = vec![hooks.watch("*", watcher)];
    let is_leaf = |unit: &usize| lock(set).units[*unit].is_leaf;
    let leaves = units.iter().filter(|(_, units)| units.iter().any(is_leaf));
    let leaves: Vec<(String, Vec<usize>)> = leaves.map(|(fqn, units)| (fqn.clone(), units.clone())).collect();
    for (fqn, units) in leaves {
        let set = set.clone();
        let end = move |_: &ModuleCall<'_>, inputs: &mut [Option<Tensor>], _: &[Option<Tensor>]| {
            if inputs.iter().all(Option::is_none) {
                return Ok(()); // the gradients of its parameters are still to come
            }
            let mut set = lock(&set);
            for unit in &units {
                set.end_of_leaf(*unit).map_err(|error| set.fail(error, "gradients could not be averaged"))?;
            }
            Ok(())
        };
        handles.push(hooks.register_full_backward_hook(fqn.as_str(), end));
    }
    for fqn in units.keys() {
        let (set, units) = (set.clone(), units.clone());
        let unshard = move |call: &ModuleCall<'_>, _: &mut [Option<Tensor>]| {
            let mut set = lock(&set);
            for unit in units.get(call.fqn()).into_iter().flatten() {
                set.unshard_in_backward(*unit)
                    .map_err(|error| set.fail(error, "weights could not be unsharded"))?;
            }
            Ok(())
        };
        handles.push(hooks.register_backward_pre_hook_if_called(fqn.as_str(), unshard));
    }
    handles
}

/// Explains libtorch's error for a backward pass that uses sharded weights, whose version counter has changed.
pub(super) fn explained(error: Error) -> Error {
    if !error.to_string().contains("modified by an inplace operation") {
        return error;
    }
    let what = format!(
        "backward needs a weight that is not in memory: what was computed with it reaches the loss, but not by the outputs of its \
         module, or it was computed before the last optimizer step ({error})"
    );
    let remedy = "return from a module what the loss is computed from, or let the weight stay unsharded (param_persistence_threshold)";
    ConfigError::new("trainer.strategy", what, remedy).into()
}
