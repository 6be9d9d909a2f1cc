//! Attention with several heads.

use std::fmt;

use tch::{Kind, Tensor};

use crate::config::setters;
use crate::device::Device;
use crate::error::{ModuleError, Problem, Result};
use crate::ffi::tensor_id;
use crate::nn::calls::call::{of_call, within_call, within_call_of};
use crate::nn::check::{at_least, divides, empty, probability};
use crate::nn::functional::scaled_dot_product_attention;
use crate::nn::init;
use crate::nn::layers::linear::Linear;
use crate::nn::misfit::note_misfit;
use crate::nn::module::{Forward, Module};
use crate::nn::parallel::mode::ParallelMode;
use crate::nn::parallel::plan::{ColwiseParallel, ParallelPlan};
use crate::nn::parallel::regions::{copy_to_group, sum_over_group};
use crate::nn::parameter::Parameter;

/// Attention with several heads, as `torch.nn.MultiheadAttention`
/// ([Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)).
///
/// Query, key and value are `[sequence, batch, embed_dim]`, or `[batch, sequence, embed_dim]` with `batch_first`; the
/// output has the query's shape. Key and value have one shape. [`Forward`] is self-attention without a mask.
///
/// ```
/// use voltaic::nn::{AttentionMask, MultiheadAttention};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// let attention = MultiheadAttention::builder(64, 4).dropout(0.1).batch_first(true).build()?;
/// # let x = Tensor::zeros([2, 16, 64], (Kind::Float, tch::Device::Cpu));
/// let output = attention.attend(&x, &x, &x, &AttentionMask::causal())?;
/// let (output, weights) = attention.attend_with_weights(&x, &x, &x, &AttentionMask::default())?;
/// assert_eq!(weights.size(), [2, 16, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
#[module(parallel_plan = Self::by_heads)]
pub struct MultiheadAttention {
    /// The three projections below each other, `[3 * embed_dim, embed_dim]`.
    pub in_proj_weight: Parameter,
    /// Shape `[3 * embed_dim]`.
    pub in_proj_bias: Option<Parameter>,
    /// The projection of the heads' outputs.
    pub out_proj: Linear,
    embed_dim: i64,
    num_heads: i64,
    dropout: f64,
    batch_first: bool,
    #[module(training)]
    training: bool,
    /// Whether this rank has some of the heads.
    #[module(skip)]
    pub(in crate::nn) parallel: ParallelMode,
}

/// Which keys a query may not see. Masks given together all apply.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionMask<'a> {
    /// `[queries, keys]` or `[batch * heads, queries, keys]`: `true` where attention is *not* allowed (PyTorch's
    /// meaning in this layer), or a number that is added to the score.
    pub attn_mask: Option<&'a Tensor>,
    /// `[batch, keys]`: `true` for keys that are padding, or a number that is added to the score.
    pub key_padding_mask: Option<&'a Tensor>,
    /// No query sees a key at a later position.
    pub is_causal: bool,
}

impl<'a> AttentionMask<'a> {
    /// No query sees a key at a later position.
    pub fn causal() -> Self {
        Self { is_causal: true, ..Self::default() }
    }

    /// Keys that are padding are not seen; see [`AttentionMask::key_padding_mask`].
    pub fn key_padding(mask: &'a Tensor) -> Self {
        Self { key_padding_mask: Some(mask), ..Self::default() }
    }
}

/// Query, key and value by head: `[batch, heads, sequence, head_dim]`.
struct Heads {
    query: Tensor,
    key: Tensor,
    value: Tensor,
}

impl MultiheadAttention {
    /// A layer with biases, without dropout, that takes `[sequence, batch, embed_dim]`.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`] if `num_heads` does not divide `embed_dim`.
    pub fn new(embed_dim: i64, num_heads: i64) -> Result<Self> {
        Self::builder(embed_dim, num_heads).build()
    }

    /// A layer with options.
    pub fn builder(embed_dim: i64, num_heads: i64) -> MultiheadAttentionBuilder {
        MultiheadAttentionBuilder { embed_dim, num_heads, dropout: 0.0, bias: true, batch_first: false }
    }

    /// Size of the input's last dimension.
    pub fn embed_dim(&self) -> i64 {
        self.embed_dim
    }

    /// Features of each head.
    pub fn head_dim(&self) -> i64 {
        self.embed_dim / self.num_heads
    }

    /// Probability with which an attention weight is dropped in training mode.
    pub(in crate::nn) fn dropout_p(&self) -> f64 {
        self.dropout
    }

    /// Tensor parallelism divides its heads.
    fn by_heads(&self) -> ParallelPlan {
        ParallelPlan::new().layer("", ColwiseParallel::default())
    }

    /// Features of the heads that this rank has.
    fn own_dim(&self) -> i64 {
        self.parallel.get().map_or(self.embed_dim, |parallel| parallel.len())
    }

    /// Attends from `query` to `key`, and returns what `value` holds there. A fused kernel is used where libtorch has
    /// one.
    ///
    /// # Errors
    /// [`ModuleError::Shape`] if an input has not three dimensions, the last of them `embed_dim`.
    pub fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &AttentionMask<'_>,
    ) -> Result<Tensor> {
        let [output] =
            within_call_of(self, [query, key, value], |inputs| Ok([self.attended(inputs, mask)?]))?;
        Ok(output)
    }

    fn attended(&self, [query, key, value]: [&Tensor; 3], mask: &AttentionMask<'_>) -> Result<Tensor> {
        let heads = self.project(query, key, value)?;
        let only_causal = mask.is_causal && mask.attn_mask.is_none() && mask.key_padding_mask.is_none();
        let bias = if only_causal { None } else { self.score_bias(&heads, mask)? };
        let Heads { query, key, value } = &heads;
        let dropout_p = if self.training { self.dropout } else { 0.0 };
        self.merge(&scaled_dot_product_attention(query, key, value, bias.as_ref(), dropout_p, only_causal)?)
    }

    /// As [`MultiheadAttention::attend`], and the attention weights, averaged over the heads: `[batch, queries, keys]`.
    ///
    /// # Errors
    /// [`ModuleError::Shape`] if an input has not three dimensions, the last of them `embed_dim`.
    pub fn attend_with_weights(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &AttentionMask<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let [output, weights] = within_call_of(self, [query, key, value], |[query, key, value]| {
            let heads = self.project(query, key, value)?;
            let scale = (1.0 / self.head_dim() as f64).sqrt();
            let mut scores = heads.query.f_mul_scalar(scale)?.f_matmul(&heads.key.f_transpose(-2, -1)?)?;
            if let Some(bias) = self.score_bias(&heads, mask)? {
                scores = scores.f_add(&bias)?;
            }
            let weights = scores.f_softmax(-1, None)?.f_dropout(self.dropout, self.training)?;
            let output = self.merge(&weights.f_matmul(&heads.value)?)?;
            let Some(parallel) = self.parallel.get() else {
                return Ok([output, weights.f_mean_dim([1_i64].as_slice(), false, None)?]);
            };
            let sum = weights.f_sum_dim_intlist([1_i64].as_slice(), false, None)?;
            let mean = sum_over_group(&parallel.group, &sum)?.f_div_scalar(self.num_heads)?;
            Ok([output, mean])
        })?;
        Ok((output, weights))
    }

    fn project(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Heads> {
        for input in [query, key, value] {
            self.check(input)?;
        }
        Parameter::unshard_all([Some(&self.in_proj_weight), self.in_proj_bias.as_ref()])?;
        let [id, of_key, of_value] = [query, key, value].map(tensor_id);
        let (id, size) = (id?, self.own_dim());
        let input = |input: &Tensor| match self.parallel.get() {
            Some(parallel) => copy_to_group(&parallel.group, input),
            None => Ok(input.shallow_clone()),
        };
        if id == of_key? && id == of_value? {
            // one product instead of three
            let packed = input(query)?.f_linear(&self.in_proj_weight, self.in_proj_bias.as_deref())?;
            let [query, key, value] = [0, 1, 2]
                .map(|part| packed.f_narrow(-1, part * size, size).and_then(|part| self.split(&part)));
            return Ok(Heads { query: query?, key: key?, value: value? });
        }
        let part = |index: i64, given: &Tensor| -> Result<Tensor> {
            let input = input(given)?;
            let weight = self.in_proj_weight.f_narrow(0, index * size, size)?;
            let bias = match &self.in_proj_bias {
                Some(bias) => Some(bias.f_narrow(0, index * size, size)?),
                None => None,
            };
            Ok(self.split(&input.f_linear(&weight, bias)?)?)
        };
        Ok(Heads { query: part(0, query)?, key: part(1, key)?, value: part(2, value)? })
    }

    fn check(&self, input: &Tensor) -> Result<()> {
        match input.size().as_slice() {
            [_, _, embed_dim] if *embed_dim == self.embed_dim => Ok(()),
            shape => {
                let dims = if self.batch_first { "[batch, sequence" } else { "[sequence, batch" };
                let expected = format!("{dims}, {}] is needed", self.embed_dim);
                note_misfit(self);
                Err(ModuleError::Shape { layer: format!("{self:?}"), shape: shape.to_vec(), expected }.into())
            }
        }
    }

    /// `[batch, heads, sequence, head_dim]` from the layer's own layout.
    fn split(&self, projected: &Tensor) -> Result<Tensor, tch::TchError> {
        let by_head = projected.f_unflatten(-1, [-1, self.head_dim()])?;
        if self.batch_first { by_head.f_transpose(1, 2) } else { by_head.f_permute([1, 2, 0, 3]) }
    }

    fn merge(&self, by_head: &Tensor) -> Result<Tensor> {
        let order = if self.batch_first { [0, 2, 1, 3] } else { [2, 0, 1, 3] };
        let joined = by_head.f_permute(order)?.f_flatten(-2, -1)?;
        self.out_proj.forward(&joined).map_err(of_call) // a call, so that stage 3 unshards its weights for it alone
    }

    /// Refuses a mask that would mean something else: of as many elements in another order, or of integers, which would be added.
    fn check_mask(&self, what: &str, mask: &Tensor, shapes: &[&[i64]]) -> Result<()> {
        let (shape, kind) = (mask.size(), mask.f_kind()?);
        let refuse = |what: String, remedy: String| {
            let problem = Problem::new(what, remedy);
            Err(ModuleError::Input { layer: format!("{self:?}"), problem }.into())
        };
        if !shapes.contains(&&shape[..]) {
            let shapes: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
            return refuse(format!("{what} has shape {shape:?}"), format!("give {}", shapes.join(" or ")));
        }
        if kind != Kind::Bool && !mask.is_floating_point() {
            let remedy = "give bool, true where attention is not allowed, or numbers to add to the scores";
            return refuse(format!("{what} is {kind:?}"), remedy.to_owned());
        }
        Ok(())
    }

    /// What is added to the scores, broadcasting to `[batch, heads, queries, keys]`.
    fn score_bias(&self, heads: &Heads, mask: &AttentionMask<'_>) -> Result<Option<Tensor>> {
        let (dtype, device) = (heads.query.f_kind()?, Device::of(&heads.query)?.tch());
        let (batch, queries, keys) = (heads.query.size()[0], heads.query.size()[2], heads.key.size()[2]);
        let mut parts = Vec::new();
        if let Some(mask) = mask.attn_mask {
            self.check_mask(
                "attn_mask",
                mask,
                &[&[queries, keys], &[batch * self.num_heads, queries, keys]],
            )?;
            let by_head = mask.dim() == 3;
            let shape = if by_head { [batch, self.num_heads] } else { [1, 1] };
            let mask = additive(mask, dtype)?.f_reshape([shape[0], shape[1], queries, keys])?;
            parts.push(match self.parallel.get().filter(|_| by_head) {
                Some(own) => mask.f_narrow(1, own.start() / self.head_dim(), own.len() / self.head_dim())?,
                None => mask,
            });
        }
        if let Some(mask) = mask.key_padding_mask {
            self.check_mask("key_padding_mask", mask, &[&[batch, keys]])?;
            parts.push(additive(mask, dtype)?.f_reshape([batch, 1, 1, keys])?);
        }
        if mask.is_causal {
            let later = Tensor::f_ones([queries, keys], (Kind::Bool, device))?.f_triu(1)?;
            parts.push(additive(&later, dtype)?.f_reshape([1, 1, queries, keys])?);
        }
        let mut parts = parts.into_iter();
        let Some(mut bias) = parts.next() else { return Ok(None) };
        for part in parts {
            bias = bias.f_add(&part)?;
        }
        Ok(Some(bias))
    }
}

/// Minus infinity where a `bool` mask is true; other masks as they are.
fn additive(mask: &Tensor, dtype: Kind) -> Result<Tensor, tch::TchError> {
    if mask.f_kind()? != Kind::Bool {
        return mask.f_to_kind(dtype);
    }
    mask.f_zeros_like()?.f_to_kind(dtype)?.f_masked_fill(mask, f64::NEG_INFINITY)
}

impl Forward for MultiheadAttention {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| Ok(self.attended([input; 3], &AttentionMask::default())?))
    }
}

impl fmt::Debug for MultiheadAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MultiheadAttention({}, {}{})", self.embed_dim, self.num_heads, self.parallel)
    }
}

/// Options of a [`MultiheadAttention`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct MultiheadAttentionBuilder {
    embed_dim: i64,
    num_heads: i64,
    dropout: f64,
    bias: bool,
    batch_first: bool,
}

impl MultiheadAttentionBuilder {
    setters! {
        /// Probability with which an attention weight is dropped in training mode (default 0).
        dropout: f64;
        /// Whether the projections have biases (default `true`).
        bias: bool;
        /// Whether tensors are `[batch, sequence, embed_dim]` rather than `[sequence, batch, embed_dim]` (default
        /// `false`).
        batch_first: bool;
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`] if `num_heads` does not divide `embed_dim`, or `dropout` is not a probability.
    pub fn build(self) -> Result<MultiheadAttention> {
        const NAME: &str = "MultiheadAttention";
        let Self { embed_dim, num_heads, dropout, bias, batch_first } = self;
        at_least(NAME, 1, [("embed_dim", &[embed_dim][..]), ("num_heads", &[num_heads])])?;
        divides(NAME, ("num_heads", num_heads), ("embed_dim", embed_dim))?;
        probability(NAME, dropout)?;
        let in_proj_weight = Parameter::new(empty(&[3 * embed_dim, embed_dim])?);
        let in_proj_bias = if bias { Some(Parameter::new(empty(&[3 * embed_dim])?)) } else { None };
        // PyTorch draws the output projection first
        let out_proj = Linear::builder(embed_dim, embed_dim).bias(bias).build()?;
        init::xavier_uniform_(&in_proj_weight, 1.0)?;
        for bias in [&in_proj_bias, &out_proj.bias].into_iter().flatten() {
            init::zeros_(bias)?;
        }
        let training = true;
        Ok(MultiheadAttention {
            in_proj_weight,
            in_proj_bias,
            out_proj,
            embed_dim,
            num_heads,
            dropout,
            batch_first,
            training,
            parallel: ParallelMode::default(),
        })
    }
}
