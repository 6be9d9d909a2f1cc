//! What follows the calls of modules on this thread: hooks and interceptors, and the calls in progress.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use crate::error::{ModuleError, Problem, Result};
use crate::nn::calls::backward::Hooked;
use crate::nn::calls::entry::{Entry, ModuleCall};
use crate::nn::calls::reach::{Reach, innermost};
use crate::nn::calls::recompute::{count_recomputation, is_recomputing};
use crate::nn::calls::registry::Registry;
use crate::nn::calls::surroundings::Surroundings;
use crate::nn::calls::table::{Entries, Table};
use crate::nn::module::{Identity, Module, ModuleCode, identity};

/// A module's code on tensors one by one.
pub(crate) type Body<'a> = &'a dyn Fn(&[Tensor]) -> anyhow::Result<Vec<Tensor>>;

/// Where an interceptor stands among those of one call, the outermost first. Of one level, the interceptor that was registered last
/// is the outermost, as the decorator that was applied last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InterceptorLevel {
    /// Decides what is kept for the backward pass: activation checkpointing, offload of activations.
    Activations,
    /// Runs the code by a graph.
    Graph,
    /// Changes the numbers that the code computes in: autocast, fp8.
    Precision,
}

/// Runs around the calls of some modules, as a decorator of their `forward` does: it gets each call and what comes next, the
/// interceptors within it and then the module's code. Hooks of the module run around all interceptors.
///
/// ```
/// use std::cell::Cell;
/// use std::rc::Rc;
///
/// use voltaic::nn::{
///     intercept_calls, CallInterceptor, Callable, InterceptorLevel, Linear, Module, Next,
/// };
/// use voltaic::{Kind, Tensor};
///
/// #[derive(Default)]
/// struct CountLinears(Cell<u64>);
///
/// impl CallInterceptor for CountLinears {
///     fn level(&self) -> InterceptorLevel {
///         InterceptorLevel::Activations
///     }
///
///     fn intercepts(&self, module: &dyn Module) -> bool {
///         module.downcast_ref::<Linear>().is_ok()
///     }
///
///     fn call(&self, _: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
///         self.0.set(self.0.get() + 1);
///         next.run(inputs)
///     }
/// }
///
/// # fn main() -> anyhow::Result<()> {
/// let (net, calls) = (Linear::new(4, 2)?, Rc::new(CountLinears::default()));
/// let handle = intercept_calls(calls.clone());
/// net.call(&Tensor::ones([3, 4], (Kind::Float, tch::Device::Cpu)))?;
/// assert_eq!(calls.0.get(), 1);
/// drop(handle);
/// # Ok(())
/// # }
/// ```
pub trait CallInterceptor {
    /// Where it stands among the interceptors of a call.
    fn level(&self) -> InterceptorLevel;

    /// Whether it runs around the calls of this module.
    fn intercepts(&self, module: &dyn Module) -> bool;

    /// Whether a call does the same with it and without it, as one by a graph does. What others change is part of what a graph is
    /// captured under, so that graphs from before they were registered are not used.
    fn is_transparent(&self) -> bool {
        false
    }

    /// The call: usually [`next.run`](Next::run), with something before, after or in place of it.
    ///
    /// # Errors
    /// Those of the module's code and of its own; they are errors of the call.
    fn call(&self, module: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>>;
}

/// An interceptor of this thread.
#[derive(Clone)]
pub(super) struct Registered {
    id: u64,
    level: InterceptorLevel,
    interceptor: Rc<dyn CallInterceptor>,
}

/// Registers an interceptor for the calls of this thread's modules, until the handle is dropped.
pub fn intercept_calls(interceptor: Rc<dyn CallInterceptor>) -> InterceptorHandle {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (id, level) = (COUNT.fetch_add(1, Ordering::Relaxed), interceptor.level());
    LISTENERS.with_borrow_mut(|listeners| {
        let at = listeners.interceptors.partition_point(|known| known.level < level);
        listeners.interceptors.insert(at, Registered { id, level, interceptor });
        listeners.update();
    });
    InterceptorHandle { id, _of_this_thread: PhantomData }
}

/// Removes an interceptor when it is dropped; calls that have begun still run it.
#[derive(Debug)]
#[must_use = "the interceptor is removed when this is dropped"]
pub struct InterceptorHandle {
    id: u64,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for InterceptorHandle {
    fn drop(&mut self) {
        // a thread that ends may have dropped the list already; what an interceptor owns is dropped when nothing is borrowed
        let removed = LISTENERS.try_with(|listeners| {
            let mut listeners = listeners.borrow_mut();
            let at = listeners.interceptors.iter().position(|known| known.id == self.id);
            let removed = at.map(|at| listeners.interceptors.remove(at));
            listeners.update();
            removed
        });
        drop(removed);
    }
}

/// The interceptors of this thread with which calls do something else, the outermost first.
pub(crate) fn interceptors_now() -> Vec<u64> {
    if !has_listeners() {
        return Vec::new();
    }
    LISTENERS.with_borrow(|listeners| {
        let own = listeners.interceptors.iter().filter(|known| !known.interceptor.is_transparent());
        own.map(|known| known.id).collect()
    })
}

/// What comes next in a call: the interceptors within this one, then the module's code.
pub struct Next<'a> {
    module: &'a dyn Module,
    chain: &'a [Registered],
    body: Body<'a>,
    code: Option<ModuleCode>,
    /// Those of the call.
    inputs: &'a [Tensor],
}

impl Next<'_> {
    /// Runs it. An interceptor may do so several times, or not at all.
    ///
    /// # Errors
    /// Those of the interceptors and of the module's code.
    pub fn run(&self, inputs: &[Tensor]) -> anyhow::Result<Vec<Tensor>> {
        match self.chain.split_first() {
            Some((first, chain)) => first.interceptor.call(self.module, inputs, &Next { chain, ..*self }),
            None => (self.body)(inputs),
        }
    }

    /// A function that runs the rest of the chain again after the call, such as in the backward pass: under the autocast, the recipe for
    /// fp8 and with the random numbers that hold when this is called, so before [`Next::run`]. Afterwards all is as it was.
    ///
    /// # Errors
    /// [`ModuleError::Hook`] for a call of attention with several inputs or a mask: these cannot be repeated from the module alone.
    pub fn recompute_fn(&self) -> Result<RecomputeFn> {
        let surroundings = Some(Arc::new(Surroundings::of(self.inputs)?));
        Ok(RecomputeFn { surroundings, ..self.recompute_code()? })
    }

    /// [`Next::recompute_fn`] under what holds when it runs.
    pub(crate) fn recompute_code(&self) -> Result<RecomputeFn> {
        let Some(code) = self.code else {
            let what =
                format!("a call of {} with several inputs cannot be run again", self.module.type_name());
            let remedy = "intercept the calls of a module around it".to_owned();
            return Err(ModuleError::Hook { problem: Problem::new(what, remedy) }.into());
        };
        let inner = self.chain.iter().map(|known| known.id).collect();
        let (module, type_name) = (Reach::of(self.module), self.module.type_name());
        Ok(RecomputeFn { module, type_name, code, inner, surroundings: None })
    }
}

impl fmt::Debug for Next<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Next({} interceptors, then {})", self.chain.len(), self.module.type_name())
    }
}

/// The code of a call, to be run again: a checkpoint's segment. It keeps no reference to the module, and finds it in the tree that
/// the trainer or [`ModuleHooks::within`](crate::nn::ModuleHooks::within) lends to the thread at that time.
///
/// Within the module its hooks and interceptors run as in any call; of the module itself only those interceptors that were within
/// the one that asked for this. A strategy that shards weights unshards the module's own for the time.
#[derive(Debug, Clone)]
pub struct RecomputeFn {
    module: Reach,
    type_name: &'static str,
    code: ModuleCode,
    inner: Vec<u64>,
    /// Those of the forward pass; none leaves them as they are.
    surroundings: Option<Arc<Surroundings>>,
}

impl RecomputeFn {
    /// Runs the code on these inputs.
    ///
    /// # Errors
    /// [`ModuleError::Hook`] if the module is not in the tree that is lent; those of the code.
    pub fn run(&self, inputs: &[Tensor]) -> anyhow::Result<Vec<Tensor>> {
        match &self.surroundings {
            Some(surroundings) => surroundings.within(|| self.run_code(inputs)),
            None => self.run_code(inputs),
        }
    }

    fn run_code(&self, inputs: &[Tensor]) -> anyhow::Result<Vec<Tensor>> {
        self.module.with(|module| {
            let Some(module) = module else {
                let what = format!("{} cannot be run again: it is not in the tree of modules", self.type_name);
                let remedy = "leave it where it was, and run backward within ModuleHooks::within(&root, ..), as the trainer does";
                return Err(ModuleError::Hook { problem: Problem::new(what, remedy.to_owned()) }.into());
            };
            let mut call = OpenCall::begin(module, true);
            call.chain.retain(|known| self.inner.contains(&known.id));
            for hooks in &mut call.hooks {
                hooks.watch(hooks.entries(), module, inputs)?; // a strategy unshards the module's own weights
            }
            call.run(module, inputs, &|inputs| (self.code)(module, inputs), Some(self.code))
        })
    }
}

/// The hooks of one owner that are active on this thread.
pub(super) struct ActiveScope {
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

struct Listeners {
    scopes: Vec<Rc<ActiveScope>>,
    /// The outermost first.
    interceptors: Vec<Registered>,
    frames: Vec<Frame>,
    /// Where the next module that is called lies in its caller.
    place: Option<usize>,
}

impl Listeners {
    const fn new() -> Self {
        Self { scopes: Vec::new(), interceptors: Vec::new(), frames: Vec::new(), place: None }
    }

    fn update(&self) {
        HAS_LISTENERS.set(!self.scopes.is_empty() || !self.interceptors.is_empty() || is_recomputing());
    }
}

thread_local! {
    static HAS_LISTENERS: Cell<bool> = const { Cell::new(false) };
    static LISTENERS: RefCell<Listeners> = const { RefCell::new(Listeners::new()) };
}

/// A recomputation on this thread, until this is dropped.
pub(crate) struct Recomputing {
    _of_this_thread: PhantomData<*const ()>,
}

impl Recomputing {
    pub(crate) fn begin() -> Self {
        count_recomputation(true);
        LISTENERS.with_borrow(Listeners::update);
        Self { _of_this_thread: PhantomData }
    }
}

impl Drop for Recomputing {
    fn drop(&mut self) {
        count_recomputation(false);
        LISTENERS.with_borrow(Listeners::update);
    }
}

/// Whether hooks or interceptors are active on this thread, or it recomputes a segment.
#[inline]
pub(super) fn has_listeners() -> bool {
    HAS_LISTENERS.get()
}

/// The call that `body` makes is of the module at `place` of its caller.
#[inline]
pub(crate) fn at_place<R>(place: usize, body: impl FnOnce() -> R) -> R {
    if has_listeners() {
        LISTENERS.with_borrow_mut(|listeners| listeners.place = Some(place));
    }
    body()
}

/// The code of the module whose call is in progress is still to come: so far the call ran a wrapper's `forward`.
#[inline]
pub(crate) fn await_forward(module: &dyn Module) {
    if has_listeners() {
        let module = identity(module);
        LISTENERS.with_borrow_mut(|listeners| {
            let frame = listeners.frames.last_mut();
            frame.into_iter().for_each(|frame| frame.is_awaited |= frame.module == module);
        });
    }
}

/// Whether this `forward` is the call in progress.
#[cold]
pub(super) fn is_awaited(module: &dyn Module) -> bool {
    let module = identity(module);
    LISTENERS.with_borrow_mut(|listeners| match listeners.frames.last_mut() {
        Some(frame) if frame.module == module => std::mem::take(&mut frame.is_awaited),
        _ => false,
    })
}

/// The hooks that one owner has for a call in progress, until this is dropped.
pub(super) struct CallHooks {
    scope: Rc<ActiveScope>,
    node: usize,
    pub(super) fqn: Arc<str>,
    pub(super) type_name: &'static str,
    /// Those that were called at the beginning, and get the end.
    watchers: Entries,
}

impl CallHooks {
    fn call<'a>(&'a self, module: &'a dyn Module) -> ModuleCall<'a> {
        ModuleCall { fqn: &self.fqn, type_name: self.type_name, module: Some(module) }
    }

    /// The module's hooks as they are now.
    pub(super) fn entries(&self) -> Entries {
        let _old; // dropped when nothing is borrowed
        let mut table = self.scope.table.borrow_mut();
        _old = self.scope.hooks.sort(&mut table);
        table.node(self.node).entries()
    }

    pub(super) fn before(&mut self, module: &dyn Module, inputs: &mut [Tensor]) -> anyhow::Result<()> {
        let entries = self.entries();
        let call = self.call(module);
        entries.iter().try_for_each(|entry| entry.forward_pre(&call, inputs))?;
        self.watch(entries, module, inputs)
    }

    /// Tells those that follow calls that this one begins; they hear of its end when this is dropped.
    fn watch(&mut self, entries: Entries, module: &dyn Module, inputs: &[Tensor]) -> anyhow::Result<()> {
        let call = self.call(module);
        let watch = |entry: &Arc<Entry>| {
            entry.watch(|watcher| watcher.before_forward(&call, inputs)).unwrap_or(Ok(()))
        };
        let watched = entries.iter().try_for_each(watch);
        self.watchers = entries;
        watched
    }

    pub(super) fn after(
        &self,
        module: &dyn Module,
        inputs: &[Tensor],
        outputs: &mut [Tensor],
    ) -> anyhow::Result<()> {
        let call = self.call(module);
        let watch = |entry: &Arc<Entry>| {
            entry.watch(|watcher| watcher.after_forward(&call, outputs)).unwrap_or(Ok(()))
        };
        self.watchers.iter().try_for_each(watch)?;
        self.entries().iter().try_for_each(|entry| entry.forward(&call, inputs, outputs))
    }
}

impl Drop for CallHooks {
    fn drop(&mut self) {
        self.watchers.iter().rev().for_each(|entry| {
            entry.watch(|watcher| watcher.end());
        });
    }
}

/// A call in progress, until this is dropped.
pub(super) struct OpenCall {
    /// The hooks for the module, of the outermost scope first.
    pub(super) hooks: Vec<CallHooks>,
    /// The interceptors of the module, the outermost first.
    chain: Vec<Registered>,
    awaits: bool,
}

impl OpenCall {
    /// A call of the module begins; `awaits` if its `forward` is still to come.
    pub(super) fn begin(module: &dyn Module, awaits: bool) -> Self {
        let own = identity(module);
        let mut old = Vec::new(); // dropped when nothing is borrowed
        let (mut call, interceptors) = LISTENERS.with_borrow_mut(|listeners| {
            let place = listeners.place.take();
            let mut hooks = Vec::new();
            for scope in &listeners.scopes {
                let mut table = scope.table.borrow_mut();
                old.extend(scope.hooks.sort(&mut table));
                let mut open = scope.open.borrow_mut();
                let caller = open.last().copied().flatten();
                let node = table.find(own, caller, place);
                open.push(node.or(caller));
                let Some(node) = node else { continue };
                if table.note_call(node) {
                    let (fqn, type_name) = (table.node(node).fqn.clone(), table.node(node).type_name);
                    hooks.push(CallHooks {
                        scope: scope.clone(),
                        node,
                        fqn,
                        type_name,
                        watchers: Arc::new([]),
                    });
                }
            }
            listeners.frames.push(Frame { module: own, is_awaited: awaits, hooked: Vec::new() });
            (Self { hooks, awaits, chain: Vec::new() }, listeners.interceptors.clone())
        });
        call.chain = interceptors; // code of others runs when nothing is borrowed, and may fail
        if !call.chain.is_empty() {
            let module = innermost(module);
            call.chain.retain(|known| known.interceptor.intercepts(module));
        }
        call
    }

    /// Whether nothing but the module's code is to run.
    pub(super) fn is_plain(&self) -> bool {
        self.hooks.is_empty() && self.chain.is_empty()
    }

    /// Runs the interceptors, and within them the code.
    pub(super) fn run(
        &self,
        module: &dyn Module,
        inputs: &[Tensor],
        body: Body,
        code: Option<ModuleCode>,
    ) -> anyhow::Result<Vec<Tensor>> {
        if self.chain.is_empty() {
            return body(inputs);
        }
        let body = |inputs: &[Tensor]| {
            LISTENERS.with_borrow_mut(|listeners| {
                listeners.frames.last_mut().into_iter().for_each(|frame| frame.is_awaited = self.awaits);
            });
            body(inputs)
        };
        Next { module: innermost(module), chain: &self.chain, body: &body, code, inputs }.run(inputs)
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        LISTENERS.with_borrow_mut(|listeners| {
            listeners.frames.pop();
            listeners.place = None;
            for scope in &listeners.scopes {
                scope.open.borrow_mut().pop();
            }
        });
    }
}

/// Runs `body` with the outputs of calls within the one in progress that have a hook for their gradient. What is left of them is
/// the caller's then.
pub(super) fn with_hooked<R>(body: impl FnOnce(&mut Vec<Hooked>) -> R) -> R {
    let mut hooked = LISTENERS.with_borrow_mut(|listeners| {
        listeners.frames.last_mut().map(|frame| std::mem::take(&mut frame.hooked)).unwrap_or_default()
    });
    let result = body(&mut hooked);
    LISTENERS.with_borrow_mut(|listeners| {
        let caller = listeners.frames.iter_mut().rev().nth(1);
        caller.into_iter().for_each(|frame| frame.hooked.append(&mut hooked));
    });
    result
}

/// Whether these hooks are active on this thread for the tree of `root`.
pub(super) fn is_active(hooks: &Arc<Registry>, root: &dyn Module) -> bool {
    LISTENERS.with_borrow(|listeners| {
        let mut scopes = listeners.scopes.iter();
        scopes.any(|scope| Arc::ptr_eq(&scope.hooks, hooks) && scope.table.borrow().is_of(root))
    })
}

/// Hooks are active on this thread until this is dropped.
pub(super) struct ActiveHooks;

impl ActiveHooks {
    /// Activates hooks, with the table of the modules.
    pub(super) fn begin(hooks: Arc<Registry>, table: Table) -> Self {
        let scope =
            Rc::new(ActiveScope { hooks, table: RefCell::new(table), open: RefCell::new(Vec::new()) });
        LISTENERS.with_borrow_mut(|listeners| {
            listeners.scopes.push(scope);
            listeners.update();
        });
        Self
    }
}

impl Drop for ActiveHooks {
    fn drop(&mut self) {
        let scope = LISTENERS.with_borrow_mut(|listeners| {
            let scope = listeners.scopes.pop();
            listeners.update();
            scope
        });
        if let Some(scope) = scope {
            scope.hooks.keep(scope.table.take());
        }
    }
}
