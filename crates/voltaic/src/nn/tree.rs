//! What every module can do, from its tree alone.

use std::collections::HashSet;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::metric::Metric;
use crate::device::Device;
use crate::error::{CheckpointError, ConfigError, Problem, Result};
use crate::nn::buffer::Buffer;
use crate::nn::modes::set_training;
use crate::nn::module::{Member, Module};
use crate::nn::parameter::Parameter;
use crate::nn::state_dict::{IncompatibleKeys, StateEntry, load_each, load_state_dict};
use crate::nn::unshard::note_failure;

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

    /// Casts all floating-point parameters and buffers, in place. Quantized weights stay as they are.
    ///
    /// # Errors
    /// If the device has no such dtype.
    fn to_dtype(&self, dtype: Kind) -> Result<()> {
        self.convert(&mut |tensor| {
            let is_quantized = matches!(tensor.kind(), Kind::Float8e4m3fn | Kind::Float8e5m2);
            let is_cast = tensor.is_floating_point() && !is_quantized;
            Ok(if is_cast { tensor.f_to_kind(dtype)? } else { tensor.shallow_clone() })
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
            parameter.refuse_if_kept()?;
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
    ///
    /// Weights that a strategy keeps are unsharded and copied. If that fails, an undefined tensor stands for one, and
    /// [`take_unshard_failure`](super::take_unshard_failure) has the reason; [`ModuleExt::try_state_dict`] returns it.
    ///
    /// # Collective
    /// If a strategy shards weights among ranks: all ranks must call it.
    fn state_dict(&self) -> Vec<(String, Tensor)> {
        let lasting = |parameter: &Parameter| {
            parameter.lasting().unwrap_or_else(|error| {
                note_failure(error);
                Tensor::new()
            })
        };
        let held = StateEntry::of(self.as_dyn()).into_iter();
        held.map(|(fqn, held)| match held {
            StateEntry::Parameter(parameter) => (fqn, lasting(&parameter)),
            StateEntry::Buffer(tensor) => (fqn, tensor),
        })
        .collect()
    }

    /// [`ModuleExt::state_dict`], with an error if a strategy cannot gather a weight.
    ///
    /// # Collective
    /// If a strategy shards weights among ranks: all ranks must call it.
    ///
    /// # Errors
    /// The strategy's.
    fn try_state_dict(&self) -> Result<Vec<(String, Tensor)>> {
        state_dict_of(self.as_dyn(), &|_| true)
    }

    /// Copies values into the module's own tensors, which keep their device and dtype. Returns the names that had no
    /// counterpart, as PyTorch's does; there are none when `strict`.
    ///
    /// # Errors
    /// [`Mismatch`](crate::error::CheckpointError::Mismatch) if shapes differ, or two names of a tied parameter have different values; when `strict`, if names are missing or left over; else if not one
    /// name is the module's. Nothing is changed in that case. The strategy's, if it keeps the weights and cannot take others.
    ///
    /// # Collective
    /// If a strategy shards weights among ranks: all ranks must call it, with the same values.
    fn load_state_dict(&self, state: &[(String, Tensor)], strict: bool) -> Result<IncompatibleKeys> {
        let given =
            |name: &str| state.iter().find(|(own, _)| own == name).map(|(_, values)| values.shallow_clone());
        check_tied(self.as_dyn(), &|_, _| false, &mut |name| Ok(given(name)))?;
        load_state_dict(self.type_name(), &StateEntry::of(self.as_dyn()), state, strict)
    }

    /// Number of elements of all parameters; with `trainable_only`, of those that require grad.
    fn num_parameters(&self, trainable_only: bool) -> usize {
        self.parameters().iter().filter(|p| !trainable_only || p.requires_grad()).map(|p| p.numel()).sum()
    }

    /// This module as a trait object.
    #[doc(hidden)]
    fn as_dyn(&self) -> &dyn Module;
}

impl StateEntry {
    /// What a state dict of the module holds, by fqn.
    fn of(module: &dyn Module) -> Vec<(String, Self)> {
        let mut found = Vec::new();
        walk(module, "", &mut |fqn, member| match member {
            Member::Parameter(parameter) => found.push((fqn.to_owned(), Self::Parameter(parameter.clone()))),
            Member::Buffer(buffer) if buffer.is_persistent() => {
                found.push((fqn.to_owned(), Self::Buffer(buffer.detach())));
            }
            _ => {}
        });
        found
    }
}

/// [`ModuleExt::load_state_dict`] with a function that copies the values of a name, for tensors that are not all in
/// memory. The state has these names and shapes.
pub(crate) fn load_state_dict_each(
    module: &dyn Module,
    shapes: &[(&str, Vec<i64>)],
    strict: bool,
    fill: &mut dyn FnMut(&str, &StateEntry) -> Result<()>,
) -> Result<IncompatibleKeys> {
    load_each(module.type_name(), &StateEntry::of(module), shapes, strict, fill)
}

/// The tensors of [`ModuleExt::try_state_dict`] that `is_wanted` selects by name; others are not gathered.
pub(crate) fn state_dict_of(
    module: &dyn Module,
    is_wanted: &dyn Fn(&str) -> bool,
) -> Result<Vec<(String, Tensor)>> {
    let held = StateEntry::of(module).into_iter().filter(|(fqn, _)| is_wanted(fqn));
    held.map(|(fqn, held)| match held {
        StateEntry::Parameter(parameter) => Ok((fqn, parameter.lasting()?)),
        StateEntry::Buffer(tensor) => Ok((fqn, tensor)),
    })
    .collect()
}

/// Names and shapes of frozen parameters in a state dict, tied ones under each of their names.
pub(crate) fn frozen_parameters(module: &dyn Module) -> Vec<(String, Vec<i64>)> {
    let held = StateEntry::of(module).into_iter();
    held.filter_map(|(fqn, held)| match held {
        StateEntry::Parameter(parameter) if !parameter.requires_grad() => Some((fqn, parameter.full_size())),
        _ => None,
    })
    .collect()
}

/// Names of tied parameters in a state dict beside their first, each with the first.
pub(crate) fn tied_names(module: &dyn Module) -> Vec<(String, String)> {
    let first: Vec<(u64, String)> =
        module.named_parameters().into_iter().map(|(fqn, parameter)| (parameter.id(), fqn)).collect();
    let first: std::collections::HashMap<u64, String> = first.into_iter().collect();
    let held = StateEntry::of(module).into_iter();
    held.filter_map(|(fqn, held)| match held {
        StateEntry::Parameter(parameter) => first
            .get(&parameter.id())
            .filter(|first| **first != fqn)
            .map(|first| (fqn.clone(), first.clone())),
        StateEntry::Buffer(_) => None,
    })
    .collect()
}

/// Compares the values of tied parameters in a state, which `values` gives by name as far as it has them; `are_one` says that two names
/// have the same values.
///
/// # Errors
/// [`Mismatch`](crate::error::CheckpointError::Mismatch) if two names of one parameter have different values; those of `values`.
pub(crate) fn check_tied(
    module: &dyn Module,
    are_one: &dyn Fn(&str, &str) -> bool,
    values: &mut dyn FnMut(&str) -> Result<Option<Tensor>>,
) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (other, first) in tied_names(module) {
        if are_one(&first, &other) {
            continue;
        }
        let (Some(own), Some(others)) = (values(&first)?, values(&other)?) else { continue };
        let is_same = own.kind() == others.kind() && own.data_ptr() == others.data_ptr();
        if own.size() != others.size() || is_same {
            continue; // other shapes are refused with the module's
        }
        let [own, others] = [own, others].map(|values| values.f_to_kind(Kind::Double));
        if !own?.f_allclose(&others?, 0.0, 0.0, true)? {
            let what = format!("{first} and {other} are one parameter, and have different values");
            let remedy = "leave one of the two names out, or load into a module that does not tie them";
            let module = module.type_name().to_owned();
            return Err(CheckpointError::Mismatch { module, problem: Problem::new(what, remedy) }.into());
        }
    }
    Ok(())
}

/// An error if a strategy keeps one of the weights: `what` would use memory that the strategy frees and allocates again.
pub(crate) fn refuse_kept(module: &dyn Module, what: &str) -> Result<()> {
    let Some((fqn, _)) = module.named_parameters().into_iter().find(|(_, parameter)| parameter.is_kept())
    else {
        return Ok(());
    };
    let problem = format!("{what} needs weights that stay in memory, but the strategy keeps {fqn}");
    Err(ConfigError::new("graph", problem, "run the module without graphs, or use another strategy").into())
}

/// Tells each parameter its first fqn in this module; a strategy and its errors name them by it. The trainer calls this
/// for the module that it runs, so that a part of it that has been trained alone before gets its new name.
pub fn name_parameters(module: &(impl ModuleExt + ?Sized)) {
    module.named_parameters().into_iter().for_each(|(fqn, parameter)| parameter.set_fqn(&fqn));
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

/// Calls `visit` with the fqn of every member below `module`, depth first.
fn walk<'a>(module: &'a dyn Module, prefix: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
    let mut direct = Vec::new();
    module.members(&mut |name, member| direct.push((join_fqn(prefix, name), member)));
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

/// Fqn of what has this name in the module of that fqn.
pub(crate) fn join_fqn(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
}
