//! Functions whose gradient is a closure, and gradients without a backward pass over a whole model.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::{check, panic_text, pointers};
use crate::ffi::device::allocator::write_text;

type BackwardFn = dyn FnMut(&[Tensor]) -> anyhow::Result<Vec<Option<Tensor>>> + Send;

/// What autograd's node owns.
struct Function {
    backward: Mutex<Box<BackwardFn>>,
    num_inputs: usize,
    /// With the tensors that autograd has saved for it.
    num_given: usize,
}

/// Makes `outputs` results of a function of `inputs`, with `backward` as its gradient: it gets the gradients of the
/// outputs, in order (undefined tensors where none came), and gives one for each input. It is called on the thread that
/// runs backward, with grad off, and again if backward runs again. An error or a panic of it makes backward fail.
///
/// # Errors
/// If an output has a history already, or is not of floating point.
///
/// Source: `torch.autograd.Function`.
pub fn autograd_function<'a>(
    inputs: impl IntoIterator<Item = &'a Tensor>,
    outputs: &[Tensor],
    backward: impl FnMut(&[Tensor]) -> anyhow::Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Result<(), TorchError> {
    autograd_function_saving(inputs, outputs, &[], backward)
}

/// [`autograd_function`] whose `backward` gets tensors behind the gradients that autograd saves until then: a checkpointed segment
/// drops them and makes them again, and a backward pass without `retain_graph` frees them.
///
/// # Errors
/// As [`autograd_function`].
///
/// Source: `torch.autograd.Function` with `ctx.save_for_backward`.
pub fn autograd_function_saving<'a>(
    inputs: impl IntoIterator<Item = &'a Tensor>,
    outputs: &[Tensor],
    saved: &[Tensor],
    backward: impl FnMut(&[Tensor]) -> anyhow::Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Result<(), TorchError> {
    let (inputs, results, saved) = (pointers(inputs), pointers(outputs), pointers(saved));
    let callbacks = callbacks_of(results.len() + saved.len(), inputs.len(), backward);
    // SAFETY: the tensors are borrowed for the call. The shim takes ownership of the data whether or not it succeeds, and
    // gives it back once to `release`; both trampolines cast it to the type it was made from.
    let error = unsafe {
        sys::vt_autograd_function(
            inputs.as_ptr(),
            inputs.len(),
            results.as_ptr(),
            results.len(),
            saved.as_ptr(),
            saved.len(),
            callbacks,
        )
    };
    check("autograd_function", error)
}

/// Calls `hook` with the gradient of `tensor` each time it is computed, before what `tensor` was made from gets it; what the
/// hook gives takes the gradient's place. It is called on the thread that runs backward, and goes away with autograd's
/// graph. The gradient is that of the tensor's value now: what changes it in place later comes before it in backward.
///
/// # Errors
/// If `tensor` does not require grad.
///
/// Source: `torch.Tensor.register_hook`.
pub fn tensor_hook(
    tensor: &Tensor,
    mut hook: impl FnMut(Tensor) -> anyhow::Result<Option<Tensor>> + Send + 'static,
) -> Result<(), TorchError> {
    let callbacks = callbacks_of(1, 1, move |grads| {
        let [grad] = grads else { anyhow::bail!("{} gradients of one tensor", grads.len()) };
        Ok(vec![hook(grad.shallow_clone())?])
    });
    // SAFETY: the tensor is borrowed for the call. The shim takes ownership of the data whether or not it succeeds, and gives
    // it back once to `release`; both trampolines cast it to the type it was made from.
    check("register_hook", unsafe { sys::vt_tensor_hook(tensor.as_ptr().cast_mut(), callbacks) })
}

/// If `tensor` is a view, calls `hook` each time the gradient of what it is a view of is computed. Changing a view in place makes
/// autograd forget the views that there were, and with them the hooks of [`tensor_hook`]; this one stays.
///
/// # Errors
/// libtorch's.
pub fn base_hook(
    tensor: &Tensor,
    mut hook: impl FnMut() -> anyhow::Result<()> + Send + 'static,
) -> Result<(), TorchError> {
    let callbacks = callbacks_of(1, 1, move |_| hook().map(|()| vec![None]));
    // SAFETY: as in `tensor_hook`.
    check("base_hook", unsafe { sys::vt_base_hook(tensor.as_ptr().cast_mut(), callbacks) })
}

/// Where autograd takes a tensor's gradient: the address of the node that it is an output of, and which one. Tensors with the same
/// have the same gradient, as long as the node lives.
///
/// # Errors
/// libtorch's.
pub fn gradient_edge(tensor: &Tensor) -> Result<(usize, u32), TorchError> {
    let (mut node, mut output) = (0, 0);
    // SAFETY: the tensor is borrowed for the call; the out-pointers are valid.
    check("gradient_edge", unsafe {
        sys::vt_gradient_edge(tensor.as_ptr().cast_mut(), &mut node, &mut output)
    })?;
    Ok((node, output))
}

/// Calls `body` when the backward pass in progress on this thread is over. A backward pass that runs within another one, such as a
/// recomputation's, does not end that one: `body` is called when the outermost pass is over. An error or a panic of it makes
/// backward fail.
///
/// # Errors
/// If there is no backward pass.
///
/// Source: `torch.autograd.Variable._execution_engine.queue_callback`.
pub fn at_backward_end(
    mut body: impl FnMut() -> anyhow::Result<()> + Send + 'static,
) -> Result<(), TorchError> {
    let callbacks = callbacks_of(0, 0, move |_| body().map(|()| Vec::new()));
    // SAFETY: as in `tensor_hook`; without tensors neither side reads the pointers to them.
    check("queue_callback", unsafe { sys::vt_at_backward_end(callbacks) })
}

/// Whether this thread runs a backward pass. A module that is called there is called for a recomputation.
pub fn is_in_backward() -> bool {
    // SAFETY: reads this thread's state.
    unsafe { sys::vt_is_in_backward() != 0 }
}

/// A closure as the shim takes it.
fn callbacks_of(
    num_given: usize,
    num_inputs: usize,
    backward: impl FnMut(&[Tensor]) -> anyhow::Result<Vec<Option<Tensor>>> + Send + 'static,
) -> sys::vt_autograd_callbacks {
    let function = Function { backward: Mutex::new(Box::new(backward)), num_inputs, num_given };
    sys::vt_autograd_callbacks {
        backward: call_backward,
        release,
        data: Box::into_raw(Box::new(function)).cast(),
    }
}

extern "C" fn call_backward(
    data: *mut c_void,
    grad_outputs: *const sys::vt_tensor,
    grad_inputs: *mut sys::vt_tensor,
    text: *mut c_char,
    capacity: usize,
) -> i32 {
    // SAFETY: data is the Function given at registration, which autograd's node owns and keeps alive for this call; it is
    // shared, its closure is behind a mutex.
    let function = unsafe { &*data.cast::<Function>() };
    let grads: Vec<Tensor> = (0..function.num_given)
        // SAFETY: the shim gives a tensor for each output and each saved one, alive for this call.
        .map(|i| unsafe { Tensor::clone_from_ptr(*grad_outputs.add(i)) })
        .collect();
    let mut backward = function.backward.lock().unwrap_or_else(PoisonError::into_inner);
    let failure = match catch_unwind(AssertUnwindSafe(|| backward(&grads))) {
        Ok(Ok(found)) if found.len() == function.num_inputs => {
            for (i, grad) in found.into_iter().enumerate() {
                if let Some(grad) = grad {
                    // SAFETY: there is room for a pointer per input; the shim owns the tensor from now on.
                    unsafe { *grad_inputs.add(i) = grad.as_ptr().cast_mut() };
                    std::mem::forget(grad);
                }
            }
            return 0;
        }
        Ok(Ok(found)) => format!("{} gradients for {} inputs", found.len(), function.num_inputs),
        Ok(Err(error)) => format!("{error:#}"),
        Err(panic) => format!("the gradient panicked: {}", panic_text(panic.as_ref())),
    };
    write_text(&failure, text, capacity);
    1
}

extern "C" fn release(data: *mut c_void) {
    // SAFETY: called once, by the node's destructor, with the pointer that Box::into_raw gave.
    drop(unsafe { Box::from_raw(data.cast::<Function>()) });
}

/// Gradients of `outputs` with respect to `inputs`, given those of the outputs; none for an input that has no part in
/// them. Autograd's graph stays.
///
/// # Errors
/// If an output has no history, or a gradient has not the shape of its output.
///
/// Source: `torch.autograd.grad` with `retain_graph`.
pub fn autograd_grad(
    outputs: &[Tensor],
    grad_outputs: &[Tensor],
    inputs: &[Tensor],
) -> Result<Vec<Option<Tensor>>, TorchError> {
    assert_eq!(outputs.len(), grad_outputs.len(), "a gradient for each output");
    let (outputs, grad_outputs, inputs) = (pointers(outputs), pointers(grad_outputs), pointers(inputs));
    let mut grads = vec![ptr::null_mut(); inputs.len()];
    // SAFETY: the tensors are borrowed for the call; there is room for a gradient of each input.
    let error = unsafe {
        sys::vt_autograd_grad(
            outputs.as_ptr(),
            grad_outputs.as_ptr(),
            outputs.len(),
            inputs.as_ptr(),
            inputs.len(),
            grads.as_mut_ptr(),
        )
    };
    check("autograd_grad", error)?;
    // SAFETY: the call succeeded, so that each entry is a tensor that is ours.
    let grads = grads.into_iter().map(|grad| unsafe { Tensor::from_ptr(grad) });
    Ok(grads.map(|grad| grad.defined().then_some(grad)).collect())
}

/// Adds the gradients of a loss to those of the leaves; with `retains_graph` another pass can go through its graph.
///
/// # Errors
/// If the loss is no scalar, or requires no grad; those of hooks.
pub fn backward(loss: &Tensor, retains_graph: bool) -> Result<(), TorchError> {
    // SAFETY: the tensor is borrowed for the call.
    check("backward", unsafe { sys::vt_backward(loss.as_ptr().cast_mut(), i32::from(retains_graph)) })
}

/// Whether operators of this thread note how to differentiate them: not within `tch::no_grad`.
pub fn grad_is_enabled() -> bool {
    // SAFETY: reads this thread's state.
    unsafe { sys::vt_grad_is_enabled() != 0 }
}
