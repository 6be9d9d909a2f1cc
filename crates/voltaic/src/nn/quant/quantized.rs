//! Layers that compute in float8 with scales that stay.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use crate::device::Device;
use crate::error::{Error, ModuleError, Problem, Result};
use crate::ffi::{Fp8Cast, Fp8Tensor, Fp8Tensors, RecordingPause, fp8_mm, fp8_to};
use crate::precision::fp8::check_device;
use crate::precision::{AutocastGuard, autocast_dtype, disable_casts, is_autocast_enabled};

/// The scales of a layer, by which codes are multiplied.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LayerScales {
    /// For each input one, or one for each of its channels. Attention has that of its weights in the fourth place.
    pub inputs: Vec<Vec<f32>>,
    /// Of what it gives, if that is float8 for a moment.
    pub output: Option<f32>,
    /// Of its weight: one, or one for each output channel; none without a weight.
    pub weight: Vec<f32>,
    /// A factor of the weight's scale for each input channel.
    pub weight_in: Option<Vec<f32>>,
}

/// What quantized layers have cast, while that is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct CastCounts {
    pub numbers: f64,
    /// Larger than the format's range.
    pub clipped: f64,
    /// Sums of squares of the numbers, and of what rounding took from them.
    pub squares: f64,
    pub errors: f64,
}

impl CastCounts {
    /// The root mean square of what rounding took, as a part of that of the numbers.
    pub(crate) fn error(&self) -> f64 {
        if self.squares > 0.0 { (self.errors / self.squares).sqrt() } else { 0.0 }
    }

    /// The part of the numbers that was clipped.
    pub(crate) fn clipped_share(&self) -> f64 {
        if self.numbers > 0.0 { self.clipped / self.numbers } else { 0.0 }
    }
}

/// A layer in float8.
#[derive(Debug)]
pub(crate) struct Quantized {
    pub fqn: String,
    /// Of codes.
    pub dtype: Kind,
    /// Of what it gives; that of activations if there is none.
    pub hp_dtype: Option<Kind>,
    pub scales: LayerScales,
    /// What casting the weight has done, if it was cast in this process.
    pub weight_casts: Option<CastCounts>,
    /// Tells scales apart.
    number: u64,
    on_device: Mutex<OnDevice>,
    counts: Mutex<Option<CastCounts>>,
}

/// Scales as tensors on a device.
#[derive(Debug)]
struct OnDevice {
    /// None before the first call.
    device: Option<Device>,
    inputs: Vec<Cast>,
    output: Option<Cast>,
    /// `[1]` or `[out]`.
    weight: Tensor,
}

/// One cast.
#[derive(Debug)]
struct Cast {
    /// What each channel is multiplied by first.
    channels: Option<Tensor>,
    scale: Fp8Tensors,
}

impl Cast {
    /// `after` is the part of the scales of channels that stays with the product.
    fn new(scales: &[f32], weight_in: Option<&[f32]>, device: Device) -> Result<Self> {
        let on = |values: &[f32]| Ok::<_, Error>(Tensor::f_from_slice(values)?.f_to_device(device.tch())?);
        let (channels, scale, scale_inv) = match (scales, weight_in) {
            (scales, Some(weight_in)) => {
                let inverse: Vec<f32> = scales.iter().map(|scale| 1.0 / scale).collect();
                let after = scales.iter().zip(weight_in).map(|(a, b)| a * b).next().unwrap_or(1.0);
                (Some(on(&inverse)?), 1.0, after)
            }
            (scales, None) => {
                let scale = scales.first().copied().unwrap_or(1.0);
                (None, 1.0 / scale, scale)
            }
        };
        let history = Tensor::f_zeros([1, 1], (Kind::Float, device.tch()))?;
        let index = Tensor::f_zeros([1], (Kind::Int, device.tch()))?;
        let scale = Fp8Tensors {
            scale: on(&[scale])?,
            scale_inv: on(&[scale_inv])?,
            amax_history: history,
            amax_history_index: index,
        };
        Ok(Self { channels, scale })
    }
}

/// What holds during a call: scales on its device, and operators that neither cast nor record gradients.
struct Call<'a> {
    /// Of what the layer gives.
    dtype: Kind,
    _no_grad: tch::NoGradGuard,
    _no_casts: AutocastGuard,
    scales: MutexGuard<'a, OnDevice>,
}

/// The largest number of a format.
fn largest(dtype: Kind) -> f64 {
    if dtype == Kind::Float8e4m3fn { 240.0 } else { 57344.0 }
}

fn wrong(fqn: &str, what: String, remedy: &'static str) -> Error {
    ModuleError::Input { layer: fqn.to_owned(), problem: Problem::new(what, remedy) }.into()
}

impl Quantized {
    pub(crate) fn new(fqn: String, dtype: Kind, hp_dtype: Option<Kind>, scales: LayerScales) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(3); // 1 and 2 are those of other modes
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let nothing = OnDevice { device: None, inputs: Vec::new(), output: None, weight: Tensor::new() };
        let (on_device, counts) = (Mutex::new(nothing), Mutex::default());
        Self { fqn, dtype, hp_dtype, scales, weight_casts: None, number, on_device, counts }
    }

    /// Which scales it has, for graphs.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn counts(&self) -> MutexGuard<'_, Option<CastCounts>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to count what is cast, or ends; gives what was counted.
    pub(crate) fn count_casts(&self, counts: bool) -> Option<CastCounts> {
        std::mem::replace(&mut *self.counts(), counts.then(CastCounts::default))
    }

    fn scales_on(&self, device: Device) -> Result<MutexGuard<'_, OnDevice>> {
        let mut held = self.on_device.lock().unwrap_or_else(PoisonError::into_inner);
        if held.device == Some(device) {
            return Ok(held);
        }
        check_device(device)?;
        let _pause = RecordingPause::begin();
        let _no_grad = tch::no_grad_guard();
        let LayerScales { inputs, output, weight, weight_in } = &self.scales;
        let casts = inputs.iter().map(|scales| Cast::new(scales, weight_in.as_deref(), device));
        *held = OnDevice {
            device: Some(device),
            inputs: casts.collect::<Result<_>>()?,
            output: output.map(|scale| Cast::new(&[scale], None, device)).transpose()?,
            weight: Tensor::f_from_slice(weight)?.f_to_device(device.tch())?,
        };
        Ok(held)
    }

    fn cast(&self, cast: &Cast, input: &Tensor, channel_dim: i64) -> Result<Fp8Tensor> {
        let scaled = match &cast.channels {
            None => input.shallow_clone(),
            Some(channels) => {
                let mut shape = vec![1; input.dim()];
                let at = channel_dim.rem_euclid(input.dim().max(1) as i64) as usize;
                shape[at] = -1;
                input.f_to_kind(Kind::Float)?.f_mul(&channels.f_view(shape.as_slice())?)?
            }
        };
        let nearest = Fp8Cast { dtype: self.dtype, is_stochastic: false };
        let codes = cast.scale.cast(&scaled, 0, false, nearest)?;
        if let Some(counts) = &mut *self.counts() {
            let whole = scaled.f_to_kind(Kind::Float)?.f_mul(&cast.scale.scale)?;
            let error = whole.f_sub(&fp8_to(&codes.codes, Kind::Float)?)?;
            let sum = |tensor: Tensor| -> Result<f64> { Ok(f64::try_from(tensor.f_sum(Kind::Float)?)?) };
            let scale = f64::from(f32::try_from(&cast.scale.scale_inv.f_reshape([1])?)?).powi(2);
            counts.numbers += whole.numel() as f64;
            counts.clipped += sum(whole.f_abs()?.f_gt(largest(self.dtype))?)?;
            counts.errors += scale * sum(error.f_square()?)?;
            counts.squares += scale * sum(whole.f_square()?)?;
        }
        Ok(codes)
    }

    /// Begins a call with an input on the device of the call.
    fn begin(&self, input: &Tensor) -> Result<Call<'_>> {
        let device = Device::of(input)?;
        let dtype = self.dtype_of_output(input, device)?;
        let scales = self.scales_on(device)?;
        Ok(Call { dtype, scales, _no_casts: disable_casts(device)?, _no_grad: tch::no_grad_guard() })
    }

    /// The dtype of what it gives.
    fn dtype_of_output(&self, input: &Tensor, device: Device) -> Result<Kind> {
        match self.hp_dtype {
            Some(dtype) => Ok(dtype),
            None if is_autocast_enabled(device)? => autocast_dtype(device),
            None => Ok(input.kind()),
        }
    }

    /// `input weightᵀ + bias` for the codes of a weight `[out, in]`.
    pub(crate) fn linear(&self, input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let call = self.begin(input)?;
        let (dtype, scales) = (call.dtype, &call.scales);
        let (mut shape, size) = (input.size(), weight.size());
        let matrix = input.f_reshape([-1, size[1]])?;
        let cast = self.cast(self.input(scales, 0)?, &matrix, -1)?;
        let weight = Fp8Tensor { codes: weight.f_transpose(0, 1)?, scale_inv: scales.weight.shallow_clone() };
        let output = fp8_mm(&cast, &weight, bias, dtype)?;
        if let Some(last) = shape.last_mut() {
            *last = size[0];
        }
        Ok(output.f_view(shape.as_slice())?)
    }

    fn input<'a>(&self, scales: &'a OnDevice, slot: usize) -> Result<&'a Cast> {
        let number = scales.inputs.len();
        scales.inputs.get(slot).ok_or_else(|| {
            let what = format!("{number} inputs have scales, and input {slot} has none");
            wrong(&self.fqn, what, "measure the layer as it is called now")
        })
    }

    /// The numbers of an input's codes in float32, and the scale's tensor.
    fn widened(&self, scales: &OnDevice, slot: usize, input: &Tensor, channel: i64) -> Result<[Tensor; 2]> {
        let Fp8Tensor { codes, scale_inv } = self.cast(self.input(scales, slot)?, input, channel)?;
        Ok([fp8_to(&codes, Kind::Float)?, scale_inv])
    }

    /// A convolution by `convolve`, of the numbers of codes; `channels` is the place of the output's channels.
    pub(crate) fn convolve(
        &self,
        input: &Tensor,
        (weight, bias): (&Tensor, Option<&Tensor>),
        spatial: usize,
        convolve: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let call = self.begin(input)?;
        let (dtype, scales) = (call.dtype, &call.scales);
        let channels = -(spatial as i64) - 1;
        let [input, scale] = self.widened(scales, 0, input, channels)?;
        let product = convolve(&input, &fp8_to(weight, Kind::Float)?)?;
        let mut shape = vec![1; spatial + 1];
        shape[0] = -1;
        let by_channel = |tensor: &Tensor| tensor.f_view(shape.as_slice());
        let mut output = product.f_mul(&by_channel(&scales.weight.f_mul(&scale)?)?)?;
        if let Some(bias) = bias {
            output = output.f_add(&by_channel(&bias.f_to_kind(Kind::Float)?)?)?;
        }
        Ok(output.f_to_kind(dtype)?)
    }

    /// `a b` of two inputs.
    pub(crate) fn matmul(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let call = self.begin(a)?;
        let (dtype, scales) = (call.dtype, &call.scales);
        let [a, of_a] = self.widened(scales, 0, a, -1)?;
        let [b, of_b] = self.widened(scales, 1, b, -1)?;
        Ok(a.f_matmul(&b)?.f_mul(&of_a.f_mul(&of_b)?)?.f_to_kind(dtype)?)
    }

    /// What softmax gives, in float8 for a moment.
    pub(crate) fn softmax(&self, input: &Tensor, dim: i64) -> Result<Tensor> {
        let call = self.begin(input)?;
        let (dtype, scales) = (call.dtype, &call.scales);
        let output = input.f_softmax(dim, Kind::Float)?;
        let Some(cast) = &scales.output else {
            return Err(wrong(&self.fqn, "the output has no scale".to_owned(), "measure again"));
        };
        let Fp8Tensor { codes, scale_inv } = self.cast(cast, &output, -1)?;
        Ok(fp8_to(&codes, Kind::Float)?.f_mul(&scale_inv)?.f_to_kind(dtype)?)
    }

    /// The codes of keys or values, as bytes.
    pub(crate) fn codes_of(&self, states: &Tensor) -> Result<Tensor> {
        let call = self.begin(states)?;
        let Fp8Tensor { codes, .. } = self.cast(self.input(&call.scales, 0)?, states, -1)?;
        Ok(codes.f_view_dtype(Kind::Uint8)?)
    }

    /// The keys or values of such codes.
    pub(crate) fn numbers_of(&self, codes: &Tensor, dtype: Kind) -> Result<Tensor> {
        let call = self.begin(codes)?;
        let wide = if dtype == Kind::BFloat16 { dtype } else { Kind::Float };
        // as bytes, which libtorch copies many at a time
        let mut numbers = fp8_to(&codes.f_contiguous()?.f_view_dtype(self.dtype)?, wide)?;
        let _ = numbers.f_mul_(&self.input(&call.scales, 0)?.scale.scale_inv)?;
        Ok(numbers.f_to_kind(dtype)?)
    }

    /// What codes on a device are: their dtype, and the number that they are multiplied by.
    pub(crate) fn format_of_codes(&self, codes: &Tensor) -> Result<(Kind, Tensor)> {
        let call = self.begin(codes)?;
        Ok((self.dtype, self.input(&call.scales, 0)?.scale.scale_inv.shallow_clone()))
    }

    /// Attention of queries, keys and values; `weights` makes weights of scores.
    pub(crate) fn attend(
        &self,
        [query, key, value]: [&Tensor; 3],
        weights: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let call = self.begin(query)?;
        let (dtype, scales) = (call.dtype, &call.scales);
        let [q, of_q] = self.widened(scales, 0, query, -1)?;
        let [k, of_k] = self.widened(scales, 1, key, -1)?;
        let [v, of_v] = self.widened(scales, 2, value, -1)?;
        let scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_mul(&of_q.f_mul(&of_k)?)?;
        let [p, of_p] = self.widened(scales, 3, &weights(&scores)?, -1)?;
        Ok(p.f_matmul(&v)?.f_mul(&of_p.f_mul(&of_v)?)?.f_to_kind(dtype)?)
    }
}

/// A layer that nothing is known of: it is an error to call it.
#[derive(Debug, Clone)]
pub(crate) struct Unmeasured {
    pub fqn: Arc<str>,
}

impl Unmeasured {
    pub(crate) fn error(&self) -> Error {
        let what = format!(
            "Layer '{}' was called but was not quantized because no measures were supplied.",
            self.fqn
        );
        wrong(
            &self.fqn,
            what,
            "measure with data that calls it, name it in blocklist, or set ignore_modules_wo_measures",
        )
    }
}
