//! What goes into the call of a module, and comes out: a tensor or a tuple of tensors.

use tch::Tensor;

use crate::error::{GraphError, Problem, Result};

mod sealed {
    pub trait Sealed {}
}

/// A tensor, or a tuple of one to six.
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
pub trait TensorTuple: sealed::Sealed + Sized {
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

macro_rules! tensor_tuple {
    ($count:literal, $($name:ident $tensor:ty),+) => {
        impl sealed::Sealed for ($($tensor,)+) {}

        impl TensorTuple for ($($tensor,)+) {
            fn tensors(&self) -> Vec<Tensor> {
                let ($($name,)+) = self;
                vec![$($name.shallow_clone()),+]
            }

            fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
                let [$($name),+] = take::<$count>(tensors)?;
                Ok(($($name,)+))
            }
        }
    };
}

tensor_tuple!(1, a Tensor);
tensor_tuple!(2, a Tensor, b Tensor);
tensor_tuple!(3, a Tensor, b Tensor, c Tensor);
tensor_tuple!(4, a Tensor, b Tensor, c Tensor, d Tensor);
tensor_tuple!(5, a Tensor, b Tensor, c Tensor, d Tensor, e Tensor);
tensor_tuple!(6, a Tensor, b Tensor, c Tensor, d Tensor, e Tensor, f Tensor);
