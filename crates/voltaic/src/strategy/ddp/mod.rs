//! Data-parallel training: each rank computes the gradients of its own batches, and all apply their mean.

mod bucket;
mod reducer;

use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;

use super::config::DdpConfig;
use super::peers::{agree, broadcast_buffers, start_equal};
use super::strategy::Strategy;
use super::votes::Votes;
use crate::distributed::{ProcessGroup, World};
use crate::error::Result;
use crate::ffi::GradHook;
use crate::nn::{Module, ModuleExt, ModuleHooks};
use reducer::Reducer;

/// Data-parallel training over the ranks of a [`World`], as PyTorch's `DistributedDataParallel`.
///
/// Which parameters are trained is read when a fit starts; freezing or unfreezing some later is not seen.
#[derive(Debug)]
pub struct Ddp {
    name: &'static str,
    world: World,
    config: DdpConfig,
    reducer: Option<Arc<Mutex<Reducer>>>,
    hooks: Vec<GradHook>,
}

impl std::fmt::Debug for GradHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GradHook")
    }
}

impl Ddp {
    /// `name` is what chose it: `ddp`, `hpu_ddp` or `hpu_parallel`.
    pub fn new(name: &'static str, world: World, config: DdpConfig) -> Self {
        Self { name, world, config, reducer: None, hooks: Vec::new() }
    }

    /// The group, if there is anybody to talk to.
    fn peers(&self) -> Option<&Arc<ProcessGroup>> {
        self.world.group().filter(|group| group.world_size() > 1)
    }
}

impl Strategy for Ddp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn allowed_differences(&self) -> Vec<String> {
        self.config.allow_differences.clone()
    }

    fn prepare(&mut self, module: &dyn Module, _calls: &ModuleHooks) -> Result<()> {
        self.teardown();
        let Some(group) = self.peers().cloned() else { return Ok(()) };
        start_equal(&group, module)?;
        let trainable =
            module.named_parameters().into_iter().filter(|(_, parameter)| parameter.requires_grad());
        let trainable: Vec<_> =
            trainable.map(|(fqn, parameter)| (fqn, parameter.leaf().shallow_clone())).collect();
        let reducer = Reducer::new(group, self.config.clone(), trainable)?;
        let params: Vec<Tensor> = reducer.params().iter().map(Tensor::shallow_clone).collect();
        let reducer = Arc::new(Mutex::new(reducer));
        for (index, param) in params.iter().enumerate() {
            let shared = reducer.clone();
            self.hooks.push(GradHook::register(param, move || {
                let mut reducer = shared.lock().unwrap_or_else(PoisonError::into_inner);
                reducer.ready(index).map_err(|error| {
                    reducer.is_active = false;
                    reducer.failure = Some(error);
                    anyhow::anyhow!("gradients could not be averaged")
                })
            })?);
        }
        self.reducer = Some(reducer);
        Ok(())
    }

    fn begin_forward(&mut self, module: &dyn Module) -> Result<()> {
        match self.peers() {
            Some(group) if self.config.broadcast_buffers => broadcast_buffers(group, module),
            _ => Ok(()),
        }
    }

    fn begin_backward(&mut self, loss: &Tensor, syncs: bool, votes: Votes) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        let mut reducer = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        reducer.is_in_backward = true;
        if syncs { reducer.begin(loss, votes) } else { Ok(()) }
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        let Some(reducer) = &self.reducer else { return done.map(|()| Votes::default()) };
        let mut reducer = reducer.lock().unwrap_or_else(PoisonError::into_inner);
        reducer.is_in_backward = false;
        let was_active = std::mem::take(&mut reducer.is_active);
        match done {
            Err(error) => Err(reducer.failure.take().unwrap_or(error)),
            Ok(()) if was_active => reducer.finish(),
            Ok(()) => Ok(Votes::default()),
        }
    }

    fn check_averaged(&self) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        reducer.lock().unwrap_or_else(PoisonError::into_inner).check_averaged()
    }

    fn agree(&self, votes: Votes) -> Result<Votes> {
        let Some(group) = self.peers() else { return Ok(votes) };
        agree(group, votes)
    }

    fn teardown(&mut self) {
        self.hooks.clear();
        self.reducer = None;
    }
}
