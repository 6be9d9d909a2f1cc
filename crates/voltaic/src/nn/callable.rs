//! The call of a module.

use tch::Tensor;

use crate::error::{ModuleError, Problem};
use crate::nn::calls::active::await_forward;
use crate::nn::calls::call::call;
use crate::nn::calls::reach::unwrapped;
use crate::nn::module::{AsCode, Forward, Module, ModuleCode};
use crate::nn::tensor_tuple::TensorTuple;

/// A module that is called: tensors in, tensors out. [`call`](Callable::call) is what PyTorch's `module(x)` is, `forward`
/// what you implement. Hooks ([`ModuleHooks`](super::ModuleHooks)) and interceptors ([`CallInterceptor`](super::CallInterceptor)),
/// such as graphs, run around a call; without any, a call is `forward`.
///
/// Every [`Forward`] is one. A module of several inputs or outputs implements [`forward_with`](Callable::forward_with):
///
/// ```
/// use voltaic::nn::{Callable, Linear, Module};
/// use voltaic::{Kind, Tensor};
///
/// #[derive(Module)]
/// struct Gated {
///     value: Linear,
///     gate: Linear,
/// }
///
/// impl Callable<(Tensor, Tensor)> for Gated {
///     type Output = Tensor;
///
///     fn forward_with(&self, (input, context): &(Tensor, Tensor)) -> anyhow::Result<Tensor> {
///         Ok(self.value.call(input)? * self.gate.call(context)?.f_sigmoid()?)
///     }
/// }
///
/// # fn main() -> anyhow::Result<()> {
/// let gated = Gated { value: Linear::new(4, 2)?, gate: Linear::new(4, 2)? };
/// let input = Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(gated.call(&(input.shallow_clone(), input))?.size(), [8, 2]);
/// # Ok(())
/// # }
/// ```
///
/// Of voltaic's own layers and models `forward` is a call, too. For a module of yours `forward` runs the code alone.
pub trait Callable<A: TensorTuple>: Module + AsCode<A> {
    /// What comes out.
    type Output: TensorTuple;

    /// The forward pass, to be implemented; [`call`](Callable::call) calls it.
    ///
    /// # Errors
    /// If the inputs do not fit.
    fn forward_with(&self, args: &A) -> anyhow::Result<Self::Output>;

    /// Calls the module.
    ///
    /// # Errors
    /// Those of the forward pass; those of hooks.
    fn call(&self, args: &A) -> anyhow::Result<Self::Output> {
        call(self, args, Self::forward_with)
    }
}

impl<M: Forward> Callable<Tensor> for M {
    type Output = Tensor;

    fn forward_with(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.forward(input)
    }
}

impl Callable<Tensor> for dyn Forward {
    type Output = Tensor;

    fn forward_with(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.forward(input)
    }
}

impl<A: TensorTuple, M: Callable<A>> AsCode<A> for M {
    fn code(&self) -> ModuleCode {
        |module, inputs| {
            let module: &M = unwrapped(module).ok_or_else(|| {
                let what = format!("there is a {} where a module of another type was", module.type_name());
                ModuleError::Hook {
                    problem: Problem::new(what, "leave modules where they are between forward and backward"),
                }
            })?;
            let args = A::from_tensors(inputs.iter().map(Tensor::shallow_clone).collect())?;
            Ok(module.forward_with(&args)?.tensors())
        }
    }
}

/// The module's code, as the call in progress if that is of this module, on tensors one by one.
pub(crate) fn call_with<A: TensorTuple, M: Callable<A>>(
    module: &M,
    inputs: &[Tensor],
) -> anyhow::Result<Vec<Tensor>> {
    let args = A::from_tensors(inputs.iter().map(Tensor::shallow_clone).collect())?;
    await_forward(module);
    Ok(module.forward_with(&args)?.tensors())
}
