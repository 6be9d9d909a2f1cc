//! Modules of a step that the trainer makes graphs of.

use std::cell::RefCell;

use tch::Tensor;

use super::cache::{CacheOptions, CacheStats, GraphCache};
use super::known::Known;
use super::options::CompileConfig;
use crate::nn::{Callable, Module, ModuleExt, TensorTuple, call_as, call_with, identity};

/// Kinds of calls that get a graph, for each module.
const MAX_GRAPHS: usize = 10;

/// The graphs of the modules that steps have called so far.
#[derive(Debug, Default)]
pub(crate) struct ModuleGraphs {
    caches: Vec<(Known, GraphCache)>,
    /// Calls are compiled.
    compile: Option<CompileConfig>,
}

impl ModuleGraphs {
    pub(crate) fn compiled(config: CompileConfig) -> Self {
        Self { compile: Some(config), ..Self::default() }
    }

    /// The call of a module that lies within `root`, captured and replayed.
    pub(crate) fn call<A: TensorTuple, M: Callable<A>>(
        &mut self,
        root: &dyn Module,
        module: &M,
        args: &A,
        is_training: bool,
    ) -> anyhow::Result<M::Output> {
        let graphs = RefCell::new(self);
        call_as(module, args, |args| graphs.borrow_mut().replay(root, module, args, is_training))
    }

    fn replay<A: TensorTuple, M: Callable<A>>(
        &mut self,
        root: &dyn Module,
        module: &M,
        args: &A,
        is_training: bool,
    ) -> anyhow::Result<M::Output> {
        let called = module.as_dyn();
        let index = self.caches.iter().position(|(known, _)| known.is(called)).unwrap_or_else(|| {
            let plain = CacheOptions {
                max_graphs: Some(MAX_GRAPHS),
                captures_grad: true,
                disable_tensor_cache: true,
                ..CacheOptions::default()
            };
            let options = self.compile.map_or(plain, CacheOptions::compiled);
            self.caches.push((Known::of(called), GraphCache::new(name_of(called, root), options)));
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
    pub(crate) fn stats(&self) -> Vec<(String, CacheStats)> {
        self.caches.iter().map(|(_, cache)| (cache.module().to_owned(), cache.stats())).collect()
    }
}

/// A module's fqn and type; its type alone if it does not lie within `root`.
fn name_of(module: &dyn Module, root: &dyn Module) -> String {
    let type_name = module.type_name();
    let found = root.named_modules().into_iter().find(|(_, other)| identity(*other) == identity(module));
    match found {
        Some((fqn, _)) if !fqn.is_empty() => format!("{fqn} ({type_name})"),
        _ => type_name.to_owned(),
    }
}
