//! Graphs of modules that stay what they are: their calls are taken where all calls go through.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use tch::Tensor;

use super::cache::{CacheOptions, CacheStats, GraphCache};
use super::graphed_callable::CapturedModule;
use super::known::Known;
use crate::ffi::{self, ReplayStats};
use crate::nn::{Body, CallTaker, Callable, Module, ModuleExt, Taken, TensorTuple, call_with, set_training};

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
    taker: Rc<CachedCalls>,
    _taken: Taken,
}

/// The graph of a module's calls on this thread, until this is dropped; made by [`make_graphed_callables_inplace`].
#[must_use = "the graph is used until this is dropped"]
pub struct GraphedCallableInPlace {
    taker: Rc<CapturedCalls>,
    _taken: Taken,
}

struct CachedCalls {
    known: Known,
    cache: RefCell<GraphCache>,
}

impl CallTaker for CachedCalls {
    fn takes(&self, module: &dyn Module) -> bool {
        self.known.is(module)
    }

    fn call(&self, module: &dyn Module, inputs: &[Tensor], body: Body) -> anyhow::Result<Vec<Tensor>> {
        // a module within its own call is part of that
        let Ok(mut cache) = self.cache.try_borrow_mut() else { return body(inputs) };
        cache.run(module, ffi::grad_is_enabled(), inputs, body)
    }
}

impl GraphedInPlace {
    pub(super) fn new(module: &dyn Module, options: CacheOptions) -> Self {
        let cache = RefCell::new(GraphCache::new(module.type_name(), options));
        let taker = Rc::new(CachedCalls { known: Known::of(module), cache });
        Self { _taken: Taken::begin(taker.clone()), taker }
    }

    /// What the calls so far found.
    pub fn stats(&self) -> CacheStats {
        self.taker.cache.borrow().stats()
    }

    /// Counts of the replays of each graph: forward, then backward if it has one.
    pub fn replay_stats(&self) -> Vec<ReplayStats> {
        self.taker.cache.borrow().replay_stats()
    }

    /// Why there are no graphs, if the module cannot be captured.
    pub fn refusal(&self) -> Option<String> {
        self.taker.cache.borrow().refusal.clone()
    }

    /// Drops all graphs, with their memory: see [`GraphedModule::clear_cache`](super::GraphedModule::clear_cache).
    pub fn clear_cache(&self) {
        self.taker.cache.borrow_mut().clear();
    }
}

struct CapturedCalls {
    known: Known,
    captured: CapturedModule,
}

impl CallTaker for CapturedCalls {
    fn takes(&self, module: &dyn Module) -> bool {
        self.known.is(module)
    }

    fn call(&self, module: &dyn Module, inputs: &[Tensor], body: Body) -> anyhow::Result<Vec<Tensor>> {
        self.captured.run(module, ffi::grad_is_enabled(), inputs, body)
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
    let taker = Rc::new(CapturedCalls { known: Known::of(module), captured });
    Ok(GraphedCallableInPlace { _taken: Taken::begin(taker.clone()), taker })
}

impl GraphedCallableInPlace {
    /// Counts of the replays: of the forward pass, then of the backward pass if there is one. Empty on a Gaudi card.
    pub fn replay_stats(&self) -> Vec<ReplayStats> {
        self.taker.captured.replay_stats()
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
