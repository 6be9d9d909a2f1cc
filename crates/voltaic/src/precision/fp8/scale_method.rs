//! Scales of quantized layers from largest magnitudes. A scale is what codes are multiplied by: `code = cast(x / scale)`.

use serde::{Deserialize, Serialize};

use super::quant_words::{QuantFormat, ScaleDevice, words};
use crate::error::ConfigError;
use crate::kernels::{Float8Format, Floats, FloatsMut, from_float8, to_float8};

words! {
    /// How scales are made of largest magnitudes.
    ScaleMethod, MaxabsHw, "invalid scale_method in custom config";
    /// All scales are 1; nothing is measured.
    UnitScale = "unit_scale",
    /// All scales are the largest that the hardware has; nothing is measured.
    HwAlignedSingleScale = "hw_aligned_single_scale",
    /// Scales that the hardware has.
    MaxabsHw = "maxabs_hw",
    /// Powers of two.
    MaxabsPow2 = "maxabs_pow2",
    /// Not rounded.
    MaxabsArbitrary = "maxabs_arbitrary",
    /// As `maxabs_hw`; for a weight the scale of the hardware with the least error.
    MaxabsHwOptWeight = "maxabs_hw_opt_weight",
    /// As `maxabs_pow2`; for a weight the power of two with the least error.
    MaxabsPow2OptWeight = "maxabs_pow2_opt_weight",
    /// Inputs as `maxabs_hw`; a power of two for each output channel of a weight.
    ActMaxabsHwWeightsPcsMaxabsPow2 = "act_maxabs_hw_weights_pcs_maxabs_pow2",
    /// Inputs as `maxabs_hw`; for each output channel of a weight the power of two with the least error.
    ActMaxabsHwWeightsPcsOptPow2 = "act_maxabs_hw_weights_pcs_opt_pow2",
    /// Inputs as `maxabs_pow2`; a power of two for each output channel of a weight.
    ActMaxabsPow2WeightsPcsMaxabsPow2 = "act_maxabs_pow2_weights_pcs_maxabs_pow2",
    /// Inputs as `maxabs_pow2`; for each output channel of a weight the power of two with the least error.
    ActMaxabsPow2WeightsPcsOptPow2 = "act_maxabs_pow2_weights_pcs_opt_pow2",
    /// A scale for each input channel, which moves its range from the input to the weight; a power of two for each output channel
    /// ([Xiao et al., 2022](https://arxiv.org/abs/2211.10438)).
    SmoothquantMaxabsPow2 = "smoothquant_weights_output_channel_maxabs_pow2",
    /// The same of ranges that are divided by their middle first.
    WeaksmoothquantMaxabsPow2 = "weaksmoothquant_weights_output_channel_maxabs_pow2",
    /// The same with the scale of least error for each output channel.
    SmoothquantOpt = "smoothquant_opt",
}

/// What kind of layer scales are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerType {
    Linear,
    Matmul,
    Softmax,
    FusedSdpa,
    KvCache,
}

impl LayerType {
    /// The name in Habana's tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Matmul => "matmul",
            Self::Softmax => "softmax",
            Self::FusedSdpa => "fused_sdpa",
            Self::KvCache => "kv_cache",
        }
    }
}

/// How a scale is rounded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rounding {
    Hw,
    Pow2,
    None,
    /// Another value in its place.
    Fixed(f64),
}

impl ScaleMethod {
    pub(crate) fn needs_channels(self) -> bool {
        matches!(self, Self::SmoothquantMaxabsPow2 | Self::WeaksmoothquantMaxabsPow2 | Self::SmoothquantOpt)
    }

    pub(crate) fn needs_no_measures(self) -> bool {
        matches!(self, Self::UnitScale | Self::HwAlignedSingleScale)
    }

    /// How scales of inputs are rounded; `None` if the method has none for such layers.
    pub(crate) fn of_inputs(self, layer: LayerType, device: ScaleDevice) -> Option<Rounding> {
        use LayerType::{FusedSdpa, KvCache, Linear, Matmul, Softmax};
        match (self, layer) {
            (Self::UnitScale, _) | (Self::HwAlignedSingleScale, Matmul) => Some(Rounding::Fixed(1.0)),
            (Self::HwAlignedSingleScale, _) => Some(Rounding::Fixed(hw_exponents(device).2.exp2())),
            (Self::MaxabsArbitrary, _) => Some(Rounding::None),
            (Self::MaxabsHw, _) | (Self::MaxabsHwOptWeight, Linear | Matmul | Softmax | FusedSdpa) => {
                Some(Rounding::Hw)
            }
            (Self::MaxabsPow2 | Self::MaxabsPow2OptWeight, Linear | Matmul) => Some(Rounding::Pow2),
            (Self::ActMaxabsHwWeightsPcsMaxabsPow2, KvCache) => Some(Rounding::Hw),
            (
                Self::ActMaxabsHwWeightsPcsMaxabsPow2 | Self::ActMaxabsHwWeightsPcsOptPow2,
                Linear | Matmul | FusedSdpa,
            ) => Some(Rounding::Hw),
            (
                Self::ActMaxabsPow2WeightsPcsMaxabsPow2 | Self::ActMaxabsPow2WeightsPcsOptPow2,
                Linear | Matmul | FusedSdpa,
            ) => Some(Rounding::Pow2),
            (method, Matmul) if method.needs_channels() => Some(Rounding::Hw),
            (method, Linear) if method.needs_channels() => Some(Rounding::Pow2),
            _ => None,
        }
    }
}

/// Numbers of a scale method; those that are not given are the method's.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScaleParams {
    /// The part of the format's range that the largest magnitude of an input takes; 0.25 unless given.
    pub input_backoff: Option<f64>,
    /// The part of the format's range that the largest magnitude of a weight takes; 0.5 unless given.
    pub weight_backoff: Option<f64>,
    /// How much of an input channel's range is moved to the weight; 0.5 unless given.
    pub alpha: Option<f64>,
    /// Scales, or factors of scales by channel, that are tried for a weight.
    pub weight_scales: Option<Vec<f64>>,
    /// Factors of scales that `smoothquant_opt` tries.
    pub transformed_weight_scales: Option<Vec<f64>>,
}

impl ScaleParams {
    pub(crate) fn check(&self, origin: &str) -> Result<(), ConfigError> {
        let is_scale = |scale: &f64| scale.is_finite() && *scale > 0.0 && scale.log2().abs() < 100.0;
        for (key, value) in [("input_backoff", self.input_backoff), ("weight_backoff", self.weight_backoff)] {
            if let Some(value) = value.filter(|value| !is_scale(value)) {
                let key = format!("{origin}.scale_params.{key}");
                return Err(ConfigError::new(key, value.to_string(), "give a number above 0, such as 0.5"));
            }
        }
        if let Some(alpha) = self.alpha.filter(|alpha| !(0.0..=1.0).contains(alpha)) {
            let key = format!("{origin}.scale_params.alpha");
            return Err(ConfigError::new(key, alpha.to_string(), "give a number from 0 to 1"));
        }
        let lists = [
            ("weight_scales", &self.weight_scales),
            ("transformed_weight_scales", &self.transformed_weight_scales),
        ];
        for (key, scales) in lists {
            if let Some(scales) = scales
                && (scales.is_empty() || scales.len() > 256 || !scales.iter().all(is_scale))
            {
                let key = format!("{origin}.scale_params.{key}");
                let remedy = "give a list of up to 256 numbers above 0";
                return Err(ConfigError::new(key, format!("{scales:?}"), remedy));
            }
        }
        Ok(())
    }

    fn input_backoff(&self) -> f64 {
        self.input_backoff.unwrap_or(0.25)
    }

    fn weight_backoff(&self) -> f64 {
        self.weight_backoff.unwrap_or(0.5)
    }

    fn weight_scales(&self, exponents: impl Iterator<Item = i32>) -> Vec<f64> {
        self.weight_scales.clone().unwrap_or_else(|| exponents.map(|e| f64::from(e).exp2()).collect())
    }
}

/// Makes scales for the layers of a module.
#[derive(Debug, Clone)]
pub(crate) struct Scaler {
    pub method: ScaleMethod,
    pub params: ScaleParams,
    pub format: Float8Format,
    pub device: ScaleDevice,
}

/// The scales of a layer with a weight.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WeightScales {
    /// One, or one for each input channel.
    pub input: Vec<f32>,
    /// One, or one for each output channel.
    pub weight: Vec<f32>,
    /// A factor of the weight's scale for each input channel.
    pub weight_in: Option<Vec<f32>>,
}

/// A weight as a matrix with a row for each output channel.
#[derive(Clone, Copy)]
pub(crate) struct WeightRows<'a> {
    pub values: &'a [f32],
    pub rows: usize,
}

impl WeightRows<'_> {
    fn columns(&self) -> usize {
        self.values.len() / self.rows.max(1)
    }

    fn row_maxabs(&self) -> Vec<f64> {
        self.values.chunks(self.columns().max(1)).map(maxabs).collect()
    }

    fn column_maxabs(&self) -> Vec<f64> {
        let mut most = vec![0.0_f64; self.columns()];
        for row in self.values.chunks(most.len().max(1)) {
            most.iter_mut().zip(row).for_each(|(most, value)| *most = most.max(f64::from(value.abs())));
        }
        most
    }
}

fn maxabs(values: &[f32]) -> f64 {
    f64::from(values.iter().fold(0.0_f32, |most, value| most.max(value.abs())))
}

/// The smallest power of two that is not below it.
fn pow2(scale: f64) -> f64 {
    let below = f64::from_bits(scale.to_bits() & !((1 << 52) - 1));
    if below == scale { scale } else { 2.0 * below }
}

/// Lowest and highest exponent of the hardware's scales, the one of the single scale, and their distance.
fn hw_exponents(device: ScaleDevice) -> (f64, f64, f64, f64) {
    match device {
        ScaleDevice::Gaudi2 => (-8.0, 4.0, 4.0, 4.0),
        ScaleDevice::Gaudi3 => (-55.0, 7.0, 7.0, 1.0),
    }
}

fn hw(scale: f64, device: ScaleDevice) -> f64 {
    let (low, high, _, step) = hw_exponents(device);
    ((pow2(scale).log2() / step).ceil() * step).clamp(low, high).exp2()
}

/// The format's name in kernels.
pub(crate) fn kernel_format(format: QuantFormat) -> Float8Format {
    match format {
        QuantFormat::E4M3 => Float8Format::E4m3,
        QuantFormat::E5M2 => Float8Format::E5m2,
    }
}

impl Scaler {
    /// The scale of a largest magnitude that takes `backoff` of the format's range, within that of float32. Nothing but zeros has a
    /// scale of 1.
    fn base(&self, maxabs: f64, backoff: f64) -> f64 {
        let scale = maxabs / (f64::from(self.format.max()) * backoff);
        if maxabs > 0.0 { scale.clamp((-100_f64).exp2(), 100_f64.exp2()) } else { 1.0 }
    }

    fn round(&self, scale: f64, rounding: Rounding) -> f64 {
        match rounding {
            Rounding::Hw => hw(scale, self.device),
            Rounding::Pow2 => pow2(scale),
            Rounding::None => scale,
            Rounding::Fixed(scale) => scale,
        }
    }

    /// The scale of an input, or of the output of a softmax, whose largest magnitudes were measured.
    pub(crate) fn input(&self, measured: &[f32], rounding: Rounding) -> f32 {
        self.round(self.base(maxabs(measured), self.params.input_backoff()), rounding) as f32
    }

    /// The squared error of the values with this scale.
    fn error(&self, values: &[f32], scale: f64) -> f64 {
        let scale = scale as f32;
        values
            .iter()
            .zip(rounded(values, scale, self.format))
            .fold(0.0, |sum, (value, rounded)| sum + f64::from(value - rounded * scale).powi(2))
    }

    /// The scale with the least error; of equal ones the last.
    fn last_best(&self, values: &[f32], scales: &[f64]) -> f64 {
        let mut best = (f64::INFINITY, 1.0);
        for scale in scales {
            let error = self.error(values, *scale);
            if error <= best.0 {
                best = (error, *scale);
            }
        }
        best.1
    }

    /// The scale with the least error; of equal ones the first.
    fn first_best(&self, values: &[f32], scales: impl Iterator<Item = f64>) -> f64 {
        let mut best = (f64::INFINITY, 1.0);
        for scale in scales {
            let error = self.error(values, scale);
            if error < best.0 {
                best = (error, scale);
            }
        }
        best.1
    }

    /// The scales of a layer with a weight, whose input had these largest magnitudes.
    pub(crate) fn weight(&self, input: &[f32], rounding: Rounding, weight: WeightRows<'_>) -> WeightScales {
        if self.method.needs_channels() {
            return self.smooth(input, weight);
        }
        let backoff = self.params.weight_backoff();
        let whole = || self.base(maxabs(weight.values), backoff);
        let by_row = || weight.row_maxabs().into_iter().map(|most| pow2(self.base(most, backoff)));
        let scales = match self.method {
            ScaleMethod::MaxabsHwOptWeight => {
                let scales = self.params.weight_scales([4, 0, -4, -8].into_iter());
                vec![hw(self.last_best(weight.values, &scales), self.device)]
            }
            ScaleMethod::MaxabsPow2OptWeight => {
                vec![pow2(self.last_best(weight.values, &self.params.weight_scales(-10..10)))]
            }
            ScaleMethod::ActMaxabsHwWeightsPcsMaxabsPow2 | ScaleMethod::ActMaxabsPow2WeightsPcsMaxabsPow2 => {
                by_row().collect()
            }
            ScaleMethod::ActMaxabsHwWeightsPcsOptPow2 | ScaleMethod::ActMaxabsPow2WeightsPcsOptPow2 => {
                let factors = self.params.weight_scales(-3..5);
                let rows = weight.values.chunks(weight.columns().max(1));
                let best =
                    |(row, scale)| self.first_best(row, factors.iter().map(move |factor| factor * scale));
                rows.zip(by_row()).map(best).collect()
            }
            _ => vec![self.round(whole(), rounding)],
        };
        WeightScales { input: vec![self.input(input, rounding)], weight: narrow(&scales), weight_in: None }
    }

    /// A scale for each input channel, from the ranges of both factors.
    fn smooth(&self, input: &[f32], weight: WeightRows<'_>) -> WeightScales {
        let (alpha, is_weak) =
            (self.params.alpha.unwrap_or(0.5), self.method == ScaleMethod::WeaksmoothquantMaxabsPow2);
        let is_opt = self.method == ScaleMethod::SmoothquantOpt;
        let (bi, bw) = (self.params.input_backoff(), self.params.weight_backoff());
        let of_input: Vec<f64> = input.iter().map(|most| f64::from(*most)).collect();
        let of_weight = weight.column_maxabs();
        let ranges = |measured: &[f64], backoff: f64| -> Vec<f64> {
            if is_opt {
                return measured.iter().map(|most| self.base(*most, backoff)).collect();
            }
            if !is_weak {
                return measured.to_vec();
            }
            let clamped: Vec<f64> = measured.iter().map(|most| most.max(1e-5)).collect();
            let low = clamped.iter().copied().fold(f64::INFINITY, f64::min);
            let high = clamped.iter().copied().fold(0.0, f64::max);
            let middle = (low * high).sqrt();
            clamped.iter().map(|most| (most / middle).max(1e-5)).collect()
        };
        let scale_of = |(x, w): (f64, f64)| match x > 0.0 && w > 0.0 {
            true if is_weak => pow2((x.powf(alpha) / w.powf(1.0 - alpha)).max(1e-5)),
            true => pow2(x.powf(alpha) / w.powf(1.0 - alpha)),
            false => 1.0,
        };
        let pairs = ranges(&of_input, bi).into_iter().zip(ranges(&of_weight, bw));
        let mut scales: Vec<f64> = pairs.map(scale_of).collect();
        let mut after = 1.0;
        if !is_opt {
            let most = of_input.iter().zip(&scales).map(|(most, scale)| most / scale).fold(0.0, f64::max);
            after = pow2(self.base(most, bi));
        }
        if !is_weak {
            scales.iter_mut().for_each(|scale| *scale *= after);
            after = 1.0;
        }
        let columns = scales.len().max(1);
        let moved: Vec<f32> = weight
            .values
            .chunks(columns)
            .flat_map(|row| row.iter().zip(&scales).map(|(value, scale)| (f64::from(*value) * scale) as f32))
            .collect();
        let of_rows = moved.chunks(columns).map(|row| {
            let scale = pow2(self.base(maxabs(row), bw));
            if !is_opt {
                return scale;
            }
            let factors = self.params.transformed_weight_scales.clone();
            let factors = factors.unwrap_or_else(|| (-3..5).map(|e| f64::from(e).exp2()).collect());
            let tried: Vec<f64> = factors.iter().map(|factor| factor * scale).collect();
            pow2(self.last_best(row, &tried))
        });
        WeightScales {
            weight: narrow(&of_rows.collect::<Vec<_>>()),
            weight_in: Some(scales.iter().map(|scale| (1.0 / scale) as f32).collect()),
            input: scales.iter().map(|scale| (scale * after) as f32).collect(),
        }
    }
}

fn narrow(scales: &[f64]) -> Vec<f32> {
    scales.iter().map(|scale| *scale as f32).collect()
}

/// What is left of `values / scale` in the format.
pub(crate) fn rounded(values: &[f32], scale: f32, format: Float8Format) -> Vec<f32> {
    let mut codes = vec![0; values.len()];
    to_float8(Floats::Float32(values), &mut codes, format, 1.0 / scale, None);
    let mut wide = vec![0.0; values.len()];
    from_float8(&codes, FloatsMut::Float32(&mut wide), format, 1.0);
    wide
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Fixture {
        x: Vec<f32>,
        weight: Vec<f32>,
        linear: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        method: ScaleMethod,
        device: ScaleDevice,
        format: QuantFormat,
        scales: (Vec<f32>, Vec<f32>, Option<Vec<f32>>),
    }

    #[test]
    fn scales_are_those_of_the_formulas() {
        let fixture = include_str!("../../../tests/fixtures/fp8/quant.json");
        let Fixture { x, weight, linear } = serde_json::from_str(fixture).unwrap();
        let weight = WeightRows { values: &weight, rows: 6 };
        let by_channel: Vec<f32> =
            WeightRows { values: &x, rows: 5 }.column_maxabs().into_iter().map(|most| most as f32).collect();
        assert_eq!(linear.len(), 2 * 2 * 14, "each method, format and generation");
        for Case { method, device, format, scales } in linear {
            let scaler =
                Scaler { method, params: ScaleParams::default(), format: kernel_format(format), device };
            let rounding = method.of_inputs(LayerType::Linear, device).unwrap();
            let input =
                if method.needs_channels() { by_channel.clone() } else { vec![maxabs(&by_channel) as f32] };
            let found = scaler.weight(&input, rounding, weight);
            assert_eq!((found.input, found.weight, found.weight_in), scales, "{method} {device} {format}");
        }
    }

    #[test]
    fn scales_are_within_what_the_hardware_has() {
        for (scale, gaudi2, gaudi3) in [
            (1e-9, -8.0, -29.0),
            (0.003, -8.0, -8.0),
            (0.004, -4.0, -7.0),
            (0.0625, -4.0, -4.0),
            (1.0, 0.0, 0.0),
            (1.5, 4.0, 1.0),
            (1e9, 4.0, 7.0),
        ] {
            assert_eq!(hw(scale, ScaleDevice::Gaudi2).log2(), gaudi2, "{scale}");
            assert_eq!(hw(scale, ScaleDevice::Gaudi3).log2(), gaudi3, "{scale}");
        }
    }

    #[test]
    fn zeros_and_extremes_have_scales_that_are_numbers() {
        for method in
            [ScaleMethod::MaxabsArbitrary, ScaleMethod::MaxabsPow2, ScaleMethod::SmoothquantMaxabsPow2]
        {
            let device = ScaleDevice::Gaudi2;
            let scaler =
                Scaler { method, params: ScaleParams::default(), format: Float8Format::E4m3, device };
            let rounding = method.of_inputs(LayerType::Linear, device).unwrap();
            for number in [0.0, 1e-40, 1e-30, 3e38] {
                let values = [number, -number, 0.0, number];
                let found = scaler.weight(&[number, 0.0], rounding, WeightRows { values: &values, rows: 2 });
                let all = found.input.iter().chain(&found.weight).chain(found.weight_in.iter().flatten());
                assert!(
                    all.clone().all(|scale| scale.is_normal() && *scale > 0.0),
                    "{method} {number} {found:?}"
                );
            }
        }
    }
}
