//! Data-parallel training: each rank computes the gradients of its own batches, and all apply their mean.

mod bucket;
mod reducer;

use std::sync::{Arc, Mutex, PoisonError};

use tch::{Kind, Tensor};

use super::config::DdpConfig;
use super::strategy::Strategy;
use super::votes::Votes;
use crate::distributed::{ProcessGroup, ReduceOp, World, collective_scope};
use crate::error::{DistributedError, Result};
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
        same_modules(&group, module)?;
        let values = module.parameters().into_iter().map(|parameter| parameter.detach());
        broadcast(
            &group,
            values.chain(module.named_buffers().into_iter().map(|(_, buffer)| buffer.detach())),
        )?;
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
            Some(group) if self.config.broadcast_buffers => {
                let _named = collective_scope("buffers");
                broadcast(group, module.named_buffers().into_iter().map(|(_, buffer)| buffer.detach()))
            }
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
        let sums = Tensor::f_from_slice(&votes.numbers())?;
        group.all_reduce(&sums, ReduceOp::Sum)?;
        let mut numbers = [0_f32; 3];
        sums.f_copy_data(&mut numbers, 3)?;
        Ok(Votes::from_numbers(numbers))
    }

    fn teardown(&mut self) {
        self.hooks.clear();
        self.reducer = None;
    }
}

/// All tensors become rank 0's, those of one dtype in one message.
fn broadcast(group: &ProcessGroup, tensors: impl Iterator<Item = Tensor>) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let mut by_kind: Vec<(Kind, Vec<Tensor>)> = Vec::new();
    for tensor in tensors {
        match by_kind.iter_mut().find(|(kind, _)| *kind == tensor.kind()) {
            Some((_, members)) => members.push(tensor),
            None => by_kind.push((tensor.kind(), vec![tensor])),
        }
    }
    for (_, members) in by_kind {
        let flat: Vec<Tensor> =
            members.iter().map(|tensor| tensor.f_reshape([-1_i64])).collect::<Result<_, _>>()?;
        let flat = Tensor::f_cat(&flat, 0)?;
        group.broadcast(&flat, 0)?;
        if group.rank() == 0 {
            continue;
        }
        let mut start = 0;
        for tensor in members {
            let len = tensor.numel() as i64;
            let values = flat.f_narrow(0, start, len)?.f_view(tensor.size().as_slice())?;
            tensor.shallow_clone().f_copy_(&values)?;
            start += len;
        }
    }
    Ok(())
}

/// An error on each rank whose module differs from rank 0's.
fn same_modules(group: &ProcessGroup, module: &dyn Module) -> Result<()> {
    let parameters = module.named_parameters().into_iter().map(|(fqn, p)| {
        let is_trained = if p.requires_grad() { "trained" } else { "frozen" };
        format!("{fqn} of shape {:?}, {:?}, {is_trained}", p.size(), p.kind())
    });
    let buffers = module
        .named_buffers()
        .into_iter()
        .map(|(fqn, b)| format!("{fqn} of shape {:?}, {:?}", b.size(), b.kind()));
    let own: Vec<String> = parameters.chain(buffers).collect();
    let first = group.broadcast_object(&own, 0)?;
    if own == first {
        return Ok(());
    }
    let at = own.iter().zip(&first).take_while(|(own, first)| own == first).count();
    let word = |list: &[String]| list.get(at).cloned().unwrap_or_else(|| "nothing more".to_owned());
    let what = format!("{} where rank 0 has {}", word(&own), word(&first));
    Err(DistributedError::Mismatch { rank: group.rank(), what }.into())
}
