//! What goes into the call of a module, and comes out: a tensor or a tuple of tensors.

use tch::Tensor;

use crate::error::{GraphError, Problem, Result};

mod sealed {
    pub trait Sealed {}
}

/// A tensor, or a tuple of one to six; each may be an `Option`, such as a mask that may be missing. A call without a tensor runs without a
/// graph.
///
/// A call has a fixed number of inputs and outputs, so that lists and maps of tensors are refused by the compiler:
///
/// ```compile_fail
/// # use voltaic::graph::{make_graphed_callables, Callable};
/// # use voltaic::Tensor;
/// fn graph_it(net: impl Callable<Tensor>, list: Vec<Tensor>) {
///     make_graphed_callables(net, &list, 0); // error: calls and graphs take a tensor or a tuple of tensors, not `Vec<Tensor>`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "calls and graphs take a tensor or a tuple of tensors, not `{Self}`",
    label = "a list or a map of tensors has no fixed number of them",
    note = "give the tensors one by one, as a tuple"
)]
pub trait TensorTuple: sealed::Sealed + Sized + 'static {
    /// Handles of the tensors, in order.
    fn tensors(&self) -> Vec<Tensor>;

    /// The tuple of these tensors.
    ///
    /// # Errors
    /// [`GraphError::Arguments`] if there are more or fewer of them.
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self>;
}

impl sealed::Sealed for Tensor {}

impl TensorTuple for Tensor {
    fn tensors(&self) -> Vec<Tensor> {
        vec![self.shallow_clone()]
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        let [tensor] = take(tensors)?;
        Ok(tensor)
    }
}

fn take<const N: usize>(tensors: Vec<Tensor>) -> Result<[Tensor; N]> {
    tensors.try_into().map_err(|tensors: Vec<Tensor>| {
        let what = format!("{} tensors in place of {N}", tensors.len());
        GraphError::Arguments { problem: Problem::new(what, format!("give {N}")) }.into()
    })
}

/// One of a tuple: a tensor, or one that may be missing.
pub trait Slot: sealed::Sealed + Sized + 'static {
    /// A handle of the tensor; undefined if it is missing.
    fn tensor(&self) -> Tensor;

    /// The one of this tensor.
    fn of(tensor: Tensor) -> Self;
}

impl Slot for Tensor {
    fn tensor(&self) -> Tensor {
        self.shallow_clone()
    }

    fn of(tensor: Tensor) -> Self {
        tensor
    }
}

impl sealed::Sealed for Option<Tensor> {}

impl Slot for Option<Tensor> {
    fn tensor(&self) -> Tensor {
        self.as_ref().map_or_else(Tensor::new, Tensor::shallow_clone)
    }

    fn of(tensor: Tensor) -> Self {
        tensor.defined().then_some(tensor)
    }
}

impl TensorTuple for Option<Tensor> {
    fn tensors(&self) -> Vec<Tensor> {
        vec![self.tensor()]
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        let [tensor] = take(tensors)?;
        Ok(Slot::of(tensor))
    }
}

macro_rules! tensor_tuple {
    ($count:literal, $($name:ident $slot:ident),+) => {
        impl<$($slot: Slot),+> sealed::Sealed for ($($slot,)+) {}

        impl<$($slot: Slot),+> TensorTuple for ($($slot,)+) {
            fn tensors(&self) -> Vec<Tensor> {
                let ($($name,)+) = self;
                vec![$($name.tensor()),+]
            }

            fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
                let [$($name),+] = take::<$count>(tensors)?;
                Ok(($($slot::of($name),)+))
            }
        }
    };
}

tensor_tuple!(1, a A);
tensor_tuple!(2, a A, b B);
tensor_tuple!(3, a A, b B, c C);
tensor_tuple!(4, a A, b B, c C, d D);
tensor_tuple!(5, a A, b B, c C, d D, e E);
tensor_tuple!(6, a A, b B, c C, d D, e E, f F);
