//! Graphs of modules that stay what they are: an interceptor of their calls runs the graph.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use tch::Tensor;

use super::cache::{CacheOptions, CacheStats, GraphCache};
use super::graphed_callable::CapturedModule;
use super::known::Known;
use crate::ffi::{self, ReplayStats};
use crate::nn::{
    CallInterceptor, Callable, InterceptorHandle, InterceptorLevel, Module, ModuleExt, Next, TensorTuple,
    call_with, intercept_calls, set_training,
};

/// Graphs of a module's calls on this thread, until this is dropped; made by [`ModuleCacher::inplace`] and
/// [`wrap_in_hpu_graph_inplace`].
///
/// The module may move, such as into a box: it is known by its type and its parameters, and is run as usual if one of them is
/// replaced. One without parameters is known by where it lies.
///
/// [`ModuleCacher::inplace`]: super::ModuleCacher::inplace
/// [`wrap_in_hpu_graph_inplace`]: super::wrap_in_hpu_graph_inplace
#[must_use = "the graphs are used until this is dropped"]
pub struct GraphedInPlace {
    calls: Rc<CachedCalls>,
    _handle: InterceptorHandle,
}

/// The graph of a module's calls on this thread, until this is dropped; made by [`make_graphed_callables_inplace`].
#[must_use = "the graph is used until this is dropped"]
pub struct GraphedCallableInPlace {
    calls: Rc<CapturedCalls>,
    _handle: InterceptorHandle,
}

struct CachedCalls {
    known: Known,
    cache: RefCell<GraphCache>,
}

impl CallInterceptor for CachedCalls {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Graph
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        self.known.is(module)
    }

    fn call(&self, module: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        // a module within its own call is part of that
        let Ok(mut cache) = self.cache.try_borrow_mut() else { return next.run(inputs) };
        cache.run(module, ffi::grad_is_enabled(), inputs, &|inputs| next.run(inputs))
    }
}

impl GraphedInPlace {
    pub(super) fn new(module: &dyn Module, options: CacheOptions) -> Self {
        let cache = RefCell::new(GraphCache::new(module.type_name(), options));
        let calls = Rc::new(CachedCalls { known: Known::of(module), cache });
        Self { _handle: intercept_calls(calls.clone()), calls }
    }

    /// What the calls so far found.
    pub fn stats(&self) -> CacheStats {
        self.calls.cache.borrow().stats()
    }

    /// Counts of the replays of each graph: forward, then backward if it has one.
    pub fn replay_stats(&self) -> Vec<ReplayStats> {
        self.calls.cache.borrow().replay_stats()
    }

    /// Why there are no graphs, if the module cannot be captured.
    pub fn refusal(&self) -> Option<String> {
        self.calls.cache.borrow().refusal.clone()
    }

    /// Drops all graphs, with their memory: see [`GraphedModule::clear_cache`](super::GraphedModule::clear_cache).
    pub fn clear_cache(&self) {
        self.calls.cache.borrow_mut().clear();
    }
}

struct CapturedCalls {
    known: Known,
    captured: CapturedModule,
}

impl CallInterceptor for CapturedCalls {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Graph
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        self.known.is(module)
    }

    fn call(&self, module: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        self.captured.run(module, ffi::grad_is_enabled(), inputs, &|inputs| next.run(inputs))
    }
}

/// [`make_graphed_callables`](super::make_graphed_callables) for a module that stays what it is: see
/// [`ModuleCacher::inplace`](super::ModuleCacher::inplace). The module is put into the mode of the capture.
///
/// # Errors
/// As `make_graphed_callables`.
pub fn make_graphed_callables_inplace<A: TensorTuple, M: Callable<A>>(
    module: &mut M,
    sample_args: &A,
    warmup: usize,
) -> anyhow::Result<GraphedCallableInPlace> {
    set_training(module, ffi::grad_is_enabled());
    let module = &*module;
    let code = |inputs: &[Tensor]| call_with(module, inputs);
    let captured = CapturedModule::capture(module.as_dyn(), &sample_args.tensors(), warmup, &code)?;
    let calls = Rc::new(CapturedCalls { known: Known::of(module), captured });
    Ok(GraphedCallableInPlace { _handle: intercept_calls(calls.clone()), calls })
}

impl GraphedCallableInPlace {
    /// Counts of the replays: of the forward pass, then of the backward pass if there is one. Empty on a Gaudi card.
    pub fn replay_stats(&self) -> Vec<ReplayStats> {
        self.calls.captured.replay_stats()
    }
}

impl fmt::Debug for GraphedInPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphedInPlace({})", self.stats())
    }
}

impl fmt::Debug for GraphedCallableInPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GraphedCallableInPlace")
    }
}
