//! A module as one graph for one kind of inputs.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;

use tch::Tensor;

use super::call::{Call, CapturedCall, Outputs, trained_params};
use super::capture::{check_not_capturing, is_capturing};
use crate::accelerator::rng;
use crate::device::Device;
use crate::error::{Error, GraphError, Problem, Result};
use crate::ffi::{self, ReplayStats};
use crate::nn::{
    Callable, Forward, Member, ModeNumbers, Module, ModuleExt, ModuleKind, Snapshot, SnapshotParts,
    TensorTuple, call_as, call_with, set_training, within_call,
};

/// A module that is a graph; made by [`make_graphed_callables`]. Names of weights are those of the module.
#[derive(Debug)]
pub struct GraphedCallable<M, A> {
    module: M,
    captured: CapturedModule,
    is_training: bool,
    _args: PhantomData<fn(&A)>,
}

/// The graph of a module, which is told the module at each call.
#[derive(Debug)]
pub(super) struct CapturedModule {
    /// None on a Gaudi card, of which there are no graphs.
    call: RefCell<Option<CapturedCall>>,
    was_training: bool,
    /// Number 0 are those when it was captured.
    modes: RefCell<ModeNumbers>,
    /// What it was captured with.
    kind: ModuleKind,
    casts: Casts,
    /// It was said that other casts are in force.
    has_warned: Cell<bool>,
    /// Parameters that the graph has no gradient for.
    frozen: Vec<Tensor>,
}

/// What autocast does when a module is captured or called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Casts {
    /// Of the device of the inputs: whether it casts, and to what.
    state: (bool, i32),
    /// Of the operators that cast.
    lists_version: u64,
}

impl Casts {
    fn now(inputs: &[Tensor]) -> Result<Self> {
        let device = inputs.first().map_or(Ok(Device::Cpu), Device::of)?;
        let (is_on, dtype) = ffi::autocast_state(device)?;
        let state = (is_on, if is_on { dtype } else { 0 });
        Ok(Self { state, lists_version: ffi::autocast_lists_version() })
    }
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
    let captured = CapturedModule::capture(module.as_dyn(), &sample_args.tensors(), warmup, &code)?;
    Ok(GraphedCallable { captured, is_training, module, _args: PhantomData })
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

impl CapturedModule {
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
        let rng = rng::states(inputs.first().map_or(Ok(Device::Cpu), Device::of)?)?;
        for _ in 0..warmup {
            warm_up(&code(inputs)?, inputs, &params)?;
        }
        let (captured, _) = CapturedCall::capture(module, inputs, with_grad, Outputs::Shared, code)?;
        let checked = match &captured {
            Ok(captured) => captured.check(module, inputs, with_grad, code)?.0,
            Err(_) => Ok(()),
        };
        kept.restore(module)?;
        rng::set_states(&rng)?;
        let captured = match captured {
            Err(Error::Graph(error @ GraphError::OnCard { .. })) => {
                tracing::warn!(
                    "make_graphed_callables: {} runs without a graph: {error}",
                    module.type_name()
                );
                None
            }
            captured => Some(captured?),
        };
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
            casts: Casts::now(inputs)?,
            has_warned: Cell::new(false),
            frozen,
        })
    }

    /// Whether autocast does what it did in the capture; else says so once.
    fn has_casts_of(&self, module: &dyn Module, inputs: &[Tensor]) -> Result<bool> {
        let is_same = self.casts == Casts::now(inputs)?;
        if !is_same && !self.has_warned.replace(true) {
            let before = if self.casts.state.0 { "within" } else { "without" };
            tracing::warn!(
                "make_graphed_callables: {} was captured {before} autocast, and is called under another one: its own code runs; capture it under the autocast of its calls (precision::autocast)",
                module.type_name()
            );
        }
        Ok(is_same)
    }

    /// The call by the graph; by `code` where the graph is not for it.
    pub(super) fn run(
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
        let is_free = held.as_ref().is_some_and(|call| !call.is_busy());
        if is_capturing() || is_other_mode || !is_free {
            drop(held);
            return code(inputs);
        }
        if self.was_training && self.frozen.iter().any(Tensor::requires_grad) {
            let module = module.type_name();
            let what = format!("a parameter of {module} is trained that was not when the graph was captured");
            return Err(GraphError::Arguments { problem: Problem::new(what, "capture it again") }.into());
        }
        let has_layout = held.as_ref().is_some_and(|call| call.has_layout_of(inputs));
        let is_like_it = has_layout && self.has_casts_of(module, inputs)?;
        match held.as_mut().filter(|_| is_like_it) {
            Some(call) => Ok(call.replay(inputs)?),
            None => {
                drop(held);
                code(inputs)
            }
        }
    }

    pub(super) fn replay_stats(&self) -> Vec<ReplayStats> {
        self.call.borrow().as_ref().map(CapturedCall::replay_stats).unwrap_or_default()
    }
}

impl<A: TensorTuple, M: Callable<A>> GraphedCallable<M, A> {
    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Counts of the replays: of the forward pass, then of the backward pass if there is one. Empty on a Gaudi card.
    pub fn replay_stats(&self) -> Vec<ReplayStats> {
        self.captured.replay_stats()
    }

    /// The module's call by its graph. For a module of one tensor this is its `forward`.
    ///
    /// # Errors
    /// [`GraphError::InputMismatch`], [`GraphError::TensorGone`]; the module's own where its code runs.
    pub fn call(&self, args: &A) -> anyhow::Result<M::Output> {
        call_as(&self.module, args, |args| self.run(args))
    }

    fn run(&self, args: &A) -> anyhow::Result<M::Output> {
        let code = |inputs: &[Tensor]| call_with(&self.module, inputs);
        let outputs = self.captured.run(self.module.as_dyn(), self.is_training, &args.tensors(), &code)?;
        Ok(M::Output::from_tensors(outputs)?)
    }
}

impl<M: Forward> Forward for GraphedCallable<M, Tensor> {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| self.run(input))
    }
}

impl<A: TensorTuple + 'static, M: Module> Module for GraphedCallable<M, A> {
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
