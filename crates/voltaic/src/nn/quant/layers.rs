//! The layers of a module that inference can convert.

use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::error::{ConfigError, Result};
use crate::nn::calls::reach::unwrapped;
use crate::nn::compute::{Compute, ComputeMode};
use crate::nn::fp8_attention::FusedAttention;
use crate::nn::layers::activation::Softmax;
use crate::nn::layers::conv::Conv2d;
use crate::nn::layers::kv_cache::KvCacheLayer;
use crate::nn::layers::linear::Linear;
use crate::nn::layers::matmul::Matmul;
use crate::nn::module::{Identity, Member, Module, identity};
use crate::nn::parameter::Parameter;
use crate::nn::quant::quantized::Quantized;
use crate::nn::tree::ModuleExt;
use crate::precision::fp8::{LayerType, WeightRows};

/// A layer that can be measured and quantized.
pub(super) struct Layer<'a> {
    pub fqn: String,
    pub type_name: &'static str,
    pub layer_type: LayerType,
    pub compute: &'a ComputeMode,
    pub weight: Option<&'a Parameter>,
    pub bias: Option<&'a Parameter>,
    /// The dimension of an input's channels.
    pub channel_dim: i64,
    /// Tensors that it casts, beside weights.
    pub num_inputs: usize,
    /// The weight belongs to another module, too.
    pub is_tied: bool,
}

impl Layer<'_> {
    /// Scales need what it gives.
    pub(super) fn requires_output(&self) -> bool {
        matches!(self.layer_type, LayerType::Softmax | LayerType::FusedSdpa)
    }

    /// Lets it compute in float8 by these scales, with codes in the place of its weight. Its parameters are not trained from then on.
    pub(super) fn quantize(&self, quantized: Arc<Quantized>, codes: Option<&Tensor>) -> Result<()> {
        for parameter in [self.weight, self.bias].into_iter().flatten() {
            let _ = parameter.set_requires_grad(false);
        }
        if let (Some(weight), Some(codes)) = (self.weight, codes) {
            weight.set_data(codes)?;
        }
        self.compute.set(Compute::Quantized(quantized));
        Ok(())
    }

    /// Its scales, if it is quantized.
    pub(super) fn quantized(&self) -> Option<Arc<Quantized>> {
        match self.compute.get() {
            Compute::Quantized(layer) => Some(layer),
            _ => None,
        }
    }
}

/// All of a module, each once, by fqn.
pub(super) fn layers(root: &dyn Module) -> Vec<Layer<'_>> {
    let modules = root.named_modules();
    let mut owners: Vec<(u64, Identity)> = Vec::new();
    for (_, module) in &modules {
        module.members(&mut |_, member| {
            if let Member::Parameter(parameter) = member {
                owners.push((parameter.id(), identity(*module)));
            }
        });
    }
    let is_tied = |weight: &Parameter| {
        let mut own = owners.iter().filter(|(id, _)| *id == weight.id()).map(|(_, owner)| owner);
        let first = own.next();
        own.any(|owner| Some(owner) != first)
    };
    let mut found: Vec<Layer<'_>> = Vec::new();
    for (fqn, module) in modules {
        let plain = |layer_type, compute, num_inputs| Layer {
            fqn: fqn.clone(),
            type_name: module.type_name(),
            layer_type,
            compute,
            weight: None,
            bias: None,
            channel_dim: -1,
            num_inputs,
            is_tied: false,
        };
        let layer = if let Some(layer) = unwrapped::<Linear>(module) {
            Layer {
                weight: Some(&layer.weight),
                bias: layer.bias.as_ref(),
                is_tied: is_tied(&layer.weight),
                ..plain(LayerType::Linear, &layer.compute, 1)
            }
        } else if let Some(layer) = unwrapped::<Conv2d>(module) {
            Layer {
                weight: Some(&layer.weight),
                bias: layer.bias.as_ref(),
                channel_dim: -3,
                is_tied: is_tied(&layer.weight),
                ..plain(LayerType::Linear, &layer.compute, 1)
            }
        } else if let Some(layer) = unwrapped::<Matmul>(module) {
            plain(LayerType::Matmul, &layer.compute, 2)
        } else if let Some(layer) = unwrapped::<Softmax>(module) {
            plain(LayerType::Softmax, &layer.compute, 1)
        } else if let Some(layer) = unwrapped::<KvCacheLayer>(module) {
            plain(LayerType::KvCache, &layer.compute, 1)
        } else if let Some(layer) = unwrapped::<FusedAttention>(module) {
            plain(LayerType::FusedSdpa, &layer.compute, 4)
        } else {
            continue;
        };
        if !found.iter().any(|known| std::ptr::eq(known.compute, layer.compute)) {
            found.push(layer);
        }
    }
    found
}

/// The numbers of a weight, in memory of the host.
pub(super) struct WeightValues {
    pub shape: Vec<i64>,
    pub values: Vec<f32>,
}

impl WeightValues {
    /// Of a layer's weight.
    ///
    /// # Sync
    /// Reads from the device.
    ///
    /// # Errors
    /// If a strategy keeps the weight.
    pub(super) fn of(fqn: &str, weight: &Parameter) -> Result<Self> {
        if weight.is_kept() {
            let what = format!("the strategy keeps {fqn}.weight, which is sharded among ranks");
            let remedy =
                "call convert_modules before the trainer, or use a strategy that does not shard weights";
            return Err(ConfigError::new("fp8 inference", what, remedy).into());
        }
        let tensor = weight.try_tensor()?.f_detach()?;
        let flat = tensor.f_to_kind(Kind::Float)?.f_to_device(tch::Device::Cpu)?.f_reshape([-1])?;
        Ok(Self { shape: tensor.size(), values: Vec::try_from(&flat)? })
    }

    pub(super) fn rows(&self) -> WeightRows<'_> {
        WeightRows { values: &self.values, rows: self.shape[0] as usize }
    }
}

/// Codes as a tensor of a shape.
pub(super) fn codes_tensor(codes: &[u8], dtype: Kind, shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(codes)?.f_view_dtype(dtype)?.f_view(shape)?)
}
