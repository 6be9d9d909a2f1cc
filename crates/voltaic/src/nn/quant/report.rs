//! What quantization has done to each layer.

use super::layers::layers;
use super::quantized::CastCounts;
use crate::nn::module::Module;
use crate::nn::tree::ModuleExt;

/// What quantization has done to one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerReport {
    /// The layer.
    pub fqn: String,
    /// Its type.
    pub type_name: &'static str,
    /// Smallest and largest scale of its inputs.
    pub input_scale: (f32, f32),
    /// Smallest and largest scale of its weight, if it has one.
    pub weight_scale: Option<(f32, f32)>,
    /// The root mean square of what rounding took from the weight, as a part of that of the weight; if it was cast in this process.
    pub weight_error: Option<f64>,
    /// The part of the weight that was larger than the range of its scale.
    pub weight_clipped: Option<f64>,
    /// The root mean square of what rounding took from what it was given, as a part of that; if [`count_casts`] has begun before.
    pub input_error: Option<f64>,
    /// The part of what it was given that was larger than the range of its scale.
    pub input_clipped: Option<f64>,
    /// Bytes of the weight.
    pub bytes: usize,
}

fn range<'a>(scales: impl Iterator<Item = &'a f32>) -> (f32, f32) {
    scales.fold((f32::INFINITY, 0.0), |(low, high), scale| (low.min(*scale), high.max(*scale)))
}

/// Begins to count what quantized layers cast, which takes time.
pub fn count_casts(module: &impl ModuleExt) {
    for layer in layers(module.as_dyn()) {
        if let Some(layer) = layer.quantized() {
            layer.count_casts(true);
        }
    }
}

/// What quantization has done to each layer, in the order of the module; ends what [`count_casts`] began.
pub fn report(module: &impl ModuleExt) -> Vec<LayerReport> {
    report_of(module.as_dyn())
}

fn report_of(module: &dyn Module) -> Vec<LayerReport> {
    let all = layers(module).into_iter().filter_map(|layer| {
        let quantized = layer.quantized()?;
        let inputs = quantized.count_casts(false).filter(|counts| counts.numbers > 0.0);
        let scales = &quantized.scales;
        let weight = quantized.weight_casts;
        Some(LayerReport {
            fqn: layer.fqn,
            type_name: layer.type_name,
            input_scale: range(scales.inputs.iter().flatten()),
            weight_scale: (!scales.weight.is_empty()).then(|| range(scales.weight.iter())),
            weight_error: weight.as_ref().map(CastCounts::error),
            weight_clipped: weight.as_ref().map(CastCounts::clipped_share),
            input_error: inputs.as_ref().map(CastCounts::error),
            input_clipped: inputs.as_ref().map(CastCounts::clipped_share),
            bytes: layer.weight.map_or(0, |weight| weight.numel() * weight.kind().elt_size_in_bytes()),
        })
    });
    all.collect()
}
