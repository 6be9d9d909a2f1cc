//! Attention in float8, with its gradients.

use std::fmt;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::device::Device;
use crate::error::{ModuleError, Problem, Result};
use crate::ffi::{Fp8Tensor, autograd_function_saving, fp8_mm, grad_is_enabled};
use crate::nn::calls::call::within_call_of;
use crate::nn::check::probability;
use crate::nn::compute::{Compute, ComputeMode};
use crate::nn::fp8_linear::{Scaling, turned};
use crate::nn::functional::scaled_dot_product_attention;
use crate::nn::module::Module;
use crate::precision::fp8::{Fp8Meta, Recipe, fp8_recipe};
use crate::precision::{autocast_dtype, disable_casts, is_autocast_enabled};

/// Numbers of the tensors in the scales.
const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const WEIGHTS: usize = 3;
/// Those of gradients: of the output, and of the scores.
const OUTPUT: usize = 0;
const SCORES: usize = 1;

/// Attention `softmax(query keyᵀ scale) value` whose products compute in float8 within a region of
/// [`fp8_autocast`](crate::precision::fp8::fp8_autocast); elsewhere it is
/// [`scaled_dot_product_attention`].
///
/// Queries, keys, values and attention weights are cast forward, the gradients of the output and of the scores backward. It keeps the attention
/// weights for the backward pass.
///
/// ```
/// use voltaic::te::{FusedAttention, fp8_autocast};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// let attention = FusedAttention::new(0.0)?;
/// # let x = Tensor::ones([2, 4, 16, 32], (Kind::Float, tch::Device::Cpu));
/// let _fp8 = fp8_autocast(true, None)?;
/// assert_eq!(attention.attend(&x, &x, &x, None, true)?.size(), [2, 4, 16, 32]);
/// # Ok(())
/// # }
/// ```
///
/// Source: `habana_frameworks.torch.hpex.experimental.transformer_engine.FusedAttention`.
#[derive(Module)]
pub struct FusedAttention {
    scale: Option<f64>,
    attention_dropout: f64,
    #[module(training)]
    training: bool,
    #[module(skip)]
    pub(in crate::nn) meta: Arc<Fp8Meta>,
    /// In which numbers it computes in inference.
    pub(in crate::nn) compute: ComputeMode,
}

impl FusedAttention {
    /// Attention that drops weights with this probability in training mode, and divides scores by the square root of the size of a head.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`] if it is no probability.
    pub fn new(attention_dropout: f64) -> Result<Self> {
        probability("FusedAttention", attention_dropout)?;
        Ok(Self {
            scale: None,
            attention_dropout,
            training: true,
            meta: Fp8Meta::new(4, 2),
            compute: ComputeMode::default(),
        })
    }

    /// With this factor of the scores.
    #[must_use = "it is the layer with the factor"]
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// `query` `[batch, heads, queries, dim]`, `key` and `value` `[batch, heads, keys, dim]`; the output is as `query`, in the dtype of
    /// activations. `attention_mask` is added to the scores, or, if `bool`, says where attention is allowed; it broadcasts to
    /// `[batch, heads, queries, keys]`. With `is_causal` no query sees a later key.
    ///
    /// # Errors
    /// If the shapes do not fit together, or both a mask and `is_causal` are given. [`ModuleError::Input`] for a recipe with scales by row.
    pub fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        attention_mask: Option<&Tensor>,
        is_causal: bool,
    ) -> Result<Tensor> {
        let [output] = within_call_of(self, [query, key, value], |[query, key, value]| {
            if self.compute.is_of_inference() {
                return Ok([self.infer([query, key, value], attention_mask, is_causal)?]);
            }
            let dropout_p = if self.training { self.attention_dropout } else { 0.0 };
            let Some(recipe) = fp8_recipe() else {
                let scale = self
                    .scale
                    .map_or(1.0, |scale| scale * (query.size().last().copied().unwrap_or(1) as f64).sqrt());
                let query = if scale == 1.0 { query.shallow_clone() } else { query.f_mul_scalar(scale)? };
                return Ok([scaled_dot_product_attention(
                    &query,
                    key,
                    value,
                    attention_mask,
                    dropout_p,
                    is_causal,
                )?]);
            };
            Ok([self.product(&recipe, [query, key, value], attention_mask, dropout_p, is_causal)?])
        })?;
        Ok(output)
    }

    /// Measured, or in float8 with scales that stay.
    fn infer(&self, inputs: [&Tensor; 3], mask: Option<&Tensor>, is_causal: bool) -> Result<Tensor> {
        if mask.is_some() && is_causal {
            let problem = Problem::new("both a mask and is_causal", "give one of the two");
            return Err(ModuleError::Input { layer: "FusedAttention".to_owned(), problem }.into());
        }
        let [query, key, value] = inputs;
        let scale = self.scale.unwrap_or(1.0 / (query.size().last().copied().unwrap_or(1) as f64).sqrt());
        let weights = |scores: &Tensor| -> Result<Tensor> {
            let scores = masked(&scores.f_mul_scalar(scale)?, mask, is_causal)?;
            Ok(scores.f_softmax(-1, Kind::Float)?)
        };
        match self.compute.get() {
            Compute::Quantized(layer) => layer.attend(inputs, weights),
            Compute::Unmeasured(layer) => Err(layer.error()),
            Compute::Measured(observer) => {
                observer.inputs(&inputs)?;
                let wide = |tensor: &Tensor| tensor.f_to_kind(Kind::Float);
                let weights = weights(&wide(query)?.f_matmul(&wide(key)?.f_transpose(-2, -1)?)?)?;
                observer.inner(WEIGHTS, &weights)?;
                let output = weights.f_matmul(&wide(value)?)?.f_to_kind(query.kind())?;
                observer.output(&output)?;
                Ok(output)
            }
            Compute::Plain | Compute::Fp8(_) => {
                scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal)
            }
        }
    }

    fn product(
        &self,
        recipe: &Recipe,
        [query, key, value]: [&Tensor; 3],
        mask: Option<&Tensor>,
        dropout_p: f64,
        is_causal: bool,
    ) -> Result<Tensor> {
        let refuse = |what: &str, remedy: &'static str| -> Result<Tensor> {
            let problem = Problem::new(what.to_owned(), remedy);
            Err(ModuleError::Input { layer: "FusedAttention".to_owned(), problem }.into())
        };
        if mask.is_some() && is_causal {
            return refuse("both a mask and is_causal", "give one of the two");
        }
        if matches!(recipe, Recipe::RowwiseScaling(_)) {
            return refuse("RowwiseScaling, which is for layers with weights", "use another recipe");
        }
        let fits = query.dim() == 4 && key.size() == value.size() && key.dim() == 4;
        let ([batch, heads, queries, dim], keys) = match (query.size()[..].try_into(), key.size()) {
            (Ok(sizes), keys) if fits => (sizes, keys),
            (sizes, keys) => {
                let _: std::result::Result<[i64; 4], _> = sizes;
                let expected = format!(
                    "[batch, heads, queries, dim] is needed, and key and value of one shape, not {keys:?}"
                );
                let layer = "FusedAttention".to_owned();
                return Err(ModuleError::Shape { layer, shape: query.size(), expected }.into());
            }
        };
        let device = Device::of(query)?;
        let dtype = if is_autocast_enabled(device)? { autocast_dtype(device)? } else { query.kind() };
        let with_grad = grad_is_enabled();
        let needed = [query, key, value].map(|tensor| with_grad && tensor.requires_grad());
        let _no_casts = disable_casts(device)?;
        let scaling = Scaling::of(recipe, &self.meta, device, with_grad)?;
        let scale = self.scale.unwrap_or(1.0 / (dim as f64).sqrt());
        let (output, saved, drops) = {
            let _no_grad = tch::no_grad_guard();
            let batches =
                |tensor: &Tensor, rows: i64| tensor.f_detach()?.f_reshape([batch * heads, rows, dim]);
            let (q, q_back) = scaling.cast(&batches(query, queries)?, QUERY)?;
            let (k, k_back) = scaling.cast(&batches(key, keys[2])?, KEY)?;
            let (v, v_back) = scaling.cast(&batches(value, keys[2])?, VALUE)?;
            let scores = fp8_mm(&q, &turned(&k)?, None, Kind::Float)?.f_mul_scalar(scale)?;
            let by_head = scores.f_view([batch, heads, queries, keys[2]])?;
            let scores = masked(&by_head, mask, is_causal)?;
            let weights = scores.f_softmax(-1, Kind::Float)?.f_view([batch * heads, queries, keys[2]])?;
            let drops = match dropout_p > 0.0 {
                true => Some(weights.f_ones_like()?.f_dropout(dropout_p, true)?),
                false => None,
            };
            let dropped = match &drops {
                Some(drops) => weights.f_mul(drops)?,
                None => weights.shallow_clone(),
            };
            let (p, p_back) = scaling.cast(&dropped, WEIGHTS)?;
            let output = fp8_mm(&p, &v, None, dtype)?.f_internal_unsafe_view([batch, heads, queries, dim])?;
            let mut saved = vec![weights];
            for tensor in [q_back, k_back, v_back, p_back] {
                saved.extend([tensor.codes, tensor.scale_inv]);
            }
            let has_drops = drops.is_some();
            saved.extend(drops);
            (output, saved, has_drops)
        };
        if needed.contains(&true) {
            let kinds = [query, key, value].map(Tensor::kind);
            let shapes = [query, key, value].map(Tensor::size);
            let backward = Backward { scaling, device, dtype, scale, needed, kinds, shapes, drops };
            let inputs = [query, key, value];
            autograd_function_saving(inputs, std::slice::from_ref(&output), &saved, move |given| {
                backward.run(given)
            })?;
        }
        Ok(output)
    }
}

/// Scores `[*, queries, keys]` that are minus infinity where attention is not allowed.
fn masked(scores: &Tensor, mask: Option<&Tensor>, is_causal: bool) -> Result<Tensor> {
    Ok(match mask {
        Some(mask) if mask.kind() == Kind::Bool => {
            scores.f_masked_fill(&mask.f_logical_not()?, f64::NEG_INFINITY)?
        }
        Some(mask) => scores.f_add(mask)?,
        None if is_causal => {
            let shape = scores.size();
            let sizes = &shape[shape.len().saturating_sub(2)..];
            let later = Tensor::f_ones(sizes, (Kind::Bool, scores.device()))?.f_triu(1)?;
            scores.f_masked_fill(&later, f64::NEG_INFINITY)?
        }
        None => scores.shallow_clone(),
    })
}

impl fmt::Debug for FusedAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FusedAttention(attention_dropout={})", self.attention_dropout)
    }
}

/// The backward pass of one call. Arrays are of query, key and value.
struct Backward {
    scaling: Scaling,
    device: Device,
    dtype: Kind,
    scale: f64,
    needed: [bool; 3],
    kinds: [Kind; 3],
    shapes: [Vec<i64>; 3],
    /// Weights were dropped.
    drops: bool,
}

impl Backward {
    /// Of the gradient of the output and of what was saved.
    fn run(&self, given: &[Tensor]) -> anyhow::Result<Vec<Option<Tensor>>> {
        let [grad, weights, q, q_inv, k, k_inv, v, v_inv, p, p_inv, drops @ ..] = given else {
            anyhow::bail!("{} tensors were saved", given.len());
        };
        if !grad.defined() {
            return Ok(vec![None, None, None]);
        }
        let _no_casts = disable_casts(self.device)?;
        let of = |codes: &Tensor, inv: &Tensor| Fp8Tensor {
            codes: codes.shallow_clone(),
            scale_inv: inv.shallow_clone(),
        };
        let [_, _, rows, dim] = self.shapes[QUERY][..] else { anyhow::bail!("a query of another shape") };
        let grad = self.scaling.cast_grad_of(&grad.f_reshape([-1, rows, dim])?, OUTPUT)?;
        let of_value = fp8_mm(&turned(&of(p, p_inv))?, &grad, None, self.dtype)?;
        let mut of_weights = fp8_mm(&grad, &turned(&of(v, v_inv))?, None, Kind::Float)?;
        if let (true, [drops, ..]) = (self.drops, drops) {
            of_weights = of_weights.f_mul(drops)?;
        }
        // softmax: its own gradient less the mean by its weights
        let mean = of_weights.f_mul(weights)?.f_sum_dim_intlist([-1_i64].as_slice(), true, Kind::Float)?;
        let of_scores = of_weights.f_sub(&mean)?.f_mul(weights)?.f_mul_scalar(self.scale)?;
        let of_scores = self.scaling.cast_grad_of(&of_scores, SCORES)?;
        let of_query = fp8_mm(&of_scores, &of(k, k_inv), None, self.dtype)?;
        let of_key = fp8_mm(&turned(&of_scores)?, &of(q, q_inv), None, self.dtype)?;
        let mut grads = Vec::new();
        for (index, grad) in [of_query, of_key, of_value].into_iter().enumerate() {
            let grad = grad.f_reshape(&self.shapes[index])?.f_to_kind(self.kinds[index])?;
            grads.push(self.needed[index].then_some(grad));
        }
        Ok(grads)
    }
}
