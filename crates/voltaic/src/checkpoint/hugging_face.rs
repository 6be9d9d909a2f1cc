//! Names that Hugging Face's transformers give the weights of GPT-2 and ResNet, and those of voltaic's models.

use tch::Tensor;

use crate::error::{CheckpointError, Problem, Result};

type Named = Vec<(String, Tensor)>;

/// GPT-2's `Conv1D` keeps weights as `[in, out]`, a linear layer as `[out, in]`.
const TRANSPOSED: [&str; 4] =
    ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"];

/// Weights of transformers' `GPT2LMHeadModel`, `GPT2Model` or `ResNetForImageClassification` (basic blocks) under the names of
/// `Gpt` and `ResNet18`.
///
/// # Errors
/// [`CheckpointError::Mismatch`] if the names are of neither.
pub fn from_hugging_face(weights: &[(String, Tensor)]) -> Result<Named> {
    if weights.iter().any(|(name, _)| name.ends_with("attn.c_attn.weight")) {
        return gpt2_from(weights);
    }
    convert(weights, "ResNetForImageClassification", resnet_from)
}

/// The reverse of [`from_hugging_face`].
///
/// # Errors
/// [`CheckpointError::Mismatch`] if the names are of neither model.
pub fn to_hugging_face(weights: &[(String, Tensor)]) -> Result<Named> {
    if weights.iter().any(|(name, _)| name.ends_with("attn.c_attn.weight")) {
        let kept = weights.iter().filter(|(name, _)| name != "lm_head.weight"); // tied
        return kept.map(|(name, tensor)| Ok((name.clone(), transposed(name, tensor)?))).collect();
    }
    convert(weights, "ResNet18", resnet_to)
}

fn transposed(name: &str, tensor: &Tensor) -> Result<Tensor> {
    if TRANSPOSED.iter().any(|end| name.ends_with(end)) {
        return Ok(tensor.f_transpose(0, 1)?.f_contiguous()?);
    }
    Ok(tensor.shallow_clone())
}

fn gpt2_from(weights: &[(String, Tensor)]) -> Result<Named> {
    let mut own = Named::new();
    for (name, tensor) in weights {
        if name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") {
            continue; // the causal mask, which old files keep
        }
        let is_bare = !name.starts_with("transformer.") && name != "lm_head.weight";
        let full = if is_bare { format!("transformer.{name}") } else { name.clone() };
        own.push((full, transposed(name, tensor)?));
    }
    if !own.iter().any(|(name, _)| name == "lm_head.weight") {
        let embedding =
            own.iter().find(|(name, _)| name == "transformer.wte.weight").map(|(_, t)| t.shallow_clone());
        own.extend(embedding.map(|tensor| ("lm_head.weight".to_owned(), tensor)));
    }
    Ok(own)
}

fn convert(weights: &[(String, Tensor)], module: &str, rename: fn(&str) -> Option<String>) -> Result<Named> {
    let named = weights.iter().map(|(name, tensor)| match rename(name) {
        Some(name) => Ok((name, tensor.shallow_clone())),
        None => Err(CheckpointError::Mismatch {
            module: module.to_owned(),
            problem: Problem::new(
                format!("{name} is not a weight of it"),
                "GPT-2 and ResNets of basic blocks can be renamed",
            ),
        }
        .into()),
    });
    named.collect()
}

/// `resnet.encoder.stages.1.layers.0.layer.1.normalization.weight` as `layer2.0.bn2.weight`.
fn resnet_from(name: &str) -> Option<String> {
    let layer = |part: &str, index: &str| match part {
        "convolution" => Some(format!("conv{index}")),
        "normalization" => Some(format!("bn{index}")),
        _ => None,
    };
    let parts: Vec<&str> = name.strip_prefix("resnet.").unwrap_or(name).split('.').collect();
    Some(match parts[..] {
        ["classifier", "1", leaf] => format!("fc.{leaf}"),
        ["embedder", "embedder", part, leaf] => format!("{}.{leaf}", layer(part, "1")?),
        ["encoder", "stages", stage, "layers", block, "layer", index, part, leaf] => {
            let (stage, index) = (stage.parse::<u32>().ok()? + 1, index.parse::<u32>().ok()? + 1);
            format!("layer{stage}.{block}.{}.{leaf}", layer(part, &index.to_string())?)
        }
        ["encoder", "stages", stage, "layers", block, "shortcut", part, leaf] => {
            let place = if part == "convolution" { 0 } else { 1 };
            format!("layer{}.{block}.downsample.{place}.{leaf}", stage.parse::<u32>().ok()? + 1)
        }
        _ => return None,
    })
}

fn resnet_to(name: &str) -> Option<String> {
    let layer = |part: &str| {
        let (kind, index) = part.split_at(part.len().checked_sub(1)?);
        let index = index.parse::<u32>().ok()?.checked_sub(1)?;
        Some((
            index,
            match kind {
                "conv" => "convolution",
                "bn" => "normalization",
                _ => return None,
            },
        ))
    };
    let parts: Vec<&str> = name.split('.').collect();
    let stage = |part: &str| part.strip_prefix("layer")?.parse::<u32>().ok()?.checked_sub(1);
    Some(match parts[..] {
        ["fc", leaf] => format!("classifier.1.{leaf}"),
        [part, leaf] => format!("resnet.embedder.embedder.{}.{leaf}", layer(part)?.1),
        [first, block, "downsample", place, leaf] => {
            let part = if place == "0" { "convolution" } else { "normalization" };
            format!("resnet.encoder.stages.{}.layers.{block}.shortcut.{part}.{leaf}", stage(first)?)
        }
        [first, block, part, leaf] => {
            let (index, part) = layer(part)?;
            format!("resnet.encoder.stages.{}.layers.{block}.layer.{index}.{part}.{leaf}", stage(first)?)
        }
        _ => return None,
    })
}
