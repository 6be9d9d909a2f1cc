//! The tree of parameters, buffers and sub-modules that every model is.

use std::collections::HashSet;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::metric::Metric;
use super::{Buffer, Parameter, set_training};
use crate::device::Device;
use crate::error::{CheckpointError, Result};

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
pub trait Module: Send + 'static {
    /// Calls `visit` with the name of each direct member, in declaration order.
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>));

    /// Calls `visit` with each direct sub-module, to be changed.
    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module));

    /// Sets this module's own mode, not its children's: layers that behave differently in training keep it, and call
    /// [`mode_changed`](super::mode_changed).
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

    /// Name of the module's type without its path, such as `Conv2d`.
    fn type_name(&self) -> &'static str {
        let name = std::any::type_name::<Self>();
        let name = name.split('<').next().unwrap_or(name);
        name.rsplit("::").next().unwrap_or(name)
    }
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

    fn metric(&self) -> Option<Arc<dyn Metric>> {
        (**self).metric()
    }

    fn type_name(&self) -> &'static str {
        (**self).type_name()
    }
}

/// A module that maps one tensor to one tensor.
pub trait Forward: Module {
    /// Applies the module. Shapes are documented with each layer.
    ///
    /// # Errors
    /// If the input does not fit the layer.
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor>;
}

/// What every module can do, from its tree alone.
pub trait ModuleExt: Module {
    /// All parameters with their fqn (`conv1.weight`), depth first in declaration order, as PyTorch's
    /// `named_parameters()`: a tied parameter appears once, under its first name.
    fn named_parameters(&self) -> Vec<(String, Parameter)> {
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        walk(self.as_dyn(), "", &mut |fqn, member| {
            if let Member::Parameter(parameter) = member
                && seen.insert(parameter.id())
            {
                found.push((fqn.to_owned(), parameter.clone()));
            }
        });
        found
    }

    /// All parameters, in the order of [`ModuleExt::named_parameters`].
    fn parameters(&self) -> Vec<Parameter> {
        self.named_parameters().into_iter().map(|(_, parameter)| parameter).collect()
    }

    /// All buffers with their fqn, persistent or not.
    fn named_buffers(&self) -> Vec<(String, &Buffer)> {
        let mut found = Vec::new();
        walk(self.as_dyn(), "", &mut |fqn, member| {
            if let Member::Buffer(buffer) = member {
                found.push((fqn.to_owned(), buffer));
            }
        });
        found
    }

    /// Direct sub-modules with their names.
    fn named_children(&self) -> Vec<(String, &dyn Module)> {
        let mut found = Vec::new();
        self.members(&mut |name, member| {
            if let Member::Module(module) = member {
                found.push((name.to_owned(), module));
            }
        });
        found
    }

    /// All sub-modules with their fqn, depth first; the module itself comes first under the empty name.
    fn named_modules(&self) -> Vec<(String, &dyn Module)> {
        let mut found = vec![(String::new(), self.as_dyn())];
        walk(self.as_dyn(), "", &mut |fqn, member| {
            if let Member::Module(module) = member {
                found.push((fqn.to_owned(), module));
            }
        });
        found
    }

    /// All metrics in the tree with their fqn.
    fn named_metrics(&self) -> Vec<(String, Arc<dyn Metric>)> {
        let modules = self.named_modules().into_iter();
        modules.filter_map(|(fqn, module)| Some((fqn, module.metric()?))).collect()
    }

    /// Puts the module and all below it into training mode (`true`) or evaluation mode (`false`).
    fn train(&mut self, training: bool)
    where
        Self: Sized,
    {
        set_training(self, training);
    }

    /// Puts the module and all below it into evaluation mode.
    fn eval(&mut self)
    where
        Self: Sized,
    {
        set_training(self, false);
    }

    /// Moves all parameters and buffers, in place.
    ///
    /// # Errors
    /// If the device is absent or out of memory; then some tensors have moved already.
    fn to_device(&self, device: Device) -> Result<()> {
        self.convert(&mut |tensor| Ok(tensor.f_to_device(device.tch())?))
    }

    /// Casts all floating-point parameters and buffers, in place.
    ///
    /// # Errors
    /// If the device has no such dtype.
    fn to_dtype(&self, dtype: Kind) -> Result<()> {
        self.convert(&mut |tensor| {
            Ok(if tensor.is_floating_point() { tensor.f_to_kind(dtype)? } else { tensor.shallow_clone() })
        })
    }

    /// Lays out the parameters and buffers of four dimensions, such as kernels of convolutions, with the channels last in
    /// memory. Shapes and values stay; convolutions then work in this layout, and what they give has it, too, which is
    /// faster on most devices. To be called before the first step.
    ///
    /// Source: `module.to(memory_format=torch.channels_last)`.
    ///
    /// # Errors
    /// If memory is short.
    fn to_channels_last(&self) -> Result<()> {
        self.convert(&mut |tensor| {
            if tensor.dim() != 4 {
                return Ok(tensor.shallow_clone());
            }
            // the strides are set, too, since those of a single channel would say nothing of the layout
            let (size, dense) = (tensor.size(), tensor.f_permute([0, 2, 3, 1])?.f_contiguous()?);
            let [channels, height, width] = [size[1], size[2], size[3]];
            let strides = [channels * height * width, 1, width * channels, channels];
            Ok(dense.f_as_strided(&size, strides, None)?)
        })
    }

    /// Replaces the data of each parameter and buffer by `convert` of it.
    #[doc(hidden)]
    fn convert(&self, convert: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for parameter in self.parameters() {
            parameter.set_data(&convert(&parameter.detach())?)?;
        }
        for (_, buffer) in self.named_buffers() {
            buffer.set_data(&convert(buffer)?)?;
        }
        Ok(())
    }

    /// Sets whether the parameters are trained.
    fn set_requires_grad(&self, requires_grad: bool) {
        for parameter in self.parameters() {
            let _ = parameter.set_requires_grad(requires_grad);
        }
    }

    /// Parameters and persistent buffers by fqn, sharing storage with the module. Tied parameters appear under
    /// each of their names, as in PyTorch.
    fn state_dict(&self) -> Vec<(String, Tensor)> {
        let mut found = Vec::new();
        walk(self.as_dyn(), "", &mut |fqn, member| match member {
            Member::Parameter(parameter) => found.push((fqn.to_owned(), parameter.detach())),
            Member::Buffer(buffer) if buffer.is_persistent() => found.push((fqn.to_owned(), buffer.detach())),
            _ => {}
        });
        found
    }

    /// Copies values into the module's own tensors, which keep their device and dtype. Returns the names that had no
    /// counterpart, as PyTorch's does; there are none when `strict`.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] if shapes differ; when `strict`, if names are missing or left over; else if not one
    /// name is the module's. Nothing is changed in that case.
    fn load_state_dict(&self, state: &[(String, Tensor)], strict: bool) -> Result<IncompatibleKeys> {
        load_state_dict(self.as_dyn(), state, strict)
    }

    /// Number of elements of all parameters; with `trainable_only`, of those that require grad.
    fn num_parameters(&self, trainable_only: bool) -> usize {
        self.parameters().iter().filter(|p| !trainable_only || p.requires_grad()).map(|p| p.numel()).sum()
    }

    /// This module as a trait object.
    #[doc(hidden)]
    fn as_dyn(&self) -> &dyn Module;
}

impl<M: Module> ModuleExt for M {
    fn as_dyn(&self) -> &dyn Module {
        self
    }
}

impl ModuleExt for dyn Module {
    fn as_dyn(&self) -> &dyn Module {
        self
    }
}

/// Names that [`ModuleExt::load_state_dict`] found on one side only; PyTorch's `_IncompatibleKeys`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Names of the module that the state does not have: their values are as they were.
    pub missing_keys: Vec<String>,
    /// Names of the state that the module does not have: their values are not used.
    pub unexpected_keys: Vec<String>,
}

impl IncompatibleKeys {
    /// Whether both sides have the same names.
    pub fn is_empty(&self) -> bool {
        self.missing_keys.is_empty() && self.unexpected_keys.is_empty()
    }
}

/// Calls `visit` with the fqn of every member below `module`, depth first.
fn walk<'a>(module: &'a dyn Module, prefix: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
    let mut direct = Vec::new();
    module.members(&mut |name, member| direct.push((join(prefix, name), member)));
    // PyTorch lists a module's own parameters and buffers before those of its children
    for (fqn, member) in &direct {
        if !matches!(member, Member::Module(_)) {
            visit(fqn, *member);
        }
    }
    for (fqn, member) in &direct {
        if let Member::Module(child) = member {
            visit(fqn, *member);
            walk(*child, fqn, visit);
        }
    }
}

fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
}

fn load_state_dict(
    module: &dyn Module,
    state: &[(String, Tensor)],
    strict: bool,
) -> Result<IncompatibleKeys> {
    let own = module.state_dict();
    let given: std::collections::HashMap<&str, &Tensor> =
        state.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let mut problems = Vec::new();
    let mut copies = Vec::new();
    let mut keys = IncompatibleKeys::default();
    for (fqn, target) in &own {
        match given.get(fqn.as_str()) {
            None => keys.missing_keys.push(fqn.clone()),
            Some(source) if source.size() != target.size() => problems.push(format!(
                "{fqn} has shape {:?}, the module's is {:?}",
                source.size(),
                target.size()
            )),
            Some(source) => copies.push((target, *source)),
        }
    }
    let names: HashSet<&str> = own.iter().map(|(name, _)| name.as_str()).collect();
    let unexpected = state.iter().map(|(name, _)| name).filter(|name| !names.contains(name.as_str()));
    keys.unexpected_keys.extend(unexpected.cloned());
    let refuse = |what: String, remedy: &str| {
        let module = module.type_name().to_owned();
        Err(CheckpointError::Mismatch { module, what, remedy: remedy.to_owned() }.into())
    };
    if strict {
        problems.extend(keys.missing_keys.iter().map(|name| format!("missing {name}")));
        problems.extend(keys.unexpected_keys.iter().map(|name| format!("unexpected {name}")));
    } else if keys.missing_keys.len() == own.len() && !own.is_empty() && !state.is_empty() {
        let what = format!(
            "none of the names fits: {} missing ({}), {} unexpected ({})",
            keys.missing_keys.len(),
            first_of(&keys.missing_keys, 3),
            keys.unexpected_keys.len(),
            first_of(&keys.unexpected_keys, 3)
        );
        return refuse(what, "rename the tensors as the module's are named, such as by leaving out a prefix");
    }
    if !problems.is_empty() {
        let remedy = "build the module with the sizes it was saved with, or load with strict=false";
        return refuse(first_of(&problems, 10), remedy);
    }
    let _no_grad = tch::no_grad_guard();
    for (target, source) in copies {
        target.shallow_clone().f_copy_(source)?;
    }
    Ok(keys)
}

/// So many of the texts, and how many there are besides.
fn first_of(texts: &[String], count: usize) -> String {
    let shown = texts.iter().take(count).cloned().collect::<Vec<_>>().join(", ");
    match texts.len().saturating_sub(count) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
