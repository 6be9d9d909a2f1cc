//! Hooks of the backward pass of a call.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{at_backward_end, autograd_function, base_hook, gradient_edge, tensor_hook};
use crate::nn::calls::entry::{Entry, Hook, ModuleCall};
use crate::nn::calls::reach::Reach;
use crate::nn::module::Module;

/// The hooks of the backward pass of one call, as they were when it was made.
pub(super) struct BackwardCall {
    shared: Arc<Shared>,
}

struct Shared {
    fqn: Arc<str>,
    type_name: &'static str,
    module: Reach,
    pre_hooks: Vec<Arc<Entry>>,
    hooks: Vec<Arc<Entry>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The gradients of the outputs were there.
    has_begun: bool,
    /// Which inputs have a gradient.
    is_input_trained: Vec<bool>,
    /// Those of this backward pass, once they are there.
    grad_outputs: Option<Vec<Option<Tensor>>>,
}

impl BackwardCall {
    /// `None` if there are no such hooks.
    pub(super) fn new(
        module: &dyn Module,
        fqn: &Arc<str>,
        type_name: &'static str,
        entries: &[Arc<Entry>],
    ) -> Option<Self> {
        let of = |is: fn(&Hook) -> bool| entries.iter().filter(|entry| is(&entry.hook)).cloned().collect();
        let pre_hooks: Vec<_> = of(|hook| matches!(hook, Hook::BackwardPre(_)));
        let hooks: Vec<_> = of(|hook| matches!(hook, Hook::Backward(_)));
        if pre_hooks.is_empty() && hooks.is_empty() {
            return None;
        }
        let (fqn, module, state) = (fqn.clone(), Reach::of(module), Mutex::default());
        Some(Self { shared: Arc::new(Shared { fqn, type_name, module, pre_hooks, hooks, state }) })
    }

    /// Gives the module inputs whose gradients are those of this call alone: where an input is used elsewhere, too, its own
    /// gradient is the sum. One input stays a view of what was given, so that the module may change it in place; several get
    /// a common node, which has all gradients at once.
    pub(super) fn take_inputs(self, inputs: &mut [Tensor]) -> Result<Self> {
        let trained: Vec<bool> = inputs.iter().map(Tensor::requires_grad).collect();
        let indices: Vec<usize> = (0..inputs.len()).filter(|&index| trained[index]).collect();
        self.shared.lock().is_input_trained = trained;
        if self.shared.hooks.is_empty() {
            return Ok(self);
        }
        let shared = self.shared.clone();
        match indices[..] {
            [] => {}
            [index] => {
                inputs[index] = inputs[index].f_alias()?;
                tensor_hook(&inputs[index], move |grad| {
                    let grads = shared.finish(vec![Some(grad)])?;
                    Ok(grads.into_iter().next().flatten())
                })?;
            }
            _ => {
                let own = indices.iter().map(|&i| inputs[i].f_detach()).collect::<Result<Vec<_>, _>>()?;
                autograd_function(indices.iter().map(|&index| &inputs[index]), &own, move |grads| {
                    shared.finish(grads.iter().map(defined).collect())
                })?;
                indices.iter().zip(own).for_each(|(&index, own)| inputs[index] = own);
            }
        }
        Ok(self)
    }

    /// Waits for the gradients of the outputs. One output stays the tensor that it is: who changes it, or a view of it, in place
    /// does not lose the hook. If a call within this one waits for its gradient, too, the hooks of the outer call come first.
    /// Several outputs get a common node.
    pub(super) fn take_outputs(self, outputs: &mut [Tensor], hooked: &mut Vec<Hooked>) -> Result<()> {
        let count = outputs.len();
        let indices: Vec<usize> = (0..count).filter(|&index| outputs[index].requires_grad()).collect();
        let shared = self.shared;
        match indices[..] {
            [] => {}
            [index] => {
                let output = &outputs[index];
                let edge = gradient_edge(output)?;
                if shared.pre_hooks.iter().any(|hook| hook.begins.load(Ordering::Relaxed)) {
                    let shared = shared.clone();
                    base_hook(output, move || shared.begin_late())?;
                }
                let hook = move |grad: Tensor| {
                    let mut grads = none(count);
                    grads[index] = Some(grad);
                    Ok(shared.begin(grads)?.swap_remove(index))
                };
                if let Some(known) = hooked.iter().find(|known| known.is_of(edge)) {
                    lock(&known.hooks).push(Box::new(hook));
                    return Ok(());
                }
                let hooks: Arc<Mutex<Vec<OutputHook>>> = Arc::new(Mutex::new(vec![Box::new(hook)]));
                hooked.push(Hooked { edge, hooks: hooks.clone() });
                tensor_hook(output, move |grad| {
                    let mut grad = Some(grad);
                    for hook in lock(&hooks).iter_mut().rev() {
                        let Some(given) = grad.take() else { break };
                        grad = hook(given)?;
                    }
                    Ok(grad)
                })?;
            }
            _ => {
                let own = indices.iter().map(|&i| outputs[i].f_detach()).collect::<Result<Vec<_>, _>>()?;
                let results: Vec<Tensor> = indices.iter().map(|&i| outputs[i].shallow_clone()).collect();
                let at = indices.clone();
                autograd_function(&results, &own, move |given| {
                    let mut grads = none(count);
                    at.iter().zip(given).for_each(|(&index, grad)| grads[index] = defined(grad));
                    let mut grads = shared.begin(grads)?;
                    Ok(at.iter().map(|&index| grads[index].take()).collect())
                })?;
                indices.iter().zip(own).for_each(|(&index, own)| outputs[index] = own);
            }
        }
        Ok(())
    }
}

/// Gets the gradient of an output, and gives what takes its place.
type OutputHook = Box<dyn FnMut(Tensor) -> anyhow::Result<Option<Tensor>> + Send>;

/// An output whose gradient calls wait for.
pub(super) struct Hooked {
    /// See [`gradient_edge`].
    edge: (usize, u32),
    /// Of the calls that gave it, the innermost first; autograd's node has them, too, as long as it lives.
    hooks: Arc<Mutex<Vec<OutputHook>>>,
}

impl Hooked {
    /// Whether it is this output. What was changed in place since is another one.
    fn is_of(&self, edge: (usize, u32)) -> bool {
        self.edge == edge && Arc::strong_count(&self.hooks) > 1
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn defined(grad: &Tensor) -> Option<Tensor> {
    grad.defined().then(|| grad.shallow_clone())
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn with_call<R>(&self, body: impl FnOnce(&ModuleCall<'_>) -> R) -> R {
        self.module.with(|module| body(&ModuleCall { fqn: &self.fqn, type_name: self.type_name, module }))
    }

    /// Part of the backward pass was reached, but the gradient of the output was not: a view of it was changed in place. Tells those
    /// who wait for the beginning alone.
    fn begin_late(&self) -> anyhow::Result<()> {
        if std::mem::take(&mut self.lock().has_begun) {
            return Ok(());
        }
        let mut grads = none(1);
        let begins = self.pre_hooks.iter().filter(|hook| hook.begins.load(Ordering::Relaxed));
        self.with_call(|call| begins.into_iter().try_for_each(|hook| hook.backward_pre(call, &mut grads)))
    }

    /// The gradients of the outputs are there.
    fn begin(self: &Arc<Self>, mut grads: Vec<Option<Tensor>>) -> anyhow::Result<Vec<Option<Tensor>>> {
        self.lock().has_begun = true;
        self.with_call(|call| {
            self.pre_hooks.iter().try_for_each(|hook| hook.backward_pre(call, &mut grads))
        })?;
        if self.hooks.is_empty() {
            return Ok(grads);
        }
        let is_last = {
            let mut state = self.lock();
            state.grad_outputs = Some(copies(&grads));
            !state.is_input_trained.contains(&true)
        };
        if is_last {
            self.finish(Vec::new())?;
        } else {
            // the module may not have used its input
            let shared = self.clone();
            at_backward_end(move || shared.finish(Vec::new()).map(drop))?;
        }
        Ok(grads)
    }

    /// The gradients of the inputs that have one are there, or none will come. Gives them as the hooks leave them.
    fn finish(&self, grads: Vec<Option<Tensor>>) -> anyhow::Result<Vec<Option<Tensor>>> {
        let (grad_outputs, is_trained) = {
            let mut state = self.lock();
            (state.grad_outputs.take(), state.is_input_trained.clone())
        };
        let Some(grad_outputs) = grad_outputs else { return Ok(grads) };
        let mut grads = grads.into_iter();
        let spread = |is_trained: &bool| if *is_trained { grads.next().flatten() } else { None };
        let mut grad_inputs: Vec<Option<Tensor>> = is_trained.iter().map(spread).collect();
        self.with_call(|call| {
            let mut hooks = self.hooks.iter();
            hooks.try_for_each(|hook| hook.backward(call, &mut grad_inputs, &grad_outputs))
        })?;
        let trained = grad_inputs.into_iter().zip(is_trained).filter(|(_, is_trained)| *is_trained);
        Ok(trained.map(|(grad, _)| grad).collect())
    }
}

fn none(count: usize) -> Vec<Option<Tensor>> {
    (0..count).map(|_| None).collect()
}

fn copies(grads: &[Option<Tensor>]) -> Vec<Option<Tensor>> {
    grads.iter().map(|grad| grad.as_ref().map(Tensor::shallow_clone)).collect()
}
