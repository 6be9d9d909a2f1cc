//! Data-parallel training: each rank computes the gradients of its own batches, and all apply their mean.
//!
//! [`Ddp`] is the strategy. `bucket` assigns gradients to buckets, and `reducer` averages a bucket as soon as backward has computed
//! its gradients.

mod bucket;
mod reducer;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::Tensor;

use super::config::DdpConfig;
use super::peers::{SentVotes, broadcast_buffers, start_equal};
use super::strategy::{Strategy, set_grads_of};
use super::votes::Votes;
use crate::distributed::{ProcessGroup, World};
use crate::error::Result;
use crate::ffi::GradHook;
use crate::nn::{Module, ModuleExt, ModuleHooks, Parameter};
use reducer::Reducer;

/// Data-parallel training over the ranks of a [`World`], as PyTorch's `DistributedDataParallel`.
///
/// Parameters may be unfrozen during a fit, the same on all ranks; one that is frozen is then without a part in the loss.
#[derive(Debug)]
pub struct Ddp {
    name: &'static str,
    world: World,
    config: DdpConfig,
    reducer: Option<Arc<Mutex<Reducer>>>,
    /// Without a reducer: what this rank brings to the backward pass in progress, if that completes a window.
    votes: Option<Votes>,
    hooks: Vec<GradHook>,
    /// All parameters of the module, by fqn, and which have been trained since the fit began.
    parameters: Vec<(String, Parameter, bool)>,
}

impl std::fmt::Debug for GradHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GradHook")
    }
}

impl Ddp {
    /// `name` is what chose it: `ddp`, `hpu_ddp` or `hpu_parallel`.
    pub fn new(name: &'static str, world: World, config: DdpConfig) -> Self {
        Self { name, world, config, reducer: None, votes: None, hooks: Vec::new(), parameters: Vec::new() }
    }

    /// The ranks with other batches, if there are some.
    fn peers(&self) -> Option<&Arc<ProcessGroup>> {
        self.world.mesh().dp.group()
    }

    /// Averages the gradients of all parameters that are trained now, or have been.
    fn follow_trained(&mut self, group: &Arc<ProcessGroup>) -> Result<()> {
        self.hooks.clear();
        let all = self.parameters.iter_mut();
        all.for_each(|(_, parameter, is_trained)| *is_trained |= parameter.requires_grad());
        let trainable = self.parameters.iter().filter(|(.., is_trained)| *is_trained);
        let trainable: Vec<_> =
            trainable.map(|(fqn, parameter, _)| (fqn.clone(), parameter.leaf().shallow_clone())).collect();
        let all = self.world.group().unwrap_or(group);
        let mut reducer = Reducer::new((group.clone(), all.clone()), self.config.clone(), trainable)?;
        let before = self.reducer.take();
        if let Some(before) = &before {
            let before = before.lock().unwrap_or_else(PoisonError::into_inner);
            reducer.note_used(&before.used());
        }
        let params: Vec<Tensor> = reducer.params().iter().map(Tensor::shallow_clone).collect();
        let reducer = Arc::new(Mutex::new(reducer));
        for (index, param) in params.iter().enumerate() {
            let shared = reducer.clone();
            let is_trained = param.requires_grad();
            let _ = param.set_requires_grad(true); // as leaves with hooks must be
            let hook = GradHook::register(param, move || {
                let mut reducer = shared.lock().unwrap_or_else(PoisonError::into_inner);
                reducer.ready(index).map_err(|error| {
                    reducer.is_active = false;
                    reducer.failure = Some(error);
                    anyhow::anyhow!("gradients could not be averaged")
                })
            });
            let _ = param.set_requires_grad(is_trained);
            self.hooks.push(hook?);
        }
        self.reducer = Some(reducer);
        Ok(())
    }
}

impl Strategy for Ddp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn excludes_frozen_parameters(&self) -> bool {
        self.config.exclude_frozen_parameters
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn timeout(&self) -> Option<Duration> {
        Some(self.config.timeout())
    }

    fn allowed_differences(&self) -> Vec<String> {
        self.config.allow_differences.clone()
    }

    fn prepare(&mut self, module: &dyn Module, _calls: &ModuleHooks) -> Result<()> {
        self.teardown();
        let Some(group) = self.peers().cloned() else { return Ok(()) };
        start_equal(&group, module)?;
        let all = module.named_parameters().into_iter();
        self.parameters = all.map(|(fqn, parameter)| (fqn, parameter, false)).collect();
        self.follow_trained(&group)
    }

    fn begin_forward(&mut self, module: &dyn Module, opens: bool) -> Result<()> {
        match self.peers() {
            Some(group) if opens && self.config.broadcast_buffers => broadcast_buffers(group, module),
            _ => Ok(()),
        }
    }

    fn begin_backward(&mut self, loss: &Tensor, syncs: bool, votes: Votes) -> Result<()> {
        let is_unfrozen =
            |(_, parameter, is_trained): &(String, Parameter, bool)| !is_trained && parameter.requires_grad();
        if self.parameters.iter().any(is_unfrozen)
            && let Some(group) = self.peers().cloned()
        {
            self.follow_trained(&group)?;
        }
        let Some(reducer) = &self.reducer else {
            self.votes = syncs.then_some(votes);
            return Ok(());
        };
        let mut reducer = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        reducer.is_in_backward = true;
        if syncs { reducer.begin(loss, votes) } else { Ok(()) }
    }

    fn without_loss(&mut self, syncs: bool, votes: Votes) -> Result<Votes> {
        match &self.reducer {
            _ if !syncs => Ok(Votes::default()),
            Some(reducer) => reducer.lock().unwrap_or_else(PoisonError::into_inner).without_loss(votes),
            None => self.agree(Votes { without_loss: 1, ..votes }),
        }
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        let Some(reducer) = &self.reducer else {
            done?;
            return self.votes.take().map_or_else(|| Ok(Votes::default()), |votes| self.agree(votes));
        };
        let mut reducer = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        reducer.is_in_backward = false;
        let was_active = std::mem::take(&mut reducer.is_active);
        match done {
            Err(error) => {
                Err(reducer.failure.take().unwrap_or_else(|| GradHook::failure_or(&self.hooks, error)))
            }
            Ok(()) if was_active => reducer.finish(),
            Ok(()) => Ok(Votes::default()),
        }
    }

    fn check_averaged(&self) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        reducer.lock().unwrap_or_else(PoisonError::into_inner).check_averaged()
    }

    fn set_grads(&mut self, module: &dyn Module, grads: &[(String, Tensor)]) -> Result<()> {
        if let Some(reducer) = &self.reducer {
            let names: Vec<&str> = grads.iter().map(|(name, _)| name.as_str()).collect();
            reducer.lock().unwrap_or_else(PoisonError::into_inner).note_used(&names);
        }
        set_grads_of(module, grads)
    }

    fn agree(&self, votes: Votes) -> Result<Votes> {
        self.world.peers().map_or(Ok(votes), |group| SentVotes::start(group, votes)?.receive())
    }

    fn teardown(&mut self) {
        self.hooks.clear();
        self.parameters.clear();
        self.reducer = None;
    }
}
