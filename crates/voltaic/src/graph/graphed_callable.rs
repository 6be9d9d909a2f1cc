//! A module as one graph for one kind of inputs.

use std::cell::{Cell, RefCell};

use tch::Tensor;

use super::call::{Call, CallGraphs, CapturedCall, HowCaptured, Outputs, trained_params};
use super::capture::{check_not_capturing, is_capturing};
use super::graphed::{Graphed, InPlace};
use super::passes::Passes;
use super::places::any_missing;
use super::signature::{Conditions, device_of};
use crate::accelerator::rng;
use crate::error::{GraphError, Problem, Result};
use crate::ffi::{self, ReplayStats};
use crate::nn::{
    Callable, ModeNumbers, Module, ModuleExt, ModuleKind, Snapshot, SnapshotParts, TensorTuple, call_with,
    is_in_segment, set_training, te,
};

/// A module that is a graph; made by [`make_graphed_callables`].
pub type GraphedCallable<M, A> = Graphed<M, OneGraph, A>;

/// The graph of a module's calls on this thread, until this is dropped; made by [`make_graphed_callables_inplace`].
pub type GraphedCallableInPlace = InPlace<OneGraph>;

/// The graph of a module for one kind of inputs; each call gives the module.
#[doc(hidden)]
#[derive(Debug)]
pub struct OneGraph {
    call: RefCell<CapturedCall>,
    was_training: bool,
    /// Number 0 are those when it was captured.
    modes: RefCell<ModeNumbers>,
    /// What it was captured with.
    kind: ModuleKind,
    conditions: Conditions,
    /// A warning has said that it is called under others.
    has_warned: Cell<bool>,
    /// Parameters that the graph has no gradient for.
    frozen: Vec<Tensor>,
}

/// Captures the forward pass of `module` on `sample_args`, and its backward pass if grad is on; from then on they are
/// replayed. Inputs must have the shapes, dtypes and devices of the sample, and results are bit for bit those of the
/// module.
///
/// With grad the module is captured in training mode, within `no_grad` in evaluation mode; in other modes of it
/// or of a layer, for inputs of other strides, and while a backward pass is still to come, its own code runs. So it does,
/// with a warning, under another autocast: for `precision=bf16-mixed` capture it within [`autocast`]. `warmup` is
/// how often it runs before it is captured, twice: both captures must be the same graph. None of that changes buffers,
/// gradients or random numbers. On a Gaudi card, of which there are no graphs, a warning says that its own code runs.
///
/// ```
/// use voltaic::graph::make_graphed_callables;
/// use voltaic::nn::{Forward, Linear};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let sample = Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu));
/// let net = make_graphed_callables(Linear::new(4, 2)?, &sample, 3)?;
/// net.forward(&(&sample * 2.0))?.sum(Kind::Float).backward();
/// assert!(net.forward(&sample.narrow(0, 0, 5)).is_err());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`GraphError::NotCapturable`]; [`GraphError::NotStatic`] if the code takes numbers from the host that change from call
/// to call; the module's own.
///
/// Source: `habana_frameworks.torch.hpu.make_graphed_callables`, `torch.cuda.make_graphed_callables`.
///
/// [`autocast`]: crate::precision::autocast()
pub fn make_graphed_callables<A: TensorTuple, M: Callable<A>>(
    mut module: M,
    sample_args: &A,
    warmup: usize,
) -> anyhow::Result<GraphedCallable<M, A>> {
    let is_training = ffi::grad_is_enabled();
    set_training(&mut module, is_training);
    let code = |inputs: &[Tensor]| call_with(&module, inputs);
    let captured = OneGraph::capture(module.as_dyn(), &sample_args.tensors(), warmup, &code)?;
    Ok(GraphedCallable::new(module, captured, is_training))
}

/// [`make_graphed_callables`] for a module that stays what it is: see
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
    let captured = OneGraph::capture(module.as_dyn(), &sample_args.tensors(), warmup, &code)?;
    Ok(GraphedCallableInPlace::new(module, captured))
}

/// A backward pass whose gradients are dropped.
fn warm_up(outputs: &[Tensor], inputs: &[Tensor], params: &[Tensor]) -> Result<()> {
    let outputs: Vec<Tensor> =
        outputs.iter().filter(|o| o.requires_grad()).map(Tensor::shallow_clone).collect();
    if outputs.is_empty() {
        return Ok(());
    }
    let grads = outputs.iter().map(Tensor::f_zeros_like).collect::<Result<Vec<_>, _>>()?;
    let inputs = inputs.iter().filter(|input| input.requires_grad());
    let leaves: Vec<Tensor> = inputs.chain(params).map(Tensor::shallow_clone).collect();
    ffi::autograd_grad(&outputs, &grads, &leaves)?;
    Ok(())
}

impl OneGraph {
    /// Captures `code` of `module` in the mode that it is in.
    pub(super) fn capture(
        module: &dyn Module,
        inputs: &[Tensor],
        warmup: usize,
        code: Call,
    ) -> anyhow::Result<Self> {
        check_not_capturing("make_graphed_callables")?;
        let was_training = ffi::grad_is_enabled();
        let params = trained_params(module);
        let with_grad = was_training && (!params.is_empty() || inputs.iter().any(Tensor::requires_grad));
        let kept = Snapshot::of(module, SnapshotParts { buffers: true, ..SnapshotParts::default() })?;
        let rng = rng::states(device_of(inputs)?)?;
        for _ in 0..warmup {
            warm_up(&code(inputs)?, inputs, &params)?;
        }
        let how =
            HowCaptured { outputs: Outputs::Shared, passes: Passes::NONE, gives_back: false, freezes: false };
        let (captured, _) = CapturedCall::capture(module, inputs, with_grad, how, code)?;
        let checked = match &captured {
            Ok(captured) => captured.check(module, inputs, with_grad, code)?.0,
            Err(_) => Ok(()),
        };
        te::keep_measured(module, || kept.restore(module))?;
        rng::set_states(&rng)?;
        let captured = captured?;
        checked?;
        let frozen = module.parameters().into_iter().filter(|parameter| !parameter.requires_grad());
        let frozen = frozen.map(|parameter| parameter.leaf().shallow_clone()).collect();
        let mut modes = ModeNumbers::default();
        let kind = modes.kind(module);
        Ok(Self {
            call: RefCell::new(captured),
            was_training,
            modes: RefCell::new(modes),
            kind,
            conditions: Conditions::of_call(module, device_of(inputs)?, was_training)?,
            has_warned: Cell::new(false),
            frozen,
        })
    }

    /// Whether what held in the capture holds now; else says so once.
    fn has_conditions_of(&self, module: &dyn Module, inputs: &[Tensor]) -> Result<bool> {
        let now = Conditions::of_call(module, device_of(inputs)?, self.was_training)?;
        let Some(difference) = self.conditions.difference(&now) else { return Ok(true) };
        if !self.has_warned.replace(true) {
            tracing::warn!(
                "make_graphed_callables: {} was captured {difference}: its own code runs; capture it under what holds for its calls (precision::autocast, intercept_calls)",
                module.type_name()
            );
        }
        Ok(false)
    }
}

impl CallGraphs for OneGraph {
    /// The call by the graph; by `code` where the graph is not for it.
    fn run(
        &self,
        module: &dyn Module,
        is_training: bool,
        inputs: &[Tensor],
        code: Call,
    ) -> anyhow::Result<Vec<Tensor>> {
        let is_other_mode =
            is_training != self.was_training || self.modes.borrow_mut().kind(module) != self.kind;
        // a module within its own call, too
        let Ok(mut held) = self.call.try_borrow_mut() else { return code(inputs) };
        if is_capturing() || is_in_segment() || any_missing(inputs) || is_other_mode || held.is_busy() {
            drop(held);
            return code(inputs);
        }
        if self.was_training && self.frozen.iter().any(Tensor::requires_grad) {
            let module = module.type_name();
            let what = format!("a parameter of {module} is trained that was not when the graph was captured");
            return Err(GraphError::Arguments { problem: Problem::new(what, "capture it again") }.into());
        }
        if held.has_layout_of(inputs) && self.has_conditions_of(module, inputs)? {
            return Ok(held.replay(inputs)?);
        }
        drop(held);
        code(inputs)
    }

    fn replay_stats(&self) -> Vec<ReplayStats> {
        self.call.borrow().replay_stats()
    }
}
