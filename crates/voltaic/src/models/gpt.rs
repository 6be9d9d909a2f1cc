//! A GPT of nanoGPT's shape. Names of tensors: b = batch, t = time (position), c = channels (`n_embd`), v = vocabulary.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{TchError, Tensor};

use super::sizes::Sizes;
use crate::error::{ConfigError, ModuleError, Problem, Result};
use crate::generation::{CausalLm, KvCache};
use crate::nn::functional::{cross_entropy, gelu, scaled_dot_product_attention};
use crate::nn::parallel::{ColwiseParallel, ParallelPlan, RowwiseParallel};
use crate::nn::{
    Callable, Dropout, Embedding, Forward, KvCacheLayer, LayerNorm, Linear, Module, ModuleExt, init,
    within_call,
};

const MAX_LAYERS: i64 = 1 << 16;

/// A GPT in the shape of nanoGPT, for text by character.
///
/// Settings of [`Gpt`]; the defaults are those of [`GptConfig::tiny`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GptConfig {
    /// Number of different tokens; 256 is enough for any text read as bytes.
    pub vocab_size: i64,
    /// Context: the longest sequence of tokens that the model sees.
    pub block_size: i64,
    /// Number of blocks.
    pub n_layer: i64,
    /// Number of attention heads in each block; must divide `n_embd`.
    pub n_head: i64,
    /// Number of channels.
    pub n_embd: i64,
    /// Probability with which an embedding, an attention weight or a block's output is dropped.
    pub dropout: f64,
    /// Whether linear layers and norms have biases, as GPT-2's do.
    pub bias: bool,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl GptConfig {
    /// 4 blocks of 128 channels, context 64: trains on a CPU within minutes.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 256,
            block_size: 64,
            n_layer: 4,
            n_head: 4,
            n_embd: 128,
            dropout: 0.0,
            bias: false,
        }
    }

    /// Whether all settings can be used.
    ///
    /// # Errors
    /// All that cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { vocab_size, block_size, n_layer, n_head, n_embd, dropout, .. } = *self;
        let mut sizes = Sizes::default();
        sizes.size("vocab_size", vocab_size);
        sizes.size("block_size", block_size);
        sizes.size("n_embd", n_embd);
        let many = (1..=MAX_LAYERS).contains(&n_layer);
        sizes.require(many, "n_layer", n_layer.to_string(), "give a number of blocks from 1 to 65536");
        let divides = n_head >= 1 && n_embd % n_head == 0;
        let what = format!("{n_head} heads do not divide n_embd={n_embd}");
        sizes.require(divides, "n_head", what, "choose n_head among the divisors of n_embd");
        sizes.dropout("dropout", dropout);
        let (tokens, layers, width) = (vocab_size as f64 + block_size as f64, n_layer as f64, n_embd as f64);
        sizes.finish((tokens + 12.0 * layers * width) * width)
    }

    /// 6 blocks of 384 channels, context 256: nanoGPT's model for Shakespeare by character.
    pub fn mini() -> Self {
        Self { block_size: 256, n_layer: 6, n_head: 6, n_embd: 384, dropout: 0.2, ..Self::tiny() }
    }
}

/// A decoder-only transformer with GPT-2's layout
/// ([Radford et al., 2019](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)),
/// with the names and initial values of [nanoGPT](https://github.com/karpathy/nanoGPT). The last layer shares its
/// weight with the token embedding.
///
/// Input tokens `[batch, time]`, `i64` below `vocab_size`, at most `block_size` of them in time; output logits of the
/// next token at each position, `[batch, time, vocab_size]`.
///
/// ```
/// use voltaic::models::{Gpt, GptConfig};
/// use voltaic::nn::Forward;
/// # use voltaic::Tensor;
///
/// # fn main() -> anyhow::Result<()> {
/// let gpt = Gpt::new(GptConfig { n_layer: 2, ..GptConfig::tiny() })?;
/// let tokens = Tensor::from_slice2(&[[72_i64, 101, 108, 108, 111]]);
/// assert_eq!(gpt.forward(&tokens)?.size(), [1, 5, 256]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
#[module(parallel_plan = Self::by_vocabulary)]
pub struct Gpt {
    transformer: Transformer,
    lm_head: Linear,
    #[module(skip)]
    config: GptConfig,
}

#[derive(Module, Debug)]
struct Transformer {
    wte: Embedding,
    wpe: Embedding,
    drop: Dropout,
    h: Vec<Block>,
    ln_f: LayerNorm,
}

impl Gpt {
    /// Makes the model with nanoGPT's initial weights: normal of deviation 0.02, less for what is added to the
    /// residual stream, so that its variance does not grow with depth.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`] if a size is below 1, `n_head` does not divide `n_embd`, or `dropout` is not a probability.
    pub fn new(config: GptConfig) -> Result<Self> {
        let GptConfig { vocab_size, block_size, n_layer, n_head, n_embd, dropout, bias } = config.clone();
        let refuse = |what, remedy: &'static str| -> Result<Self> {
            Err(ModuleError::Sizes { layer: "Gpt", problem: Problem::new(what, remedy) }.into())
        };
        if n_layer < 1 {
            return refuse(format!("n_layer is {n_layer}"), "give at least 1");
        }
        if n_head < 1 || n_embd % n_head != 0 {
            let what = format!("n_head = {n_head} does not divide n_embd = {n_embd}");
            return refuse(what, "choose n_head among the divisors of n_embd");
        }
        let mut gpt = Self {
            transformer: Transformer {
                wte: Embedding::new(vocab_size, n_embd)?,
                wpe: Embedding::new(block_size, n_embd)?,
                drop: Dropout::new(dropout)?,
                h: (0..n_layer).map(|_| Block::new(&config)).collect::<Result<_>>()?,
                ln_f: LayerNorm::builder(n_embd).bias(bias).build()?,
            },
            lm_head: Linear::builder(n_embd, vocab_size).bias(false).build()?,
            config,
        };
        gpt.transformer.wte.weight = gpt.lm_head.weight.clone();

        for (fqn, parameter) in gpt.named_parameters() {
            if parameter.dim() == 2 {
                init::normal_(&parameter, 0.0, 0.02)?;
            } else if fqn.ends_with(".bias") {
                init::zeros_(&parameter)?;
            }
        }
        init::normal_(&gpt.lm_head.weight, 0.0, 0.02)?; // tied: drawn under each of its names
        let residual_std = 0.02 / (2.0 * n_layer as f64).sqrt();
        for (fqn, parameter) in gpt.named_parameters() {
            if fqn.ends_with("c_proj.weight") {
                init::normal_(&parameter, 0.0, residual_std)?;
            }
        }
        Ok(gpt)
    }

    /// The settings that made the model.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// The table of tokens, and the last layer, which has the same weight.
    fn by_vocabulary(&self) -> ParallelPlan {
        ParallelPlan::new()
            .layer("transformer.wte", RowwiseParallel::default())
            .layer("lm_head", ColwiseParallel::default().gather_output())
    }

    /// Mean cross-entropy of the next tokens: `tokens` and `targets` are `[batch, time]`, the targets being the tokens
    /// shifted by one. Returns shape `[]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or a token is none of the vocabulary.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> anyhow::Result<Tensor> {
        loss_of(&self.call(tokens)?, targets)
    }

    /// The embeddings of the positions of `tokens`, `[time, channels]`.
    fn positions(&self, tokens: &Tensor) -> Result<Tensor> {
        let shape = tokens.size();
        match shape[..] {
            [_, time] if time <= self.config.block_size => {
                Ok(self.transformer.wpe.weight.f_narrow(0, 0, time)?)
            }
            _ => {
                let expected =
                    format!("[batch, time] is needed, with time at most {}", self.config.block_size);
                Err(ModuleError::Shape { layer: "Gpt".to_owned(), shape, expected }.into())
            }
        }
    }
}

impl Forward for Gpt {
    fn forward(&self, tokens: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, tokens, |tokens| {
            let Transformer { wte, drop, h, ln_f, .. } = &self.transformer;
            let positions_tc = self.positions(tokens)?;
            let mut x_btc = drop.call(&wte.call(tokens)?.f_add(&positions_tc)?)?;
            for block in h {
                x_btc = block.call(&x_btc)?;
            }
            self.lm_head.call(&ln_f.call(&x_btc)?)
        })
    }
}

impl CausalLm for Gpt {
    fn vocab_size(&self) -> i64 {
        self.config.vocab_size
    }

    fn context_length(&self) -> i64 {
        self.config.block_size
    }

    fn next_logits(&self, tokens: &Tensor, cache: &KvCache) -> anyhow::Result<Tensor> {
        within_call(self, tokens, |tokens| {
            let Transformer { wte, wpe, drop, h, ln_f } = &self.transformer;
            let positions_btc = wpe.call(&cache.positions()?)?;
            let mut x_btc = drop.call(&wte.call(tokens)?.f_add(&positions_btc)?)?;
            for (layer, block) in h.iter().enumerate() {
                x_btc = within_call(block, &x_btc, |x_btc| block.pass(x_btc, Some((cache, layer))))?;
            }
            self.lm_head.call(&ln_f.call(&cache.last(&x_btc)?)?)
        })
    }
}

/// A cache, and the number of the layer that it serves.
type LayerCache<'a> = (&'a KvCache, usize);

#[derive(Module, Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: CausalSelfAttention,
    ln_2: LayerNorm,
    mlp: FeedForward,
}

impl Block {
    fn new(config: &GptConfig) -> Result<Self> {
        Ok(Self {
            ln_1: LayerNorm::builder(config.n_embd).bias(config.bias).build()?,
            attn: CausalSelfAttention::new(config)?,
            ln_2: LayerNorm::builder(config.n_embd).bias(config.bias).build()?,
            mlp: FeedForward::new(config)?,
        })
    }
}

impl Forward for Block {
    fn forward(&self, x_btc: &Tensor) -> anyhow::Result<Tensor> {
        self.pass(x_btc, None)
    }
}

impl Block {
    fn pass(&self, x_btc: &Tensor, cache: Option<LayerCache>) -> anyhow::Result<Tensor> {
        let normed_btc = self.ln_1.call(x_btc)?;
        let attended_btc = match cache {
            None => self.attn.call(&normed_btc)?,
            Some(_) => within_call(&self.attn, &normed_btc, |x_btc| self.attn.pass(x_btc, cache))?,
        };
        let x_btc = x_btc + attended_btc;
        let update_btc = self.mlp.call(&self.ln_2.call(&x_btc)?)?;
        Ok(x_btc + update_btc)
    }
}

#[derive(Module, Debug)]
#[module(parallel_plan = Self::by_heads)]
struct CausalSelfAttention {
    c_attn: Linear,
    c_proj: Linear,
    attn_dropout: Dropout,
    resid_dropout: Dropout,
    k_cache: KvCacheLayer,
    v_cache: KvCacheLayer,
    head_dim: i64,
}

impl CausalSelfAttention {
    fn new(config: &GptConfig) -> Result<Self> {
        let GptConfig { n_head, n_embd, dropout, bias, .. } = *config;
        Ok(Self {
            c_attn: Linear::builder(n_embd, 3 * n_embd).bias(bias).build()?,
            c_proj: Linear::builder(n_embd, n_embd).bias(bias).build()?,
            attn_dropout: Dropout::new(dropout)?,
            resid_dropout: Dropout::new(dropout)?,
            k_cache: KvCacheLayer::new(),
            v_cache: KvCacheLayer::new(),
            head_dim: n_embd / n_head,
        })
    }

    fn by_heads(&self) -> ParallelPlan {
        ParallelPlan::new()
            .layer("c_attn", ColwiseParallel::default().parts(3).unit(self.head_dim))
            .layer("c_proj", RowwiseParallel::default().unit(self.head_dim))
    }
}

impl Forward for CausalSelfAttention {
    fn forward(&self, x_btc: &Tensor) -> anyhow::Result<Tensor> {
        self.pass(x_btc, None)
    }
}

impl CausalSelfAttention {
    fn pass(&self, x_btc: &Tensor, cache: Option<LayerCache>) -> anyhow::Result<Tensor> {
        let qkv = self.c_attn.call(x_btc)?.f_chunk(3, -1)?;
        let by_head = |x: &Tensor| -> Result<Tensor, TchError> {
            x.f_unflatten(-1, [-1, self.head_dim])?.f_transpose(1, 2)
        };
        let (query, key, value) = (by_head(&qkv[0])?, by_head(&qkv[1])?, by_head(&qkv[2])?);
        let y = match cache {
            Some((cache, layer)) => {
                cache.attend_by(layer, [&self.k_cache, &self.v_cache], &query, &key, &value)?
            }
            None => {
                self.k_cache.measure(&key)?;
                self.v_cache.measure(&value)?;
                let dropout_p = self.attn_dropout.active_p();
                scaled_dot_product_attention(&query, &key, &value, None, dropout_p, true)?
            }
        };
        let y_btc = y.f_transpose(1, 2)?.f_flatten(2, 3)?;
        self.resid_dropout.call(&self.c_proj.call(&y_btc)?)
    }
}

#[derive(Module, Debug)]
#[module(parallel_plan = Self::by_features)]
struct FeedForward {
    c_fc: Linear,
    c_proj: Linear,
    dropout: Dropout,
}

impl FeedForward {
    fn new(config: &GptConfig) -> Result<Self> {
        let GptConfig { n_embd, dropout, bias, .. } = *config;
        Ok(Self {
            c_fc: Linear::builder(n_embd, 4 * n_embd).bias(bias).build()?,
            c_proj: Linear::builder(4 * n_embd, n_embd).bias(bias).build()?,
            dropout: Dropout::new(dropout)?,
        })
    }

    fn by_features(&self) -> ParallelPlan {
        ParallelPlan::new()
            .layer("c_fc", ColwiseParallel::default())
            .layer("c_proj", RowwiseParallel::default())
    }
}

impl Forward for FeedForward {
    fn forward(&self, x_btc: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = gelu(&self.c_fc.call(x_btc)?)?;
        self.dropout.call(&self.c_proj.call(&hidden)?)
    }
}

/// Mean cross-entropy of `logits_btv` against the next tokens.
pub(super) fn loss_of(logits_btv: &Tensor, targets: &Tensor) -> anyhow::Result<Tensor> {
    Ok(cross_entropy(&logits_btv.f_flatten(0, 1)?, &targets.f_flatten(0, 1)?)?)
}
