//! Hooks of module calls, as PyTorch's `register_forward_hook` and its kin.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tch::Tensor;

use crate::error::{ModuleError, Problem, Result};
use crate::ffi::{Lent, SingleThreadedEngine};
use crate::nn::calls::active::{ActiveHooks, is_active};
use crate::nn::calls::entry::{CallWatcher, Entry, Hook, ModuleCall};
use crate::nn::calls::reach::ROOT;
use crate::nn::calls::registry::Registry;
use crate::nn::calls::table::{Node, Table};
use crate::nn::calls::which::Which;
use crate::nn::module::Module;

/// Hooks of the calls of modules, by fqn, by type, or of all. Clones share them.
///
/// Hooks belong to the code that runs the modules, not to the modules: a trainer has its own (`Trainer::module_hooks`,
/// `HookContext::module_hooks`), which are active in its steps. In a loop of your own they are active
/// [`within`](Self::within):
///
/// ```
/// use voltaic::nn::{Callable, Linear, ModuleHooks, Relu, Sequential};
/// use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = Sequential::new().add(Linear::new(4, 8)?).add(Relu).add(Linear::new(8, 2)?);
/// let hooks = ModuleHooks::new();
/// let handle = hooks.register_forward_hook("2", |call, inputs, outputs| {
///     println!("{} ({}): {:?} to {:?}", call.fqn(), call.type_name(), inputs[0].size(), outputs[0].size());
///     outputs[0] = outputs[0].f_clamp(-1.0, 1.0)?; // what the caller gets
///     Ok(())
/// });
/// let input = Tensor::ones([3, 4], (Kind::Float, tch::Device::Cpu));
/// hooks.within(&net, || net.call(&input))??;
/// handle.remove();
/// # Ok(())
/// # }
/// ```
///
/// Hooks run if a module is called by [`call`](crate::nn::Callable::call); for voltaic's own layers and models by `forward`, too. Hooks run in the order in which they were registered, as in PyTorch: those before the forward pass, the
/// module's code, those after it. An error of a hook is an error of the call, and a hook that calls modules is not called for
/// these.
///
/// While a graph is captured a hook refuses the capture, since a replay would not call it: what it is in runs as usual. Hooks
/// of a module that is itself replayed run around each replay.
///
/// Source: `torch.nn.Module.register_forward_pre_hook`, `register_forward_hook`, `register_full_backward_pre_hook`,
/// `register_full_backward_hook`.
#[derive(Clone, Default)]
pub struct ModuleHooks {
    shared: Arc<Registry>,
}

/// Removes a hook. The hook stays if this is dropped.
#[derive(Clone)]
#[must_use = "a hook stays until remove() is called; say `let _ = ..` if it shall stay for good"]
pub struct RemovableHandle {
    shared: Weak<Registry>,
    id: u64,
}

impl RemovableHandle {
    /// Removes the hook; nothing happens if it is gone already. Calls that have begun still run it.
    pub fn remove(&self) {
        if let Some(shared) = self.shared.upgrade() {
            let mut entries = shared.entries();
            let removed: Vec<_> = entries.extract_if(.., |entry| entry.id == self.id).collect();
            shared.note_change();
            drop(entries);
            drop(removed); // what the hook owns may do anything when it is dropped
        }
    }
}

impl ModuleHooks {
    /// No hooks yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Calls `hook` before the forward pass of the modules, with the inputs, which it may replace.
    pub fn register_forward_pre_hook(
        &self,
        which: impl Into<Which>,
        hook: impl FnMut(&ModuleCall<'_>, &mut [Tensor]) -> anyhow::Result<()> + Send + 'static,
    ) -> RemovableHandle {
        self.register(which.into(), Hook::ForwardPre(Mutex::new(Box::new(hook))))
    }

    /// Calls `hook` after the forward pass of the modules, with inputs and outputs; it may replace the outputs.
    pub fn register_forward_hook(
        &self,
        which: impl Into<Which>,
        hook: impl FnMut(&ModuleCall<'_>, &[Tensor], &mut [Tensor]) -> anyhow::Result<()> + Send + 'static,
    ) -> RemovableHandle {
        self.register(which.into(), Hook::Forward(Mutex::new(Box::new(hook))))
    }

    /// Calls `hook` in the backward pass when the gradients of the modules' outputs are there, which it may replace.
    pub fn register_full_backward_pre_hook(
        &self,
        which: impl Into<Which>,
        hook: impl FnMut(&ModuleCall<'_>, &mut [Option<Tensor>]) -> anyhow::Result<()> + Send + 'static,
    ) -> RemovableHandle {
        self.register(which.into(), Hook::BackwardPre(Mutex::new(Box::new(hook))))
    }

    /// Like the above, but modules may go uncalled, and no gradients are needed: it is called without some if a
    /// module's output was a view that was changed in place.
    pub(crate) fn register_backward_pre_hook_if_called(
        &self,
        which: impl Into<Which>,
        hook: impl FnMut(&ModuleCall<'_>, &mut [Option<Tensor>]) -> anyhow::Result<()> + Send + 'static,
    ) -> RemovableHandle {
        let handle = self.register_full_backward_pre_hook(which, hook);
        let entries = self.shared.entries();
        let own = entries.iter().filter(|entry| entry.id == handle.id);
        own.for_each(|entry| {
            entry.was_called.store(true, Ordering::Relaxed);
            entry.begins.store(true, Ordering::Relaxed);
        });
        drop(entries);
        handle
    }

    /// Calls `hook` in the backward pass when the gradients of the modules' inputs are there, with these, which it may
    /// replace, and those of the outputs. If no input has a gradient, it is called when those of the outputs are there.
    ///
    /// Layers may still change inputs and outputs in place, unlike under PyTorch's hook. For a module of several inputs or
    /// outputs this holds for tensors that are not views.
    pub fn register_full_backward_hook(
        &self,
        which: impl Into<Which>,
        hook: impl FnMut(&ModuleCall<'_>, &mut [Option<Tensor>], &[Option<Tensor>]) -> anyhow::Result<()>
        + Send
        + 'static,
    ) -> RemovableHandle {
        self.register(which.into(), Hook::Backward(Mutex::new(Box::new(hook))))
    }

    /// Lets `watcher` follow the calls.
    pub(crate) fn watch(
        &self,
        which: impl Into<Which>,
        watcher: impl CallWatcher + 'static,
    ) -> RemovableHandle {
        self.register(which.into(), Hook::Watcher(Mutex::new(Box::new(watcher))))
    }

    fn register(&self, which: Which, hook: Hook) -> RemovableHandle {
        let id = self.shared.count.fetch_add(1, Ordering::Relaxed);
        self.shared.entries().push(Arc::new(Entry {
            id,
            which,
            hook,
            was_called: AtomicBool::new(false),
            begins: AtomicBool::new(false),
        }));
        self.shared.note_change();
        RemovableHandle { shared: Arc::downgrade(&self.shared), id }
    }

    /// Whether there are no hooks.
    pub fn is_empty(&self) -> bool {
        self.shared.entries().is_empty()
    }

    /// Runs `body`, such as one step, with the hooks active on this thread for `root` and the modules below it. Within another
    /// scope those of both run, once each. [`RecomputeFn`](crate::nn::RecomputeFn) finds its module in the innermost scope. Backward passes
    /// run on this thread, also those on a device.
    ///
    /// # Errors
    /// [`ModuleError::Hook`] if a hook is for a module that `root` does not have; then `body` does not run.
    pub fn within<R>(&self, root: &dyn Module, body: impl FnOnce() -> R) -> Result<R> {
        let _engine = SingleThreadedEngine::enter()?;
        if self.is_empty() || is_active(&self.shared, root) {
            return Ok(Lent::lend(&ROOT, root, body));
        }
        let mut table = self.shared.table().take().unwrap_or_default();
        table.refresh(root);
        let is_new = table.version().is_none();
        drop(self.shared.sort(&mut table));
        if is_new {
            self.check(&table, root)?;
        }
        let _active = ActiveHooks::begin(self.shared.clone(), table);
        Ok(Lent::lend(&ROOT, root, body))
    }

    /// Refuses hooks of modules that are not there.
    fn check(&self, table: &Table, root: &dyn Module) -> Result<()> {
        for entry in self.shared.entries().iter() {
            let is_for = |node: &Node| node.entries().iter().any(|known| known.id == entry.id);
            if table.nodes().iter().any(is_for) {
                continue;
            }
            let name = root.type_name();
            let what = format!("{name} has no module for a {} of {}", entry.kind(), entry.which);
            let names = table.nodes().iter().map(|node| &*node.fqn).filter(|fqn| !fqn.is_empty());
            let names = names.take(20).collect::<Vec<_>>().join(", ");
            let more = if table.nodes().len() > 21 { ", .." } else { "" };
            let remedy = format!("register it for one of: {names}{more}");
            return Err(ModuleError::Hook { problem: Problem::new(what, remedy) }.into());
        }
        Ok(())
    }

    /// The fqn of modules that hooks are for and that no call within the scopes so far was made of, though the hook was not
    /// called for another module either. Their code may have run by `forward`; hooks run for `call`.
    pub fn never_called(&self) -> Vec<String> {
        let table = self.shared.table();
        let uncalled = table.iter().flat_map(Table::uncalled);
        uncalled.flat_map(|(_, nodes)| nodes.into_iter().map(|node| node.fqn.to_string())).collect()
    }

    /// After a first step: an error for a hook of a module that was run past its hooks, which is seen by the modules below
    /// it that were called; a warning for one that was not run at all.
    pub(crate) fn check_called(&self) -> Result<()> {
        let version = self.shared.version();
        if self.shared.checked.swap(version + 1, Ordering::Relaxed) == version + 1 || version == 0 {
            return Ok(());
        }
        let table = self.shared.table();
        let Some(table) = &*table else { return Ok(()) };
        for (entry, nodes) in table.uncalled() {
            let Some(node) = nodes.first() else { continue };
            let name = if node.fqn.is_empty() { "the module itself" } else { &*node.fqn };
            let name = format!("{name} ({})", node.type_name);
            let passed = nodes.iter().find(|node| table.was_called_below(node));
            match passed {
                Some(_) if entry.which.is_exact() => {
                    let what = format!(
                        "the {} of {name} was not called in the first step, though modules below it were",
                        entry.kind()
                    );
                    let remedy = "call it by `.call(&input)` (trait Callable) in place of `.forward(&input)`, or register the hook for a module that is called";
                    return Err(ModuleError::Hook { problem: Problem::new(what, remedy) }.into());
                }
                _ => tracing::warn!(
                    "the {} of {} was not called in the first step: no call of {name} was made; hooks run for `.call(&input)`, and for `.forward(&input)` of voltaic's own layers",
                    entry.kind(),
                    entry.which
                ),
            }
        }
        Ok(())
    }
}

impl fmt::Debug for ModuleHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModuleHooks({})", self.shared.entries().len())
    }
}

impl fmt::Debug for RemovableHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemovableHandle({})", self.id)
    }
}
