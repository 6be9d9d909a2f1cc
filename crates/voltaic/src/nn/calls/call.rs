//! Dispatches a module call to the active hooks of this thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use tch::Tensor;

use crate::error::{Error, ModuleError, Problem, Result};
use crate::ffi;
use crate::nn::calls::backward::{BackwardCall, Hooked};
use crate::nn::calls::entry::{Entry, ModuleCall};
use crate::nn::calls::registry::Registry;
use crate::nn::calls::table::{Entries, Table};
use crate::nn::module::{Identity, Module, identity};
use crate::nn::tensor_tuple::TensorTuple;

/// A module's code on tensors one by one.
pub(crate) type Body<'a> = &'a dyn Fn(&[Tensor]) -> anyhow::Result<Vec<Tensor>>;

/// Runs calls of some modules in its own way, such as by a graph. Hooks of the module run around it.
pub(crate) trait CallTaker {
    /// Whether it is for this module.
    fn takes(&self, module: &dyn Module) -> bool;

    /// The call; `body` is the module's code.
    fn call(&self, module: &dyn Module, inputs: &[Tensor], body: Body) -> anyhow::Result<Vec<Tensor>>;
}

/// Hooks that are in force on this thread.
struct Entered {
    hooks: Arc<Registry>,
    table: RefCell<Table>,
    /// For each call in progress, the innermost last: the module that is called, or if the table does not have it, the one
    /// whose call it is within.
    open: RefCell<Vec<Option<usize>>>,
}

/// A call in progress.
struct Frame {
    module: Identity,
    /// The module's `forward` is still to come, which is this call and not another one.
    is_awaited: bool,
    /// Outputs of calls within this one that have a hook for their gradient.
    hooked: Vec<Hooked>,
}

#[derive(Default)]
struct Listening {
    entered: Vec<Rc<Entered>>,
    takers: Vec<Rc<dyn CallTaker>>,
    frames: Vec<Frame>,
    /// Where the next module that is called lies in its caller.
    place: Option<usize>,
}

impl Listening {
    const fn new() -> Self {
        Self { entered: Vec::new(), takers: Vec::new(), frames: Vec::new(), place: None }
    }

    fn update(&self) {
        ARE_HEARD.set(!self.entered.is_empty() || !self.takers.is_empty());
    }
}

thread_local! {
    static ARE_HEARD: Cell<bool> = const { Cell::new(false) };
    static LISTENING: RefCell<Listening> = const { RefCell::new(Listening::new()) };
}

/// Whether anybody listens on this thread.
#[inline]
fn are_heard() -> bool {
    ARE_HEARD.get()
}

/// A call of a module by `Callable::call`.
#[inline]
pub(crate) fn call<M, A, O>(module: &M, args: &A, body: fn(&M, &A) -> anyhow::Result<O>) -> anyhow::Result<O>
where
    M: Module + ?Sized,
    A: TensorTuple,
    O: TensorTuple,
{
    if !are_heard() {
        return body(module, args);
    }
    call_as(module.as_module(), args, |args| body(module, args))
}

/// A call of a module by code that stands for its `forward`.
pub(crate) fn call_as<A, O>(
    module: &dyn Module,
    args: &A,
    body: impl Fn(&A) -> anyhow::Result<O>,
) -> anyhow::Result<O>
where
    A: TensorTuple,
    O: TensorTuple,
{
    if !are_heard() {
        return body(args);
    }
    let call = Open::begin(module, true);
    if call.is_plain() {
        return body(args);
    }
    let outputs = heard(module, args.tensors(), call, &|inputs| {
        let args = A::from_tensors(inputs.iter().map(Tensor::shallow_clone).collect())?;
        Ok(body(&args)?.tensors())
    })?;
    Ok(O::from_tensors(outputs)?)
}

/// The `forward` of a layer that is heard by `forward` as by `call`: within its own call it is that call.
#[inline]
pub(crate) fn within_call<M: Module>(
    module: &M,
    input: &Tensor,
    body: impl Fn(&Tensor) -> anyhow::Result<Tensor>,
) -> anyhow::Result<Tensor> {
    if !are_heard() || is_awaited(module) {
        return body(input);
    }
    let call = Open::begin(module.as_module(), false);
    if call.is_plain() {
        return body(input);
    }
    let outputs = heard(module, vec![input.shallow_clone()], call, &|inputs| Ok(vec![body(&inputs[0])?]))?;
    Tensor::from_tensors(outputs).map_err(Into::into)
}

/// [`within_call`] of a layer with several inputs or outputs.
pub(crate) fn within_call_of<M: Module, const N: usize, const K: usize>(
    module: &M,
    inputs: [&Tensor; N],
    body: impl Fn([&Tensor; N]) -> Result<[Tensor; K]>,
) -> Result<[Tensor; K]> {
    if !are_heard() || is_awaited(module) {
        return body(inputs);
    }
    let call = Open::begin(module.as_module(), false);
    if call.is_plain() {
        return body(inputs);
    }
    let given = inputs.iter().map(|input| input.shallow_clone()).collect();
    let outputs = heard(module, given, call, &|inputs| Ok(body(std::array::from_fn(|i| &inputs[i]))?.into()));
    outputs.map_err(of_hook)?.try_into().map_err(|outputs: Vec<Tensor>| {
        let what = format!("{} outputs in place of {K}", outputs.len());
        ModuleError::Hook { problem: Problem::new(what, "give as many as there were") }.into()
    })
}

/// What hooks report, where the layer's own error is voltaic's.
fn of_hook(error: anyhow::Error) -> Error {
    error.downcast().unwrap_or_else(|error| {
        let what = format!("{error:#}");
        ModuleError::Hook { problem: Problem::new(what, "fix the hook, or remove it") }.into()
    })
}

/// The call that `body` makes is of the module at `place` of its caller.
#[inline]
pub(crate) fn at_place<R>(place: usize, body: impl FnOnce() -> R) -> R {
    if are_heard() {
        LISTENING.with_borrow_mut(|listening| listening.place = Some(place));
    }
    body()
}

/// The code of the module that is called in progress is still to come: a wrapper's `forward` was that call so far.
#[inline]
pub(crate) fn await_forward(module: &dyn Module) {
    if are_heard() {
        let module = identity(module);
        LISTENING.with_borrow_mut(|listening| {
            listening
                .frames
                .last_mut()
                .into_iter()
                .for_each(|frame| frame.is_awaited |= frame.module == module);
        });
    }
}

#[cold]
fn is_awaited(module: &dyn Module) -> bool {
    let module = identity(module);
    LISTENING.with_borrow_mut(|listening| match listening.frames.last_mut() {
        Some(frame) if frame.module == module => std::mem::take(&mut frame.is_awaited),
        _ => false,
    })
}

/// A module whose call hooks are told of, until this is dropped.
struct Heard {
    entered: Rc<Entered>,
    node: usize,
    fqn: Arc<str>,
    type_name: &'static str,
    /// That were told of the beginning.
    watchers: Entries,
}

impl Heard {
    fn call<'a>(&'a self, module: &'a dyn Module) -> ModuleCall<'a> {
        ModuleCall { fqn: &self.fqn, type_name: self.type_name, module: Some(module) }
    }

    /// The module's hooks as they are now.
    fn entries(&self) -> Entries {
        let _old; // dropped when nothing is borrowed
        let mut table = self.entered.table.borrow_mut();
        _old = self.entered.hooks.sort(&mut table);
        table.node(self.node).entries()
    }

    fn before(&mut self, module: &dyn Module, inputs: &mut [Tensor]) -> anyhow::Result<()> {
        let entries = self.entries();
        let call = self.call(module);
        entries.iter().try_for_each(|entry| entry.forward_pre(&call, inputs))?;
        let tell = |entry: &Arc<Entry>| {
            entry.watch(|watcher| watcher.before_forward(&call, inputs)).unwrap_or(Ok(()))
        };
        let told = entries.iter().try_for_each(tell);
        self.watchers = entries;
        told
    }

    fn after(&self, module: &dyn Module, inputs: &[Tensor], outputs: &mut [Tensor]) -> anyhow::Result<()> {
        let call = self.call(module);
        let tell = |entry: &Arc<Entry>| {
            entry.watch(|watcher| watcher.after_forward(&call, outputs)).unwrap_or(Ok(()))
        };
        self.watchers.iter().try_for_each(tell)?;
        self.entries().iter().try_for_each(|entry| entry.forward(&call, inputs, outputs))
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        self.watchers.iter().rev().for_each(|entry| {
            entry.watch(|watcher| watcher.end());
        });
    }
}

/// A call in progress, until this is dropped.
struct Open {
    /// Those who have hooks for the module, outermost first.
    heard: Vec<Heard>,
    awaits: bool,
    is_taken: bool,
}

impl Open {
    /// A call of the module begins; `awaits` if its `forward` is still to come.
    fn begin(module: &dyn Module, awaits: bool) -> Self {
        let own = identity(module);
        let mut old = Vec::new(); // dropped when nothing is borrowed
        LISTENING.with_borrow_mut(|listening| {
            let place = listening.place.take();
            let mut heard = Vec::new();
            for entered in &listening.entered {
                let mut table = entered.table.borrow_mut();
                old.extend(entered.hooks.sort(&mut table));
                let mut open = entered.open.borrow_mut();
                let caller = open.last().copied().flatten();
                let node = table.find(own, caller, place);
                open.push(node.or(caller));
                let Some(node) = node else { continue };
                if table.note_heard(node) {
                    let (fqn, type_name) = (table.node(node).fqn.clone(), table.node(node).type_name);
                    heard.push(Heard {
                        entered: entered.clone(),
                        node,
                        fqn,
                        type_name,
                        watchers: Arc::new([]),
                    });
                }
            }
            let is_taken = listening.takers.iter().any(|taker| taker.takes(module));
            listening.frames.push(Frame { module: own, is_awaited: awaits, hooked: Vec::new() });
            Self { heard, awaits, is_taken }
        })
    }

    /// Whether nothing but the module's code is to run.
    fn is_plain(&self) -> bool {
        self.heard.is_empty() && !self.is_taken
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        LISTENING.with_borrow_mut(|listening| {
            listening.frames.pop();
            listening.place = None;
            for entered in &listening.entered {
                entered.open.borrow_mut().pop();
            }
        });
    }
}

/// A call that somebody has hooks for, or takes.
#[cold]
fn heard(
    module: &dyn Module,
    mut inputs: Vec<Tensor>,
    mut call: Open,
    body: Body,
) -> anyhow::Result<Vec<Tensor>> {
    let with_grad = ffi::grad_is_enabled();
    let mut backward = Vec::new();
    for heard in &mut call.heard {
        heard.before(module, &mut inputs)?;
        if with_grad {
            let call = BackwardCall::new(module, &heard.fqn, heard.type_name, &heard.entries());
            backward.extend(call.map(|call| call.take_inputs(&mut inputs)).transpose()?);
        }
    }
    let taker = LISTENING.with_borrow(|l| l.takers.iter().rev().find(|taker| taker.takes(module)).cloned());
    let mut outputs = match taker {
        Some(taker) => taker.call(module, &inputs, &|inputs| {
            LISTENING.with_borrow_mut(|listening| {
                listening.frames.last_mut().into_iter().for_each(|frame| frame.is_awaited = call.awaits);
            });
            body(inputs)
        })?,
        None => body(&inputs)?,
    };
    for heard in call.heard.iter().rev() {
        heard.after(module, &inputs, &mut outputs)?;
    }
    if !backward.is_empty() {
        hook_outputs(backward, &mut outputs)?;
    }
    Ok(outputs)
}

fn hook_outputs(backward: Vec<BackwardCall>, outputs: &mut [Tensor]) -> Result<()> {
    let mut hooked = LISTENING.with_borrow_mut(|listening| {
        listening.frames.last_mut().map(|frame| std::mem::take(&mut frame.hooked)).unwrap_or_default()
    });
    for call in backward.into_iter().rev() {
        call.take_outputs(outputs, &mut hooked)?;
    }
    LISTENING.with_borrow_mut(|listening| {
        let caller = listening.frames.iter_mut().rev().nth(1);
        caller.into_iter().for_each(|frame| frame.hooked.append(&mut hooked));
    });
    Ok(())
}

/// Ends the force of hooks on this thread when it is dropped.
pub(super) struct InForce;

impl InForce {
    /// Puts hooks in force, with the table of the modules.
    pub(super) fn begin(hooks: Arc<Registry>, table: Table) -> Self {
        let entered = Rc::new(Entered { hooks, table: RefCell::new(table), open: RefCell::new(Vec::new()) });
        LISTENING.with_borrow_mut(|listening| {
            listening.entered.push(entered);
            listening.update();
        });
        Self
    }
}

impl Drop for InForce {
    fn drop(&mut self) {
        let entered = LISTENING.with_borrow_mut(|listening| {
            let entered = listening.entered.pop();
            listening.update();
            entered
        });
        if let Some(entered) = entered {
            entered.hooks.keep(entered.table.take());
        }
    }
}

/// Calls of this thread's modules are offered to a taker until this is dropped.
pub(crate) struct Taken(Rc<dyn CallTaker>);

impl Taken {
    pub(crate) fn begin(taker: Rc<dyn CallTaker>) -> Self {
        LISTENING.with_borrow_mut(|listening| {
            listening.takers.push(taker.clone());
            listening.update();
        });
        Self(taker)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // a thread that ends may have dropped the list already
        let _ = LISTENING.try_with(|listening| {
            let mut listening = listening.borrow_mut();
            listening.takers.retain(|taker| !Rc::ptr_eq(taker, &self.0));
            listening.update();
        });
    }
}
