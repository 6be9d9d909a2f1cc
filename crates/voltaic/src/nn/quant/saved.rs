//! Quantized modules in files: float8 tensors under the names of the weights, and their scales beside them.

use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::layers::{Layer, layers};
use super::quantized::{LayerScales, Quantized};
use crate::checkpoint::{read_weights, write_weights};
use crate::error::{CheckpointError, Problem, Result};
use crate::nn::module::Module;
use crate::nn::parameter::Parameter;
use crate::nn::tree::ModuleExt;

const WEIGHT: &str = "weight_scale";
const WEIGHT_IN: &str = "weight_scale_in";
const INPUT: &str = "input_scale";
const OUTPUT: &str = "output_scale";
const HP_DTYPE: &str = "hp_dtype";
const FP8_DTYPE: &str = "fp8_dtype";

fn input_name(slot: usize) -> String {
    if slot == 0 { INPUT.to_owned() } else { format!("{INPUT}_{slot}") }
}

/// Whether layers of the module compute in float8 with scales that stay.
pub fn is_quantized(module: &impl ModuleExt) -> bool {
    layers(module.as_dyn()).iter().any(|layer| layer.quantized().is_some())
}

/// The scales of quantized layers, by name: `fc.weight_scale` `[1]` or `[out]`, `fc.input_scale` `[1]` or `[in]`, `input_scale_1` and so on
/// of further inputs, `output_scale`. Numbers are codes times scales. An empty tensor `hp_dtype` has the dtype of what a layer gives, if
/// that is set; without a weight `fp8_dtype` has that of its codes.
pub(crate) fn scales(module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
    let mut named = Vec::new();
    for layer in layers(module) {
        let Some(quantized) = layer.quantized() else { continue };
        let LayerScales { inputs, output, weight, weight_in } = &quantized.scales;
        let mut add = |name: &str, values: &[f32]| -> Result<()> {
            named.push((format!("{}.{name}", layer.fqn), Tensor::f_from_slice(values)?));
            Ok(())
        };
        for (slot, input) in inputs.iter().enumerate() {
            add(&input_name(slot), input)?;
        }
        if !weight.is_empty() {
            add(WEIGHT, weight)?;
        }
        if let Some(weight_in) = weight_in {
            add(WEIGHT_IN, weight_in)?;
        }
        if let Some(output) = output {
            add(OUTPUT, &[*output])?;
        }
        if layer.weight.is_none() {
            let empty = Tensor::f_zeros([0], (Kind::Uint8, tch::Device::Cpu))?;
            named.push((format!("{}.{FP8_DTYPE}", layer.fqn), empty.f_view_dtype(quantized.dtype)?));
        }
        if let Some(dtype) = quantized.hp_dtype {
            named.push((
                format!("{}.{HP_DTYPE}", layer.fqn),
                Tensor::f_zeros([0], (dtype, tch::Device::Cpu))?,
            ));
        }
    }
    Ok(named)
}

/// The state dict of a quantized module, with the scales: what [`save`] writes.
///
/// # Errors
/// If a strategy cannot gather a weight.
pub fn state_dict(module: &impl ModuleExt) -> Result<Vec<(String, Tensor)>> {
    let mut named = module.try_state_dict()?;
    named.extend(scales(module.as_dyn())?);
    Ok(named)
}

/// Writes a quantized module as safetensors: weights as float8 codes, and their scales.
///
/// # Errors
/// If the file cannot be written.
pub fn save(module: &impl ModuleExt, path: &Path) -> Result<()> {
    let host = state_dict(module)?
        .into_iter()
        .map(|(name, tensor)| Ok((name, tensor.f_detach()?.f_to_device(tch::Device::Cpu)?.f_contiguous()?)));
    write_weights(&host.collect::<Result<Vec<_>>>()?, path)
}

/// Loads a file of [`save`]: the layers that it has scales of are quantized, without measurements.
///
/// # Errors
/// If the file cannot be read, or is not of such a module.
pub fn load(module: &mut impl ModuleExt, path: &Path) -> Result<()> {
    let mut weights = read_weights(path)?;
    restore(module.as_dyn(), &mut weights)?;
    module.load_state_dict(&weights, true).map(drop)
}

/// Whether weights have scales beside them.
pub(crate) fn has_scales<'a>(mut names: impl Iterator<Item = &'a str>) -> bool {
    names.any(|name| name.ends_with(".weight_scale") || name.ends_with(".input_scale"))
}

/// Takes the scales out of the weights, and lets their layers compute with them. The weights themselves are to be loaded after that.
///
/// # Errors
/// If scales belong to no layer, or make no sense.
pub(crate) fn restore(module: &dyn Module, weights: &mut Vec<(String, Tensor)>) -> Result<()> {
    let refuse = |what: String| {
        let problem = Problem::new(what, "load the file into a module like the one that was quantized");
        CheckpointError::Mismatch { module: module.type_name().to_owned(), problem }
    };
    let all = layers(module);
    let is_scale = |name: &str| {
        let (fqn, last) = name.rsplit_once('.').unwrap_or(("", name));
        let is_input = last.strip_prefix(INPUT).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'));
        let is_one = is_input || [WEIGHT, WEIGHT_IN, OUTPUT, HP_DTYPE, FP8_DTYPE].contains(&last);
        is_one.then(|| (fqn.to_owned(), last.to_owned()))
    };
    let of_float8 = |tensor: &Tensor| matches!(tensor.kind(), Kind::Float8e4m3fn | Kind::Float8e5m2);
    let common = weights.iter().find(|(_, tensor)| of_float8(tensor)).map(|(_, tensor)| tensor.kind());
    let mut found: Vec<(String, Vec<(String, Tensor)>)> = Vec::new();
    let mut rest = Vec::new();
    for (name, tensor) in weights.drain(..) {
        match is_scale(&name) {
            None => rest.push((name, tensor)),
            Some((fqn, last)) => match found.iter_mut().find(|(known, _)| *known == fqn) {
                Some((_, own)) => own.push((last, tensor)),
                None => found.push((fqn, vec![(last, tensor)])),
            },
        }
    }
    *weights = rest;
    let mut quantized = Vec::new();
    for (fqn, own) in found {
        let Some(layer) = all.iter().find(|layer| layer.fqn == fqn) else {
            return Err(refuse(format!(
                "scales of {fqn}, which is no layer of this module that can be quantized"
            ))
            .into());
        };
        let dtype = match layer.weight {
            None => {
                let own = own.iter().find(|(name, tensor)| name == FP8_DTYPE && of_float8(tensor));
                own.map(|(_, tensor)| tensor.kind()).or(common).unwrap_or(Kind::Float8e4m3fn)
            }
            Some(weight) => {
                let values = weights.iter().find(|(name, _)| *name == format!("{fqn}.weight"));
                let Some((_, values)) = values.filter(|(_, values)| of_float8(values)) else {
                    return Err(refuse(format!("{fqn}.weight is no float8 tensor, and has scales")).into());
                };
                if values.size() != weight.size() {
                    let what = format!(
                        "{fqn}.weight has shape {:?}, the module's is {:?}",
                        values.size(),
                        weight.size()
                    );
                    return Err(refuse(what).into());
                }
                values.kind()
            }
        };
        let (scales, hp_dtype) = read_scales(layer, &own).map_err(|what| refuse(format!("{fqn}: {what}")))?;
        quantized.push((layer, Arc::new(Quantized::new(fqn, dtype, hp_dtype, scales))));
    }
    for (layer, quantized) in quantized {
        let empty = |weight: &Parameter| -> Result<Tensor> {
            let like = (Kind::Uint8, weight.device());
            Ok(Tensor::f_zeros(weight.size().as_slice(), like)?.f_view_dtype(quantized.dtype)?)
        };
        let codes = layer.weight.map(empty).transpose()?;
        layer.quantize(quantized, codes.as_ref())?;
    }
    Ok(())
}

/// The scales of a layer, all of which have been checked.
fn read_scales(
    layer: &Layer<'_>,
    own: &[(String, Tensor)],
) -> std::result::Result<(LayerScales, Option<Kind>), String> {
    let (rows, columns) = match layer.weight.map(|weight| weight.size()) {
        Some(size) => (size[0], size.get(1).copied().unwrap_or(1)),
        None => (1, 1),
    };
    let mut scales = LayerScales { inputs: vec![Vec::new(); layer.num_inputs], ..LayerScales::default() };
    let mut hp_dtype = None;
    for (name, tensor) in own.iter().filter(|(name, _)| name != FP8_DTYPE) {
        if name == HP_DTYPE {
            let kind = tensor.kind();
            if !matches!(kind, Kind::BFloat16 | Kind::Half | Kind::Float) || tensor.numel() != 0 {
                return Err(format!("hp_dtype is {kind:?}"));
            }
            hp_dtype = Some(kind);
            continue;
        }
        let values: Vec<f32> = (tensor.kind() == Kind::Float)
            .then(|| tensor.f_reshape([-1]).and_then(|flat| Vec::try_from(&flat)).ok())
            .flatten()
            .ok_or_else(|| format!("{name} is {:?}, not float32", tensor.kind()))?;
        let fits = |most: i64| values.len() == 1 || values.len() as i64 == most;
        let are_scales = values.iter().all(|scale| scale.is_normal() && *scale > 0.0);
        let slot = match name.strip_prefix(INPUT) {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix('_').and_then(|slot| slot.parse::<usize>().ok()),
            None => None,
        };
        let most = match name.as_str() {
            WEIGHT => rows,
            OUTPUT => 1,
            _ => columns,
        };
        if !are_scales || !fits(most) {
            return Err(format!(
                "{name} has {} numbers, which are no scales of 1 or {most} channels",
                values.len()
            ));
        }
        match (name.as_str(), slot) {
            (WEIGHT, _) => scales.weight = values,
            (WEIGHT_IN, _) => scales.weight_in = Some(values),
            (OUTPUT, _) => scales.output = values.first().copied(),
            (_, Some(slot)) if slot < layer.num_inputs => scales.inputs[slot] = values,
            _ => return Err(format!("{name} is of no input")),
        }
    }
    let columns = columns as usize;
    let per_channel = scales.inputs.iter().any(|input| input.len() > 1);
    let is_whole = scales.inputs.iter().all(|input| !input.is_empty())
        && layer.weight.is_some() != scales.weight.is_empty()
        && per_channel == (scales.weight_in.is_some() && columns > 1)
        && scales.weight_in.as_ref().is_none_or(|weight_in| weight_in.len() == columns);
    if is_whole { Ok((scales, hp_dtype)) } else { Err("scales are missing".to_owned()) }
}
