//! Capturing: what a thread does becomes one or more recordings.

use std::cell::RefCell;
use std::marker::PhantomData;

use tch::Tensor;

use super::metrics;
use super::recordings::Recordings;
use crate::error::{GraphError, Result};
use crate::ffi::{self, Recording};
use crate::nn::{CallWatcher, Module, ModuleCall, ModuleHooks, RemovableHandle, Which};

/// A capture in progress on this thread.
struct Progress {
    /// Recordings that a `mark_step` ended.
    ended: Vec<Recording>,
    was_multithreaded: bool,
}

thread_local!(static CAPTURE: RefCell<Option<Progress>> = const { RefCell::new(None) });

/// Whether this thread is capturing a graph.
pub fn is_capturing() -> bool {
    ffi::is_recording()
}

/// Refuses what cannot be done while a graph is captured.
pub(crate) fn check_not_capturing(what: &'static str) -> Result<()> {
    if is_capturing() { Err(GraphError::CaptureInProgress { what }.into()) } else { Ok(()) }
}

/// Notes that the capture in progress, if there is one, cannot be replayed.
pub fn refuse_capture(reason: &str) {
    ffi::refuse_recording(reason);
}

/// Begins a capture on this thread. Operators run as usual.
fn begin() -> Result<()> {
    check_not_capturing("capture_begin")?;
    ffi::install_host_pool()?; // its blocks are what a graph's memory is made of
    let was_multithreaded = ffi::engine_multithreading()?;
    ffi::set_engine_multithreading(false)?; // backward must run on this thread
    Recording::begin()?;
    CAPTURE.set(Some(Progress { ended: Vec::new(), was_multithreaded }));
    Ok(())
}

/// Ends the capture of this thread: one recording for each part between two `mark_step`s.
fn end() -> Result<Vec<Recording>> {
    let Some(mut capture) = CAPTURE.take() else { return Err(GraphError::NotCapturing.into()) };
    let last = Recording::end();
    ffi::set_engine_multithreading(capture.was_multithreaded)?;
    capture.ended.push(last?);
    Ok(capture.ended)
}

/// A capture in progress on this thread; abandoned when dropped.
#[derive(Debug)]
#[must_use = "the capture is abandoned when this is dropped; call end()"]
pub(crate) struct Capture {
    is_over: bool,
}

impl Capture {
    pub(crate) fn begin() -> Result<Self> {
        begin()?;
        Ok(Self { is_over: false })
    }

    pub(crate) fn end(mut self) -> Result<Recordings> {
        self.is_over = true;
        Ok(Recordings::new(end()?))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.is_over {
            drop(end());
        }
    }
}

/// Ends the graph that is being captured and begins another one: what runs between two graphs need not be static. The
/// parts are replayed one after the other.
///
/// Outside a capture this does nothing: operators run as soon as they are called.
///
/// # Errors
/// libtorch's.
pub fn mark_step() -> Result<()> {
    metrics::count_mark_step();
    CAPTURE.with_borrow_mut(|capture| {
        if let Some(capture) = capture {
            capture.ended.push(Recording::end()?);
            Recording::begin()?;
        }
        Ok(())
    })
}

/// Names the place of the operators that follow, for messages about what cannot be captured: see [`scope`].
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct Scope {
    before: String,
    _of_this_thread: PhantomData<*const ()>,
}

thread_local!(static SCOPE: RefCell<String> = const { RefCell::new(String::new()) });

/// Operators until the result is dropped are said to be in `name`, within the scope that holds now.
pub fn scope(name: &str) -> Scope {
    let before = SCOPE.with_borrow_mut(|scope| {
        let inner = if scope.is_empty() { name.to_owned() } else { format!("{scope}.{name}") };
        std::mem::replace(scope, inner)
    });
    SCOPE.with_borrow(|scope| ffi::set_recording_scope(scope));
    Scope { before, _of_this_thread: PhantomData }
}

impl Drop for Scope {
    fn drop(&mut self) {
        ffi::set_recording_scope(&self.before);
        SCOPE.set(std::mem::take(&mut self.before));
    }
}

/// Names the scope of operators by the fqn of the module that is called.
#[derive(Default)]
struct FqnScopes {
    before: Vec<String>,
}

impl CallWatcher for FqnScopes {
    fn before_forward(&mut self, call: &ModuleCall<'_>, _: &[Tensor]) -> anyhow::Result<()> {
        ffi::set_recording_scope(call.fqn());
        self.before.push(SCOPE.replace(call.fqn().to_owned()));
        Ok(())
    }

    fn end(&mut self) {
        if let Some(before) = self.before.pop() {
            ffi::set_recording_scope(&before);
            SCOPE.set(before);
        }
    }
}

/// Runs `body` with the scopes of operators named by the modules of `root` that are called.
pub(crate) fn scoped_by_fqn<R>(root: &dyn Module, body: impl FnOnce() -> R) -> Result<R> {
    let hooks = ModuleHooks::new();
    let _ = hooks.watch(Which::All, FqnScopes::default());
    hooks.within(root, body)
}

/// Names the scopes of operators by the modules that these hooks are active for.
pub(crate) fn scope_by_fqn(hooks: &ModuleHooks) -> RemovableHandle {
    hooks.watch(Which::All, FqnScopes::default())
}
