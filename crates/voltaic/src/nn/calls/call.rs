//! Dispatches a module call to the active hooks and interceptors of this thread.

use tch::Tensor;

use crate::error::{Error, ModuleError, Problem, Result};
use crate::ffi;
use crate::nn::calls::active::{Body, OpenCall, has_listeners, is_awaited, with_hooked};
use crate::nn::calls::backward::BackwardCall;
use crate::nn::calls::recompute::before_code;
use crate::nn::module::{AsCode, Forward, Module, ModuleCode};
use crate::nn::tensor_tuple::TensorTuple;

/// A call of a module by `Callable::call`.
#[inline]
pub(crate) fn call<M, A, O>(module: &M, args: &A, body: fn(&M, &A) -> anyhow::Result<O>) -> anyhow::Result<O>
where
    M: Module + AsCode<A> + ?Sized,
    A: TensorTuple,
    O: TensorTuple,
{
    if !has_listeners() {
        return body(module, args);
    }
    call_as(module, args, |args| body(module, args))
}

/// A call of a module by code that stands for its `forward`.
pub(crate) fn call_as<M, A, O>(
    module: &M,
    args: &A,
    body: impl Fn(&A) -> anyhow::Result<O>,
) -> anyhow::Result<O>
where
    M: Module + AsCode<A> + ?Sized,
    A: TensorTuple,
    O: TensorTuple,
{
    if !has_listeners() {
        return body(args);
    }
    let _code = before_code(false)?;
    let (code, module) = (AsCode::<A>::code(module), module.as_module());
    let call = OpenCall::begin(module, true);
    if call.is_plain() {
        return body(args);
    }
    let body = |inputs: &[Tensor]| {
        let args = A::from_tensors(inputs.iter().map(Tensor::shallow_clone).collect())?;
        Ok(body(&args)?.tensors())
    };
    let outputs = dispatch(module, args.tensors(), call, &body, Some(code))?;
    Ok(O::from_tensors(outputs)?)
}

/// The `forward` of a layer whose `forward` is a call, too: within its own call it is that call.
#[inline]
pub(crate) fn within_call<M: Forward>(
    module: &M,
    input: &Tensor,
    body: impl Fn(&Tensor) -> anyhow::Result<Tensor>,
) -> anyhow::Result<Tensor> {
    if !has_listeners() {
        return body(input);
    }
    let body = |input: &Tensor| {
        let _code = before_code(true)?;
        body(input)
    };
    if is_awaited(module) {
        return body(input);
    }
    let call = OpenCall::begin(module.as_module(), false);
    if call.is_plain() {
        return body(input);
    }
    let body = |inputs: &[Tensor]| Ok(vec![body(&inputs[0])?]);
    let code = AsCode::<Tensor>::code(module);
    let outputs = dispatch(module, vec![input.shallow_clone()], call, &body, Some(code))?;
    Tensor::from_tensors(outputs).map_err(Into::into)
}

/// [`within_call`] of a layer with several inputs or outputs.
pub(crate) fn within_call_of<M: Module, const N: usize, const K: usize>(
    module: &M,
    inputs: [&Tensor; N],
    body: impl Fn([&Tensor; N]) -> Result<[Tensor; K]>,
) -> Result<[Tensor; K]> {
    if !has_listeners() {
        return body(inputs);
    }
    let body = |inputs: [&Tensor; N]| {
        let _code = before_code(true)?;
        body(inputs)
    };
    if is_awaited(module) {
        return body(inputs);
    }
    let call = OpenCall::begin(module.as_module(), false);
    if call.is_plain() {
        return body(inputs);
    }
    let given = inputs.iter().map(|input| input.shallow_clone()).collect();
    let body = |inputs: &[Tensor]| Ok(body(std::array::from_fn(|i| &inputs[i]))?.into());
    let outputs = dispatch(module, given, call, &body, None).map_err(of_call)?;
    outputs.try_into().map_err(|outputs: Vec<Tensor>| {
        let what = format!("{} outputs in place of {K}", outputs.len());
        ModuleError::Hook { problem: Problem::new(what, "give as many as there were") }.into()
    })
}

/// The error of a call, where the layer's own is voltaic's: that of a hook is one of voltaic's then.
pub(crate) fn of_call(error: anyhow::Error) -> Error {
    error.downcast().unwrap_or_else(|error| {
        let what = format!("{error:#}");
        ModuleError::Hook { problem: Problem::new(what, "fix the hook, or remove it") }.into()
    })
}

/// A call with hooks or interceptors: hooks before it, the interceptors around the module's code, hooks after it. `code` is that
/// code, for a later recomputation; `None` if it cannot be repeated from the module alone.
#[cold]
fn dispatch(
    module: &dyn Module,
    mut inputs: Vec<Tensor>,
    mut call: OpenCall,
    body: Body,
    code: Option<ModuleCode>,
) -> anyhow::Result<Vec<Tensor>> {
    let with_grad = ffi::grad_is_enabled();
    let mut backward = Vec::new();
    for hooks in &mut call.hooks {
        hooks.before(module, &mut inputs)?;
        if with_grad {
            let call = BackwardCall::new(module, &hooks.fqn, hooks.type_name, &hooks.entries());
            backward.extend(call.map(|call| call.take_inputs(&mut inputs)).transpose()?);
        }
    }
    let mut outputs = call.run(module, &inputs, body, code)?;
    for hooks in call.hooks.iter().rev() {
        hooks.after(module, &inputs, &mut outputs)?;
    }
    if !backward.is_empty() {
        with_hooked(|hooked| {
            backward.into_iter().rev().try_for_each(|call| call.take_outputs(&mut outputs, hooked))
        })?;
    }
    Ok(outputs)
}
