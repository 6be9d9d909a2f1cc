//! One hook of module calls: what it is for, and how it runs.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use tch::Tensor;

use crate::ffi::refuse_recording;
use crate::nn::calls::reach::unwrapped;
use crate::nn::calls::which::Which;
use crate::nn::module::Module;

/// The call that a hook runs for.
#[derive(Clone, Copy)]
pub struct ModuleCall<'a> {
    pub(super) fqn: &'a str,
    pub(super) type_name: &'static str,
    pub(super) module: Option<&'a dyn Module>,
}

impl<'a> ModuleCall<'a> {
    /// The module's fqn; empty for the root.
    pub fn fqn(&self) -> &'a str {
        self.fqn
    }

    /// Name of the module's type, such as `Conv2d`.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// The module. `None` in a backward pass that runs outside of [`ModuleHooks::within`](crate::nn::ModuleHooks::within) or on
    /// another thread.
    pub fn module(&self) -> Option<&'a dyn Module> {
        self.module
    }

    /// The module as the type that it is.
    pub fn module_as<M: Module>(&self) -> Option<&'a M> {
        self.module.and_then(unwrapped)
    }
}

/// Follows calls without changing them: sizes, times. It may be left out where a graph is replayed.
pub(crate) trait CallWatcher: Send {
    /// A call begins. Whatever comes of it, `end` follows.
    fn before_forward(&mut self, _call: &ModuleCall<'_>, _inputs: &[Tensor]) -> anyhow::Result<()> {
        Ok(())
    }

    /// It gave these outputs.
    fn after_forward(&mut self, _call: &ModuleCall<'_>, _outputs: &[Tensor]) -> anyhow::Result<()> {
        Ok(())
    }

    /// It is over, perhaps by an error or a panic.
    fn end(&mut self) {}
}

pub(super) type ForwardPreFn = dyn FnMut(&ModuleCall<'_>, &mut [Tensor]) -> anyhow::Result<()> + Send;
pub(super) type ForwardFn = dyn FnMut(&ModuleCall<'_>, &[Tensor], &mut [Tensor]) -> anyhow::Result<()> + Send;
pub(super) type BackwardPreFn =
    dyn FnMut(&ModuleCall<'_>, &mut [Option<Tensor>]) -> anyhow::Result<()> + Send;
pub(super) type BackwardFn =
    dyn FnMut(&ModuleCall<'_>, &mut [Option<Tensor>], &[Option<Tensor>]) -> anyhow::Result<()> + Send;

pub(super) enum Hook {
    ForwardPre(Mutex<Box<ForwardPreFn>>),
    Forward(Mutex<Box<ForwardFn>>),
    BackwardPre(Mutex<Box<BackwardPreFn>>),
    Backward(Mutex<Box<BackwardFn>>),
    Watcher(Mutex<Box<dyn CallWatcher>>),
}

/// A hook that was registered.
pub(super) struct Entry {
    pub(super) id: u64,
    pub(super) which: Which,
    pub(super) hook: Hook,
    /// A module that it is for was called.
    pub(super) was_called: AtomicBool,
    /// Of a full backward pre-hook: it waits for the beginning alone, not for gradients.
    pub(super) begins: AtomicBool,
}

thread_local!(static RUNNING: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) });

/// A hook that runs on this thread.
struct Running;

impl Running {
    fn begin(id: u64) -> Self {
        RUNNING.with_borrow_mut(|running| running.push(id));
        Self
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.with_borrow_mut(|running| running.pop());
    }
}

impl Entry {
    /// What PyTorch calls it.
    pub(super) fn kind(&self) -> &'static str {
        match self.hook {
            Hook::ForwardPre(_) => "forward pre-hook",
            Hook::Forward(_) => "forward hook",
            Hook::BackwardPre(_) => "full backward pre-hook",
            Hook::Backward(_) => "full backward hook",
            Hook::Watcher(_) => "watcher",
        }
    }

    pub(super) fn note_call(&self) {
        self.was_called.store(true, Ordering::Relaxed);
    }

    /// Runs the hook, unless it is running already: a hook that calls modules is not called for these.
    fn run<H: ?Sized>(
        &self,
        hook: &Mutex<Box<H>>,
        call: &ModuleCall<'_>,
        body: impl FnOnce(&mut H) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        if RUNNING.with_borrow(|running| running.contains(&self.id)) {
            return Ok(());
        }
        let name = if call.fqn.is_empty() { call.type_name } else { call.fqn };
        refuse_recording(&format!(
            "a {} of {name} ran, which a replay would not call; put graphs on the modules below or above it, or remove the hook",
            self.kind()
        ));
        let _running = Running::begin(self.id);
        let mut hook = hook.lock().unwrap_or_else(PoisonError::into_inner);
        body(&mut **hook).with_context(|| format!("{} of {name} ({})", self.kind(), call.type_name))
    }

    pub(super) fn forward_pre(&self, call: &ModuleCall<'_>, inputs: &mut [Tensor]) -> anyhow::Result<()> {
        let Hook::ForwardPre(hook) = &self.hook else { return Ok(()) };
        self.run(hook, call, |hook| hook(call, inputs))
    }

    pub(super) fn forward(
        &self,
        call: &ModuleCall<'_>,
        inputs: &[Tensor],
        outputs: &mut [Tensor],
    ) -> anyhow::Result<()> {
        let Hook::Forward(hook) = &self.hook else { return Ok(()) };
        self.run(hook, call, |hook| hook(call, inputs, outputs))
    }

    pub(super) fn backward_pre(
        &self,
        call: &ModuleCall<'_>,
        grad_outputs: &mut [Option<Tensor>],
    ) -> anyhow::Result<()> {
        let Hook::BackwardPre(hook) = &self.hook else { return Ok(()) };
        self.run(hook, call, |hook| hook(call, grad_outputs))
    }

    pub(super) fn backward(
        &self,
        call: &ModuleCall<'_>,
        grad_inputs: &mut [Option<Tensor>],
        grad_outputs: &[Option<Tensor>],
    ) -> anyhow::Result<()> {
        let Hook::Backward(hook) = &self.hook else { return Ok(()) };
        self.run(hook, call, |hook| hook(call, grad_inputs, grad_outputs))
    }

    /// Tells a watcher.
    pub(super) fn watch<R>(&self, body: impl FnOnce(&mut dyn CallWatcher) -> R) -> Option<R> {
        let Hook::Watcher(watcher) = &self.hook else { return None };
        Some(body(&mut **watcher.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}
