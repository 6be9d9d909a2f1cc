//! Weights of a checkpoint for a module, and modules made from checkpoints.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::module_tensors::ModuleTensors;
use crate::checkpoint::{Checkpoint, LoopState, use_master_weights};
use crate::device::Device;
use crate::error::{CheckpointError, Error, Problem, Result};
use crate::nn::te::load_fp8_state_dict;
use crate::nn::{IncompatibleKeys, Module, ModuleExt, check_tied, load_state_dict_each, quant};

/// Copies the weights of a checkpoint into a module: of float32 weights that were rounded the master weights, quantized ones as they are.
/// The module has the values of those that are `left_out`, given by name and shape. Returns what is on one side only, and how many
/// master weights were taken.
///
/// # Errors
/// As [`ModuleExt::load_state_dict`].
pub(crate) fn load_weights(
    module: &dyn Module,
    checkpoint: &mut Checkpoint,
    left_out: &[(String, Vec<i64>)],
    strict: bool,
) -> Result<(IncompatibleKeys, usize)> {
    if quant::has_scales(checkpoint.weights.iter().map(|(name, _)| name.as_str())) {
        quant::restore(module, &mut checkpoint.weights)?;
    }
    let parameters = module.named_parameters().into_iter();
    let full: HashSet<String> =
        parameters.filter(|(_, parameter)| parameter.kind() == Kind::Float).map(|(fqn, _)| fqn).collect();
    let taken = use_master_weights(checkpoint, &|fqn| full.contains(fqn))?;
    let weights = checkpoint.weights.iter().map(|(name, tensor)| (name.as_str(), tensor));
    let given: HashMap<&str, &Tensor> = weights.collect();
    let left_out = left_out.iter().map(|(name, shape)| (name.as_str(), shape.clone()));
    let shapes: Vec<_> = given.iter().map(|(name, tensor)| (*name, tensor.size())).chain(left_out).collect();
    check_tied(module, &|_, _| false, &mut |name| Ok(given.get(name).map(|values| values.shallow_clone())))?;
    let keys = load_state_dict_each(module, &shapes, strict, &mut |name, held| {
        given.get(name).map_or(Ok(()), |values| held.fill(values))
    })?;
    Ok((keys, taken))
}

/// The values that made the module that was saved.
pub(super) fn hyper_parameters<H: DeserializeOwned>(checkpoint: &Checkpoint, path: &Path) -> Result<H> {
    H::deserialize(&checkpoint.meta.hyper_parameters).map_err(|error| {
        let what = format!(
            "its hyper-parameters are {}, which are not those of the function that makes the module: {error}",
            checkpoint.meta.hyper_parameters
        );
        let remedy = "let the function take these (a serde_json::Value takes any), or return others from \
                      LightningModule::hyper_parameters and save again";
        let problem = Problem::new(what, remedy);
        let module = checkpoint.meta.module.clone();
        Error::from(CheckpointError::Mismatch { module, problem }).of_file(path)
    })
}

/// Copies the weights and scales of a checkpoint into a module. Returns what the module has saved beside them, if that is in the file.
pub(super) fn restore(
    module: &dyn Module,
    checkpoint: &mut Checkpoint,
    strict: bool,
) -> Result<Option<(Value, ModuleTensors)>> {
    let mut frozen = module.named_parameters();
    frozen.retain(|(fqn, _)| checkpoint.meta.frozen.contains(fqn));
    let frozen: Vec<_> = frozen.into_iter().map(|(fqn, parameter)| (fqn, parameter.full_size())).collect();
    load_weights(module, checkpoint, &frozen, strict)?;
    let Some(training) = &checkpoint.training else { return Ok(None) };
    load_fp8_state_dict(module, &training.fp8)?;
    let state = LoopState::deserialize(&training.json).map_err(|error| {
        let what = format!("its training state is not understood: {error}");
        let problem = Problem::new(what, "use another checkpoint, or one of weights alone");
        CheckpointError::Mismatch { module: checkpoint.meta.module.clone(), problem }
    })?;
    let tensors = ModuleTensors::of_checkpoint(&training.module, &[], Device::Cpu)?;
    Ok(Some((state.module, tensors)))
}
