//! Modules whose calls are replayed: a wrapper that is the module, or an interceptor of the calls of a module that stays what it is.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::rc::Rc;

use tch::Tensor;

use super::call::CallGraphs;
use super::known::Known;
use crate::ffi::{self, ReplayStats};
use crate::nn::{
    CallInterceptor, Callable, Forward, InterceptorHandle, InterceptorLevel, Member, Module, ModuleExt, Next,
    TensorTuple, call_as, call_with, intercept_calls, within_call,
};

/// A module with graphs `G` of its calls: [`GraphedModule`](super::GraphedModule), [`GraphedCallable`](super::GraphedCallable). Names
/// of weights are those of the module.
#[derive(Debug)]
pub struct Graphed<M, G, A = ()> {
    module: M,
    pub(super) graphs: G,
    is_training: bool,
    _args: PhantomData<fn(&A)>,
}

impl<M: Module, G: CallGraphs, A> Graphed<M, G, A> {
    pub(super) fn new(module: M, graphs: G, is_training: bool) -> Self {
        Self { module, graphs, is_training, _args: PhantomData }
    }

    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Counts of the replays of each graph: forward, then backward if it has one. Empty on a Gaudi card.
    pub fn replay_stats(&self) -> Vec<ReplayStats> {
        self.graphs.replay_stats()
    }

    /// The module's call, by a graph if there is one. For a module of one tensor this is its `forward`.
    ///
    /// # Errors
    /// The module's own; what a kernel reports; of one graph [`GraphError::InputMismatch`](crate::error::GraphError::InputMismatch) and
    /// [`GraphError::TensorGone`](crate::error::GraphError::TensorGone).
    pub fn call<T: TensorTuple>(&self, args: &T) -> anyhow::Result<M::Output>
    where
        M: Callable<T>,
    {
        call_as(&self.module, args, |args| self.run(args))
    }

    fn run<T: TensorTuple>(&self, args: &T) -> anyhow::Result<M::Output>
    where
        M: Callable<T>,
    {
        let code = |inputs: &[Tensor]| call_with(&self.module, inputs);
        let outputs = self.graphs.run(self.module.as_dyn(), self.is_training, &args.tensors(), &code)?;
        Ok(M::Output::from_tensors(outputs)?)
    }
}

impl<M: Forward, G: CallGraphs, A: 'static> Forward for Graphed<M, G, A> {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| self.run(input))
    }
}

impl<M: Module, G: CallGraphs, A: 'static> Module for Graphed<M, G, A> {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.module.members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.module.children_mut(visit);
    }

    fn set_training(&mut self, training: bool) {
        self.is_training = training;
        self.module.set_training(training);
    }

    fn is_training(&self) -> Option<bool> {
        Some(self.is_training)
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        self.module.settings(visit);
    }

    fn wrapped(&self) -> Option<&dyn Module> {
        Some(&self.module)
    }

    fn type_name(&self) -> &'static str {
        self.module.type_name()
    }
}

/// Graphs `G` of a module's calls on this thread, until this is dropped: [`GraphedInPlace`](super::GraphedInPlace),
/// [`GraphedCallableInPlace`](super::GraphedCallableInPlace).
///
/// The module may move, such as into a box: it is known by its type and its parameters, and is run as usual if one of them is
/// replaced. One without parameters is known by where it lies.
#[must_use = "the graphs are used until this is dropped"]
pub struct InPlace<G> {
    calls: Rc<GraphedCalls<G>>,
    _handle: InterceptorHandle,
}

impl<G: CallGraphs> InPlace<G> {
    pub(super) fn new(module: &dyn Module, graphs: G) -> Self {
        let calls = Rc::new(GraphedCalls { known: Known::of(module), graphs });
        Self { _handle: intercept_calls(calls.clone()), calls }
    }

    /// Counts of the replays of each graph: forward, then backward if it has one. Empty on a Gaudi card.
    pub fn replay_stats(&self) -> Vec<ReplayStats> {
        self.calls.graphs.replay_stats()
    }
}

impl<G> Deref for InPlace<G> {
    type Target = G;

    fn deref(&self) -> &G {
        &self.calls.graphs
    }
}

impl<G: fmt::Debug> fmt::Debug for InPlace<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InPlace({:?})", self.calls.graphs)
    }
}

/// The calls of one module, wherever it lies.
struct GraphedCalls<G> {
    known: Known,
    graphs: G,
}

impl<G: CallGraphs> CallInterceptor for GraphedCalls<G> {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Graph
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        self.known.is(module)
    }

    fn is_transparent(&self) -> bool {
        true
    }

    fn call(&self, module: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        self.graphs.run(module, ffi::grad_is_enabled(), inputs, &|inputs| next.run(inputs))
    }
}
