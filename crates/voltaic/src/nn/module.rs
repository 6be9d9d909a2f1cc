//! The tree of parameters, buffers and sub-modules that every model is.

use std::any::{Any, TypeId};
use std::sync::Arc;

use tch::Tensor;
pub use voltaic_macros::Module;

use crate::nn::buffer::Buffer;
use crate::nn::metric::Metric;
use crate::nn::parallel::plan::ParallelPlan;
use crate::nn::parameter::Parameter;

/// A direct member of a module.
#[derive(Clone, Copy)]
pub enum Member<'a> {
    /// A trainable tensor.
    Parameter(&'a Parameter),
    /// A tensor that is state but not trained.
    Buffer(&'a Buffer),
    /// A sub-module.
    Module(&'a dyn Module),
}

/// A node of the module tree, usually implemented by `#[derive(Module)]`.
///
/// The derive visits the fields in declaration order and names them as the fields are named, which are the names
/// that PyTorch gives the same module. A field may be a [`Parameter`], a [`Buffer`], a module, a plain number, bool or
/// string, or an `Option`, `Vec` or array of those; any other field needs `#[module(skip)]`. A `bool` field marked
/// `#[module(training)]` is the flag that [`Module::set_training`] sets; nothing else may change it.
///
/// ```
/// use voltaic::nn::{Dropout, Forward, Linear, Module, ModuleExt};
/// use voltaic::{Kind, Tensor};
///
/// #[derive(Module)]
/// struct Net {
///     layers: Vec<Linear>,
///     dropout: Option<Dropout>,
///     #[module(training)]
///     training: bool,
///     #[module(skip)]
///     labels: std::collections::BTreeMap<i64, String>,
/// }
///
/// impl Forward for Net {
///     fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
///         let hidden = self.layers[0].forward(input)?.relu();
///         self.layers[1].forward(&hidden)
///     }
/// }
///
/// # fn main() -> anyhow::Result<()> {
/// let layers = vec![Linear::new(8, 4)?, Linear::new(4, 2)?];
/// let net = Net { layers, dropout: None, training: true, labels: Default::default() };
/// let names: Vec<String> = net.named_parameters().into_iter().map(|(fqn, _)| fqn).collect();
/// assert_eq!(names, ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]);
/// let input = Tensor::zeros([3, 8], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(net.forward(&input)?.size(), [3, 2]);
/// # Ok(())
/// # }
/// ```
///
/// A field that cannot be part of the tree does not compile, rather than being left out of the checkpoint:
///
/// ```compile_fail,E0277
/// # use voltaic::nn::Module;
/// #[derive(Module)]
/// struct Net {
///     labels: std::collections::BTreeMap<i64, String>,
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module",
    note = "a struct of layers becomes a module by `#[derive(Module)]`",
    note = "a field that holds no weights is left out by `#[module(skip)]`",
    note = "a `Tensor` field is either trained (`Parameter`) or not (`Buffer`)"
)]
pub trait Module: AsModule + Send + 'static {
    /// Calls `visit` with the name of each direct member, in declaration order.
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>));

    /// Calls `visit` with each direct sub-module, to be changed.
    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module));

    /// Visits the plain values among this module's own fields, each as a number: sizes, factors, flags, names. Code that calls the
    /// module may depend on them, so that a graph of it stands for no others. The derive makes this; fields with
    /// `#[module(skip)]` are left out.
    fn settings(&self, _visit: &mut dyn FnMut(u64)) {}

    /// Sets this module's own mode, not its children's: layers that behave differently in training keep it.
    fn set_training(&mut self, _training: bool) {}

    /// This module's own mode; `None` if it is the same in both.
    fn is_training(&self) -> Option<bool> {
        None
    }

    /// The metric that this module is, sharing its state; `None` if it is none. `#[module(metric)]` on a struct that
    /// implements [`Metric`] derives it.
    fn metric(&self) -> Option<Arc<dyn Metric>> {
        None
    }

    /// The module that this one merely wraps, if it does: both are one module, with one name and one call. A wrapper that
    /// shows the members of another module as its own gives that one here.
    fn wrapped(&self) -> Option<&dyn Module> {
        None
    }

    /// How the layers of this module, by their fqns in it, are divided among ranks by tensor parallelism, if it knows.
    /// `#[module(parallel_plan = FUNCTION)]` on a struct derives it, with a function of `&self`: a module that attends by heads says
    /// so of its projections. See [`nn::parallel`](crate::nn::parallel).
    fn parallel_plan(&self) -> Option<ParallelPlan> {
        self.wrapped().and_then(Module::parallel_plan)
    }

    /// Name of the module's type without its path, such as `Conv2d`.
    fn type_name(&self) -> &'static str {
        let name = std::any::type_name::<Self>();
        let name = name.split('<').next().unwrap_or(name);
        name.rsplit("::").next().unwrap_or(name)
    }
}

/// A module as a trait object, whatever its type: every module has it.
#[doc(hidden)]
pub trait AsModule: Any {
    /// This module.
    fn as_module(&self) -> &dyn Module;
}

impl<M: Module> AsModule for M {
    fn as_module(&self) -> &dyn Module {
        self
    }
}

impl dyn Module {
    /// The module as its own type, for callbacks: `module.downcast_ref::<Net>()?`.
    ///
    /// # Errors
    /// If it is of another type.
    pub fn downcast_ref<M: Module>(&self) -> anyhow::Result<&M> {
        let any: &dyn Any = self;
        any.downcast_ref().ok_or_else(|| wrong_type::<M>(self.type_name()))
    }

    /// The same, to be changed.
    ///
    /// # Errors
    /// If it is of another type.
    pub fn downcast_mut<M: Module>(&mut self) -> anyhow::Result<&mut M> {
        let is = self.type_name();
        let any: &mut dyn Any = self;
        any.downcast_mut().ok_or_else(|| wrong_type::<M>(is))
    }
}

fn wrong_type<M>(is: &str) -> anyhow::Error {
    let asked = std::any::type_name::<M>();
    anyhow::anyhow!("the module is a {is}, not a {asked}; ask for the type that the trainer was given")
}

/// Which module it is, while it stays where it is: modules without fields may share one.
pub(crate) type Identity = (usize, TypeId);

/// The identity of a module, or of the one that it wraps.
pub(crate) fn identity(module: &dyn Module) -> Identity {
    let mut module = module;
    while let Some(inner) = module.wrapped() {
        module = inner;
    }
    let any: &dyn Any = module;
    (std::ptr::from_ref(any).cast::<()>().addr(), any.type_id())
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        (**self).members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        (**self).children_mut(visit);
    }

    fn set_training(&mut self, training: bool) {
        (**self).set_training(training);
    }

    fn is_training(&self) -> Option<bool> {
        (**self).is_training()
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        (**self).settings(visit);
    }

    fn metric(&self) -> Option<Arc<dyn Metric>> {
        (**self).metric()
    }

    fn wrapped(&self) -> Option<&dyn Module> {
        Some((**self).as_module())
    }

    fn type_name(&self) -> &'static str {
        (**self).type_name()
    }
}

/// A module's code on tensors one by one, for a module of the type that it was made for.
pub type ModuleCode = fn(&dyn Module, &[Tensor]) -> anyhow::Result<Vec<Tensor>>;

/// The code of calls with arguments `A` as a plain function, to be run when the call is over: every module that is called has it.
#[doc(hidden)]
pub trait AsCode<A> {
    /// This module's code.
    fn code(&self) -> ModuleCode;
}

/// A module that maps one tensor to one tensor.
pub trait Forward: Module + AsCode<Tensor> {
    /// Applies the module. Shapes are documented with each layer.
    ///
    /// # Errors
    /// If the input does not fit the layer.
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor>;
}
