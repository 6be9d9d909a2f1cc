//! Activation checkpointing: what a segment computes is dropped, and computed again in the backward pass.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tch::Tensor;

use crate::device::Device;
use crate::error::{ModuleError, Problem, Result};
use crate::ffi::{self, Offload, Segment};
use crate::nn::callable::Callable;
use crate::nn::calls::active::{CallInterceptor, InterceptorLevel, Next, Recomputing};
use crate::nn::calls::reach::{Reach, unwrapped};
use crate::nn::calls::recompute::InSegment;
use crate::nn::calls::stash::Stash;
use crate::nn::calls::surroundings::Surroundings;
use crate::nn::checkpoint_policy::CheckpointPolicy;
use crate::nn::choice::Cost;
use crate::nn::module::{Identity, Module, identity};
use crate::nn::named::modules_named;
use crate::nn::tensor_tuple::TensorTuple;

/// Calls a module without keeping what its layers save for the backward pass. The backward pass calls it again, on the same inputs and
/// with the same random numbers, when it needs the first of these tensors.
///
/// Values, gradients and random numbers are those of a plain call, bit for bit. Memory is that of the inputs until the backward pass
/// comes, and then that of one segment at a time; time is that of one more forward pass. The second pass ends as soon as
/// all is there that backward needs.
///
/// ```
/// use voltaic::nn::{checkpoint, Forward, Linear, Module};
/// use voltaic::Tensor;
///
/// #[derive(Module)]
/// struct Net {
///     l1: Linear,
///     l2: Linear,
/// }
///
/// impl Forward for Net {
///     fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
///         let x = self.l1.forward(x)?;
///         checkpoint(&self.l2, &x)
///     }
/// }
/// ```
///
/// Inputs may be of any dtype, and none has to require grad. Checkpoints may lie within each other. The module's hooks and interceptors
/// run both times; batch normalization counts a batch once. What else a module does beside computing its outputs is to be left
/// out if [`is_recomputing`](crate::nn::is_recomputing). Within `tch::no_grad` it is a plain call.
///
/// The trainer lends the module to the backward pass. In a loop of your own run backward within
/// [`ModuleHooks::within`](crate::nn::ModuleHooks::within).
///
/// # Errors
/// Those of the call. In backward: [`ModuleError::Hook`] if the module is not where it was; if the code saves other tensors than
/// it did the first time; if an input was changed in place since.
///
/// Source: `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`; Chen et al., 2016
/// (<https://arxiv.org/abs/1604.06174>).
pub fn checkpoint<A: TensorTuple, M: Callable<A>>(module: &M, args: &A) -> anyhow::Result<M::Output> {
    CheckpointPolicy::default().checkpoint(module, args)
}

/// [`checkpoint`] of code that is more, or less, than the call of one module: `code` gets the module again that it is given here, usually
/// `self`, and the arguments.
///
/// ```
/// use voltaic::nn::{checkpoint_with, Callable, Dropout, Forward, LayerNorm, Linear, Module};
/// use voltaic::Tensor;
///
/// #[derive(Module)]
/// struct Block {
///     norm: LayerNorm,
///     fc: Linear,
///     drop: Dropout,
/// }
///
/// impl Forward for Block {
///     fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
///         checkpoint_with(self, x, |block, x| {
///             let hidden = block.fc.call(&block.norm.call(x)?)?.f_relu()?;
///             Ok(x.f_add(&block.drop.call(&hidden)?)?)
///         })
///     }
/// }
/// ```
///
/// A tensor that may be missing, such as a mask, is an `Option<Tensor>` of a tuple. Other tensors are moved into the closure: their gradients
/// come as usual, but they are kept.
///
/// # Errors
/// As [`checkpoint`].
pub fn checkpoint_with<A, M, O, F>(module: &M, args: &A, code: F) -> anyhow::Result<O>
where
    A: TensorTuple,
    M: Module,
    O: TensorTuple,
    F: Fn(&M, &A) -> anyhow::Result<O> + Send + 'static,
{
    CheckpointPolicy::default().checkpoint_with(module, args, code)
}

/// [`checkpoint`] of a function of tensors without modules.
///
/// # Errors
/// As [`checkpoint`].
pub fn checkpoint_fn<A, O, F>(args: &A, code: F) -> anyhow::Result<O>
where
    A: TensorTuple,
    O: TensorTuple,
    F: Fn(&A) -> anyhow::Result<O> + Send + 'static,
{
    CheckpointPolicy::default().checkpoint_fn(args, code)
}

impl CheckpointPolicy {
    /// [`checkpoint`] that keeps what the policy says.
    ///
    /// # Errors
    /// As [`checkpoint`].
    pub fn checkpoint<A: TensorTuple, M: Callable<A>>(
        &self,
        module: &M,
        args: &A,
    ) -> anyhow::Result<M::Output> {
        self.checkpoint_with(module, args, M::call)
    }

    /// [`checkpoint_with`] that keeps what the policy says.
    ///
    /// # Errors
    /// As [`checkpoint`].
    pub fn checkpoint_with<A, M, O, F>(&self, module: &M, args: &A, code: F) -> anyhow::Result<O>
    where
        A: TensorTuple,
        M: Module,
        O: TensorTuple,
        F: Fn(&M, &A) -> anyhow::Result<O> + Send + 'static,
    {
        let (reach, slot) = (Reach::of(module), Arc::new(Mutex::new(None::<F>)));
        let again = slot.clone();
        let recompute = move |inputs: &[Tensor]| {
            let (args, code) = (args_of::<A>(inputs)?, lock(&again));
            reach.with(|found| {
                let module: &M =
                    found.and_then(unwrapped).ok_or_else(|| not_there(std::any::type_name::<M>()))?;
                known(&code)?(module, &args).map(drop)
            })
        };
        let forward = |inputs: &[Tensor]| {
            let outputs = code(module, &args_of(inputs)?)?.tensors();
            *lock(&slot) = Some(code);
            Ok(outputs)
        };
        Ok(O::from_tensors(segment(&args.tensors(), self, forward, recompute)?.0)?)
    }

    /// [`checkpoint_fn`] that keeps what the policy says.
    ///
    /// # Errors
    /// As [`checkpoint`].
    pub fn checkpoint_fn<A, O, F>(&self, args: &A, code: F) -> anyhow::Result<O>
    where
        A: TensorTuple,
        O: TensorTuple,
        F: Fn(&A) -> anyhow::Result<O> + Send + 'static,
    {
        let slot = Arc::new(Mutex::new(None::<F>));
        let again = slot.clone();
        let recompute = move |inputs: &[Tensor]| known(&lock(&again))?(&args_of(inputs)?).map(drop);
        let forward = |inputs: &[Tensor]| {
            let outputs = code(&args_of(inputs)?)?.tensors();
            *lock(&slot) = Some(code);
            Ok(outputs)
        };
        Ok(O::from_tensors(segment(&args.tensors(), self, forward, recompute)?.0)?)
    }
}

fn args_of<A: TensorTuple>(inputs: &[Tensor]) -> Result<A> {
    A::from_tensors(inputs.iter().map(Tensor::shallow_clone).collect())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The code of a segment, which is there once its forward pass is over.
fn known<F>(code: &Option<F>) -> Result<&F> {
    code.as_ref().ok_or_else(|| {
        let what = "a backward pass within a checkpointed segment needs what the segment is still computing";
        let remedy = "leave that part of the code out of the segment";
        ModuleError::Hook { problem: Problem::new(what, remedy) }.into()
    })
}

fn not_there(type_name: &str) -> ModuleError {
    let name = type_name.rsplit("::").next().unwrap_or(type_name);
    let what = format!("a checkpointed {name} cannot be run again: it is not in the tree of modules");
    let remedy =
        "leave it where it was, and run backward within ModuleHooks::within(&root, ..), as the trainer does";
    ModuleError::Hook { problem: Problem::new(what, remedy) }
}

/// How checkpointed segments of a thread are run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CheckpointSettings {
    /// Inputs of segments on a device are kept as copies in the host's memory.
    pub inputs_on_host: bool,
    /// Waits for the device before and after each segment, in forward and in its recomputation.
    pub synchronize: bool,
    /// Logs how long each segment takes, at level `info`. Times are those of the device with `synchronize`.
    pub profile: bool,
}

thread_local! {
    static SETTINGS: Cell<CheckpointSettings> =
        const { Cell::new(CheckpointSettings { inputs_on_host: false, synchronize: false, profile: false }) };
    static STATS: Cell<CheckpointStats> =
        const { Cell::new(CheckpointStats { segments: 0, recomputed: 0, dropped_bytes: 0, saved_bytes: 0, offloaded_bytes: 0 }) };
}

/// Settings of this thread, until this is dropped.
#[derive(Debug)]
#[must_use = "the settings hold until this is dropped"]
pub struct CheckpointScope {
    before: CheckpointSettings,
}

impl CheckpointSettings {
    /// Lets them hold for the segments that this thread begins.
    pub fn enter(self) -> CheckpointScope {
        CheckpointScope { before: SETTINGS.replace(self) }
    }
}

impl Drop for CheckpointScope {
    fn drop(&mut self) {
        SETTINGS.set(self.before);
    }
}

/// Counts of the checkpointed segments of a thread, since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CheckpointStats {
    /// Forward passes of segments.
    pub segments: u64,
    /// Their recomputations.
    pub recomputed: u64,
    /// Bytes of what was dropped after forward passes, without inputs and weights.
    pub dropped_bytes: u64,
    /// Bytes of results that a [`CheckpointPolicy`] has kept.
    pub saved_bytes: u64,
    /// Bytes that went to the host in place of that.
    pub offloaded_bytes: u64,
}

impl CheckpointStats {
    /// Those of this thread.
    pub fn of_thread() -> Self {
        STATS.get()
    }

    fn count(change: impl FnOnce(&mut Self)) {
        let mut stats = STATS.get();
        change(&mut stats);
        STATS.set(stats);
    }
}

/// Runs `forward` as a segment; `recompute` is the same code, to be run again. Gives the outputs, and what the segment costs.
fn segment(
    inputs: &[Tensor],
    policy: &CheckpointPolicy,
    forward: impl FnOnce(&[Tensor]) -> anyhow::Result<Vec<Tensor>>,
    recompute: impl Fn(&[Tensor]) -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<(Vec<Tensor>, Cost)> {
    if !ffi::grad_is_enabled() {
        return Ok((forward(inputs)?, Cost::default()));
    }
    let settings = SETTINGS.get();
    let surroundings = Arc::new(Surroundings::of(inputs)?);
    let again = surroundings.clone();
    let stash = Stash::default();
    let kept = stash.clone();
    let run = Segment::enter(inputs, settings.inputs_on_host, policy.operators(), move |inputs| {
        CheckpointStats::count(|stats| stats.recomputed += 1);
        let _recomputing = Recomputing::begin();
        let _kept = kept.take();
        again.within(|| timed(settings, again.device(), "recomputation", || recompute(inputs)))
    })?;
    let begin = Instant::now();
    let outputs = {
        let _in_segment = InSegment::begin();
        let _kept = stash.fill();
        timed(settings, surroundings.device(), "forward", || forward(inputs))?
    };
    let cost = Cost { bytes: run.bytes().unsigned_abs(), secs: begin.elapsed().as_secs_f64() };
    CheckpointStats::count(|stats| {
        stats.segments += 1;
        stats.dropped_bytes += cost.bytes;
        stats.saved_bytes += run.saved_bytes().unsigned_abs();
    });
    drop(run);
    surroundings.end_forward()?;
    Ok((outputs, cost))
}

fn timed<R>(
    settings: CheckpointSettings,
    device: Device,
    what: &str,
    body: impl FnOnce() -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let wait = || if settings.synchronize { ffi::synchronize(device) } else { Ok(()) };
    wait()?;
    let begin = Instant::now();
    let result = body();
    wait()?;
    if settings.profile {
        tracing::info!("checkpointed segment, {what}: {:.3} ms", begin.elapsed().as_secs_f64() * 1e3);
    }
    result
}

/// Runs `body` while what its operators save for the backward pass goes to the host's memory, and comes back when backward asks for it: the
/// alternative to [`checkpoint`] where moving is faster than computing. Weights stay, and so does what is in the host's memory anyway.
///
/// # Errors
/// Those of `body`; libtorch's.
///
/// Source: `torch.autograd.graph.save_on_cpu`.
pub fn save_on_host<R>(body: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
    let offload = Offload::enter()?;
    let result = body();
    CheckpointStats::count(|stats| stats.offloaded_bytes += offload.bytes().unsigned_abs());
    result
}

/// What becomes of what a call saves for the backward pass.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Treatment {
    /// It is dropped, and computed again, but for what the policy keeps.
    Recompute(CheckpointPolicy),
    /// It goes to the host's memory.
    Offload,
}

/// Checkpoints the calls of some modules of a tree, which stay as they are.
pub(crate) struct CheckpointCalls {
    treatment: Treatment,
    names: Vec<String>,
    /// Their numbers, in the order of the tree.
    modules: RefCell<HashMap<Identity, usize>>,
    costs: RefCell<Vec<Cost>>,
    /// Calls of these modules run as usual.
    kept: RefCell<Vec<bool>>,
}

impl CheckpointCalls {
    /// Of the modules of a type, or with an fqn, that `names` has: the outermost of those that lie within each other.
    ///
    /// # Errors
    /// The first name that is that of no module.
    pub(crate) fn of(
        root: &dyn Module,
        names: &[String],
        treatment: Treatment,
    ) -> std::result::Result<Self, String> {
        let modules = numbered(root, names)?;
        let costs = vec![Cost::default(); modules.len()];
        Ok(Self {
            treatment,
            names: names.to_vec(),
            modules: RefCell::new(modules),
            kept: RefCell::new(vec![false; costs.len()]),
            costs: RefCell::new(costs),
        })
    }

    /// Finds the same modules again in a tree that may have moved.
    ///
    /// # Errors
    /// The first name that is that of no module any more.
    pub(crate) fn refresh(&self, root: &dyn Module) -> std::result::Result<(), String> {
        self.modules.replace(numbered(root, &self.names)?);
        Ok(())
    }

    /// What the calls of each module have cost so far.
    pub(crate) fn costs(&self) -> Vec<Cost> {
        self.costs.borrow().clone()
    }

    /// From now on calls of these modules run as usual.
    pub(crate) fn keep(&self, kept: Vec<bool>) {
        *self.kept.borrow_mut() = kept;
    }

    fn number(&self, module: &dyn Module) -> Option<usize> {
        self.modules.borrow().get(&identity(module)).copied()
    }
}

fn numbered(root: &dyn Module, names: &[String]) -> std::result::Result<HashMap<Identity, usize>, String> {
    Ok(modules_named(root, names)?.into_iter().map(|(_, module)| identity(module)).zip(0..).collect())
}

impl CallInterceptor for CheckpointCalls {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Activations
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        let number = self.number(module);
        number.is_some_and(|number| !self.kept.borrow().get(number).copied().unwrap_or(false))
    }

    fn call(&self, module: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        if !ffi::grad_is_enabled() {
            return next.run(inputs);
        }
        let Treatment::Recompute(policy) = &self.treatment else {
            return save_on_host(|| next.run(inputs));
        };
        let again = next.recompute_code()?; // the segment restores what it depends on
        let (outputs, cost) =
            segment(inputs, policy, |inputs| next.run(inputs), move |inputs| again.run(inputs).map(drop))?;
        let (number, mut costs) = (self.number(module), self.costs.borrow_mut());
        if let Some(own) = number.and_then(|number| costs.get_mut(number)) {
            *own = Cost { bytes: own.bytes + cost.bytes, secs: own.secs + cost.secs };
        }
        Ok(outputs)
    }
}
