//! Switches and hooks of libtorch's autograd engine.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::{Error, ModuleError, Problem, TorchError};
use crate::ffi::check::{check, panic_text, pointers};
use crate::ffi::graph::recording::refuse_recording;

/// Whether backward hands work to the engine's per-device threads. Holds for the calling thread.
///
/// Off is faster on one device: the hop to the device thread costs more than it saves.
pub fn set_engine_multithreading(enabled: bool) -> Result<(), TorchError> {
    // SAFETY: takes a plain integer and changes this thread's autograd state only.
    check("set_multithreading_enabled", unsafe { sys::vt_autograd_set_multithreading(enabled.into()) })
}

/// Whether backward hands work to the engine's per-device threads, for the calling thread.
pub fn engine_multithreading() -> Result<bool, TorchError> {
    let mut enabled = 0;
    // SAFETY: the out-pointer is a valid i32 on this stack.
    check("get_multithreading_enabled", unsafe { sys::vt_autograd_is_multithreading(&mut enabled) })?;
    Ok(enabled != 0)
}

/// Backward runs on the calling thread while this lives: the hop to the engine's device threads costs more than it saves on one device, and
/// what belongs to the calling thread is not found there.
#[derive(Debug)]
#[must_use = "it ends when this is dropped"]
pub struct SingleThreadedEngine {
    was_multithreaded: bool,
    /// Of the calling thread.
    _thread: PhantomData<*const ()>,
}

impl SingleThreadedEngine {
    /// Begins it.
    ///
    /// # Errors
    /// libtorch's.
    ///
    /// Source: `torch.autograd.set_multithreading_enabled(False)`.
    pub fn enter() -> Result<Self, TorchError> {
        let was_multithreaded = engine_multithreading()?;
        set_engine_multithreading(false)?;
        Ok(Self { was_multithreaded, _thread: PhantomData })
    }
}

impl Drop for SingleThreadedEngine {
    fn drop(&mut self) {
        if let Err(error) = set_engine_multithreading(self.was_multithreaded) {
            tracing::warn!("autograd's threads could not be switched back: {error}");
        }
    }
}

/// Drops the gradients of the tensors (PyTorch's `zero_grad(set_to_none=True)`).
pub fn clear_grads<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<(), TorchError> {
    let tensors = pointers(tensors);
    // SAFETY: the pointers belong to tensors borrowed for this call.
    check("clear_grads", unsafe { sys::vt_grads_clear(tensors.as_ptr(), tensors.len()) })
}

/// Gives a leaf a gradient, in place of the one it has. Nothing checks that it fits: it is of use once shape and device are the leaf's.
///
/// # Errors
/// libtorch's.
pub fn set_grad(leaf: &Tensor, grad: &Tensor) -> Result<(), TorchError> {
    // SAFETY: both tensors are borrowed for the call.
    check("set_grad", unsafe { sys::vt_grad_set(leaf.as_ptr().cast_mut(), grad.as_ptr().cast_mut()) })
}

type HookFn = dyn FnMut() -> anyhow::Result<()> + Send;

/// What the C++ side owns: the closure, and where its failure is kept.
struct HookData {
    hook: Mutex<Box<HookFn>>,
    failure: Arc<Mutex<Option<anyhow::Error>>>,
}

/// A closure that runs each time a gradient has been accumulated into a leaf; removed when dropped. A leaf may have many, which
/// run in the order in which they were registered.
///
/// The closure runs on the thread that runs backward (the calling thread unless engine multithreading is on). If
/// it fails or panics, `backward` fails, and [`GradHook::take_failure`] gives the reason.
pub struct GradHook {
    tensor: Tensor,
    /// The address of what the C++ side owns, which names the hook among those of the leaf.
    data: usize,
    failure: Arc<Mutex<Option<anyhow::Error>>>,
}

impl GradHook {
    /// Registers `hook` on `leaf`, after those that it has.
    ///
    /// # Errors
    /// If `leaf` is not a leaf that requires grad.
    pub fn register(
        leaf: &Tensor,
        hook: impl FnMut() -> anyhow::Result<()> + Send + 'static,
    ) -> Result<Self, TorchError> {
        let failure = Arc::new(Mutex::new(None));
        let data = Box::new(HookData { hook: Mutex::new(Box::new(hook)), failure: failure.clone() });
        let data: *mut c_void = Box::into_raw(data).cast();
        // SAFETY: the shim takes ownership of `data` whether or not it succeeds and gives it back exactly once to
        // `release`; both trampolines cast it to the type it was made from.
        let error = unsafe {
            sys::vt_post_accumulate_grad_hook(leaf.as_ptr().cast_mut(), call_hook, data, release_hook)
        };
        check("register_post_accumulate_grad_hook", error)?;
        Ok(Self { tensor: leaf.shallow_clone(), data: data.addr(), failure })
    }

    /// Why one of these failed in the backward pass that ended with `error`; else that.
    pub(crate) fn failure_or(hooks: &[Self], error: Error) -> Error {
        let failure = hooks.iter().find_map(Self::take_failure);
        failure.map_or(error, |failure| {
            let what = format!("{failure:#}");
            ModuleError::Hook { problem: Problem::new(what, "fix the hook, or remove it") }.into()
        })
    }

    /// Why the closure failed, if it did since the last call.
    pub fn take_failure(&self) -> Option<anyhow::Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for GradHook {
    fn drop(&mut self) {
        // SAFETY: the tensor is owned by self and alive. The shim compares the address and does not read there.
        let error = unsafe {
            let data = std::ptr::without_provenance(self.data);
            sys::vt_post_accumulate_grad_hook_remove(self.tensor.as_ptr().cast_mut(), data)
        };
        if let Err(error) = check("remove_post_accumulate_grad_hook", error) {
            tracing::warn!("a gradient hook could not be removed: {error}");
        }
    }
}

extern "C" fn call_hook(data: *mut c_void) -> i32 {
    refuse_recording(
        "a hook of a gradient ran, which a replay would not call (several ranks average gradients by hooks: leave backward to the trainer, and make graphs of modules)",
    );
    // SAFETY: data is the HookData given at registration, which the C++ hook owns and keeps alive for this call;
    // it is shared (its parts are behind mutexes), never mutably borrowed.
    let data = unsafe { &*data.cast::<HookData>() };
    let mut hook = data.hook.lock().unwrap_or_else(PoisonError::into_inner);
    let failure = match catch_unwind(AssertUnwindSafe(&mut *hook)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(panic) => anyhow::anyhow!("the gradient hook panicked: {}", panic_text(panic.as_ref())),
    };
    *data.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
    1
}

extern "C" fn release_hook(data: *mut c_void) {
    // SAFETY: called once, by the C++ hook's destructor, with the pointer that Box::into_raw gave.
    drop(unsafe { Box::from_raw(data.cast::<HookData>()) });
}
