//! Modules of a step that the trainer makes graphs of.

use std::any::TypeId;
use std::cell::RefCell;

use tch::Tensor;

use super::cache::{CacheOptions, CacheStats, GraphCache};
use crate::nn::ModuleExt;
use crate::nn::{Callable, TensorTuple, call_as, call_with};

/// Sorts of calls that get a graph, for each module.
const MAX_GRAPHS: usize = 10;

/// The graphs of the modules that steps have called so far, by where the modules lie.
#[derive(Debug, Default)]
pub(crate) struct ModuleGraphs {
    caches: Vec<((usize, TypeId), GraphCache)>,
}

impl ModuleGraphs {
    /// The call of a module, captured and replayed.
    pub(crate) fn call<A: TensorTuple, M: Callable<A>>(
        &mut self,
        module: &M,
        args: &A,
        is_training: bool,
    ) -> anyhow::Result<M::Output> {
        let graphs = RefCell::new(self);
        call_as(module, args, |args| graphs.borrow_mut().replay(module, args, is_training))
    }

    fn replay<A: TensorTuple, M: Callable<A>>(
        &mut self,
        module: &M,
        args: &A,
        is_training: bool,
    ) -> anyhow::Result<M::Output> {
        let id = (std::ptr::from_ref(module).addr(), TypeId::of::<M>());
        let index = self.caches.iter().position(|(known, _)| *known == id).unwrap_or_else(|| {
            let options = CacheOptions {
                max_graphs: Some(MAX_GRAPHS),
                captures_grad: true,
                disable_tensor_cache: true,
                ..CacheOptions::default()
            };
            self.caches.push((id, GraphCache::new(module.type_name(), options)));
            self.caches.len() - 1
        });
        let call = |inputs: &[Tensor]| call_with(module, inputs);
        let cache = &mut self.caches[index].1;
        let outputs = cache.run(module.as_dyn(), is_training, &args.tensors(), &call)?;
        Ok(M::Output::from_tensors(outputs)?)
    }

    /// Whether no step has called a module.
    pub(crate) fn is_empty(&self) -> bool {
        self.caches.is_empty()
    }

    /// What the calls of each module found.
    pub(crate) fn stats(&self) -> Vec<(&'static str, CacheStats)> {
        self.caches.iter().map(|(_, cache)| (cache.module(), cache.stats())).collect()
    }
}
