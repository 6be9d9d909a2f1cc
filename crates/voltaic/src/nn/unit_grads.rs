//! When the gradients of a group of parameters are complete, within a backward pass.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::parameter::Parameter;
use crate::error::Result;
use crate::ffi::{GradHook, at_backward_end};

type OnComplete = dyn FnMut(&[Parameter]) -> anyhow::Result<()> + Send;

/// Calls a closure when the gradients of all parameters of a unit, such as a layer, are complete: once in a backward pass, until this
/// is dropped. For strategies that shard gradients;
/// [`ModuleHooks::register_full_backward_pre_hook`](super::ModuleHooks::register_full_backward_pre_hook) runs before a unit's
/// backward pass.
///
/// The closure runs on the thread of the backward pass, when the last of the gradients has been accumulated. If some parameters
/// get none, it runs when the backward pass ends, with these parameters; it does not run for a unit of which no parameter gets a
/// gradient. If the closure fails, backward fails.
///
/// Backward passes within the backward pass, such as those of recomputed segments, are part of it. If several of these accumulate
/// into the same parameters, the closure runs again for the later ones: recompute by
/// [`autograd_grad`](crate::ffi::autograd_grad), whose gradients autograd sums up before they are accumulated, to avoid that.
pub struct UnitGrads {
    hooks: Vec<GradHook>,
    shared: Arc<Shared>,
}

struct Shared {
    progress: Mutex<Progress>,
    on_complete: Mutex<Box<OnComplete>>,
}

/// How far a backward pass is.
struct Progress {
    parameters: Vec<Parameter>,
    /// By parameter.
    has_grad: Vec<bool>,
    /// Passes that were complete or given up.
    pass: u64,
}

impl UnitGrads {
    /// Waits for the gradients of those parameters that are trained now. `on_complete` gets those that have no gradient from the
    /// pass.
    ///
    /// # Errors
    /// libtorch's.
    pub fn register(
        parameters: impl IntoIterator<Item = Parameter>,
        on_complete: impl FnMut(&[Parameter]) -> anyhow::Result<()> + Send + 'static,
    ) -> Result<Self> {
        let mut trained: Vec<Parameter> = Vec::new();
        for parameter in parameters.into_iter().filter(Parameter::requires_grad) {
            if trained.iter().all(|known| known.id() != parameter.id()) {
                trained.push(parameter); // tied weights have one gradient
            }
        }
        let leaves: Vec<_> = trained.iter().map(|parameter| parameter.leaf().shallow_clone()).collect();
        let progress = Progress { has_grad: vec![false; trained.len()], parameters: trained, pass: 0 };
        let (progress, on_complete) = (Mutex::new(progress), Mutex::new(Box::new(on_complete) as Box<_>));
        let shared = Arc::new(Shared { progress, on_complete });
        let register = |(index, leaf)| {
            let shared = shared.clone();
            GradHook::register(leaf, move || shared.note(index))
        };
        let hooks = leaves.iter().enumerate().map(register).collect::<Result<_, _>>()?;
        Ok(Self { hooks, shared })
    }

    /// Forgets what a backward pass that failed has left; to be called before each backward pass.
    pub fn begin(&self) {
        self.shared.progress().start_again();
    }

    /// Why the closure failed, if it did since the last call.
    pub fn take_failure(&self) -> Option<anyhow::Error> {
        self.hooks.iter().find_map(GradHook::take_failure)
    }
}

impl Progress {
    fn start_again(&mut self) {
        self.has_grad.fill(false);
        self.pass += 1;
    }
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A gradient has been accumulated.
    fn note(self: &Arc<Self>, index: usize) -> anyhow::Result<()> {
        let mut progress = self.progress();
        let (is_first, pass) = (!progress.has_grad.contains(&true), progress.pass);
        progress.has_grad[index] = true;
        if progress.has_grad.iter().all(|has_grad| *has_grad) {
            progress.start_again();
            drop(progress);
            return self.complete(&[]);
        }
        drop(progress);
        if is_first {
            let shared = self.clone();
            at_backward_end(move || shared.end(pass))?;
        }
        Ok(())
    }

    /// The backward pass is over.
    fn end(&self, pass: u64) -> anyhow::Result<()> {
        let mut progress = self.progress();
        if progress.pass != pass {
            return Ok(()); // it was complete
        }
        let pairs = progress.parameters.iter().zip(&progress.has_grad);
        let missing: Vec<Parameter> =
            pairs.filter(|(_, has_grad)| !**has_grad).map(|(parameter, _)| parameter.clone()).collect();
        progress.start_again();
        drop(progress);
        self.complete(&missing)
    }

    fn complete(&self, missing: &[Parameter]) -> anyhow::Result<()> {
        self.on_complete.lock().unwrap_or_else(PoisonError::into_inner)(missing)
    }
}

impl fmt::Debug for UnitGrads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnitGrads({} parameters)", self.hooks.len())
    }
}
