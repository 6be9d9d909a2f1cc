//! The loop that continues prompts.

use std::time::{Duration, Instant};

use tch::{Kind, Tensor};

use super::cache::KvCache;
use super::config::GenerationConfig;
use super::sampler::Sampler;
use crate::config::setters;
use crate::device::Device;
use crate::distributed::{ProcessGroup, ReduceOp};
use crate::error::{ModuleError, Problem, Result};
use crate::graph::{HpuGraph, label_shown};
use crate::nn::{Module, ModuleExt, training_modes};

/// A model of language that says what comes next.
///
/// [`Gpt`](crate::models::Gpt) is one. A model of your own keeps the keys and values of its attention layers in the cache:
///
/// ```
/// use voltaic::generation::{CausalLm, KvCache};
/// use voltaic::nn::{Callable, Embedding, Linear, Module};
/// # use voltaic::Tensor;
///
/// /// One head of attention over all tokens so far.
/// #[derive(Module)]
/// struct OneHead {
///     tokens: Embedding,
///     places: Embedding,
///     qkv: Linear,
///     head: Linear,
/// }
///
/// impl CausalLm for OneHead {
///     fn vocab_size(&self) -> i64 {
///         65
///     }
///
///     fn context_length(&self) -> i64 {
///         128
///     }
///
///     fn next_logits(&self, tokens: &Tensor, cache: &KvCache) -> anyhow::Result<Tensor> {
///         let x = self.tokens.call(tokens)? + self.places.call(&cache.positions()?)?;
///         let qkv = self.qkv.call(&x)?.unsqueeze(1).chunk(3, -1); // [batch, 1, time, dim] each
///         let y = cache.attend(0, &qkv[0], &qkv[1], &qkv[2])?;
///         self.head.call(&cache.last(&y.squeeze_dim(1))?)
///     }
/// }
/// ```
pub trait CausalLm: Module {
    /// Number of different tokens.
    fn vocab_size(&self) -> i64;

    /// The longest sequence that the model sees. Beyond it, it sees the last so many tokens.
    fn context_length(&self) -> i64;

    /// Logits `[batch, vocab_size]` of the token after the last of each sequence. `tokens` are those that follow what the cache has,
    /// int64 `[batch, time]`.
    ///
    /// # Errors
    /// If the forward pass fails.
    fn next_logits(&self, tokens: &Tensor, cache: &KvCache) -> anyhow::Result<Tensor>;
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// There are `max_new_tokens`.
    Length,
    /// One of the stop sequences is its end.
    Stop,
}

/// What a prompt was continued with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens.
    pub tokens: Vec<i64>,
    /// Why there are no more.
    pub finish_reason: FinishReason,
}

/// What was generated, and how long it took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generations {
    /// One for each prompt, in their order.
    pub sequences: Vec<Generated>,
    /// Time until the first token of each sequence was there.
    pub prefill: Duration,
    /// Time of all that follow.
    pub decode: Duration,
    /// Bytes that the cache of keys and values had.
    pub cache_bytes: usize,
}

impl Generations {
    /// New tokens a second after the first of each sequence; 0 if there are none.
    pub fn tokens_per_second(&self) -> f64 {
        let tokens: usize =
            self.sequences.iter().map(|sequence| sequence.tokens.len().saturating_sub(1)).sum();
        if tokens == 0 { 0.0 } else { tokens as f64 / self.decode.as_secs_f64().max(1e-9) }
    }
}

/// A sequence in progress.
struct Sequence {
    tokens: Vec<i64>,
    prompt: usize,
    sampler: Sampler,
    finish_reason: Option<FinishReason>,
}

impl Sequence {
    fn generated(&self) -> &[i64] {
        &self.tokens[self.prompt..]
    }
}

type OnToken<'a> = Box<dyn FnMut(usize, i64) -> anyhow::Result<()> + 'a>;

/// Continues prompts with a model.
///
/// The tokens for a prompt do not depend on the other prompts beside it, nor on the device or the use of graphs, as far as rounding
/// does not change which token is drawn.
pub struct Generator<'a, M: ?Sized> {
    model: &'a M,
    config: GenerationConfig,
    on_token: Option<OnToken<'a>>,
    ranks: Option<&'a ProcessGroup>,
}

impl<'a, M: CausalLm + ?Sized> Generator<'a, M> {
    /// A generator with these settings. The model must be in evaluation mode ([`ModuleExt::eval`]).
    ///
    /// # Errors
    /// As [`GenerationConfig::check`].
    pub fn new(model: &'a M, config: GenerationConfig) -> Result<Self> {
        config.check()?;
        Ok(Self { model, config, on_token: None, ranks: None })
    }

    setters! {
        /// Calls `on_token` with the index of the sequence and each new token, as soon as it is there. An error ends generation.
        #[must_use]
        on_token: impl FnMut(usize, i64) -> anyhow::Result<()> + 'a = Some(Box::new(on_token));
        /// Ends when all sequences of all these ranks have ended: needed where a forward pass is collective, as under ZeRO stage 3.
        /// Source: `synced_gpus` of `transformers`.
        #[must_use]
        ranks: &'a ProcessGroup = Some(ranks);
    }

    /// Continues each of the prompts, which may have different lengths.
    ///
    /// # Errors
    /// [`ModuleError::Input`] if there is no prompt, one is empty or has tokens that the model does not know, or the model is in training
    /// mode; those of the model and of `on_token`.
    ///
    /// # Collective
    /// With [`Generator::ranks`].
    pub fn generate(&mut self, prompts: &[Vec<i64>]) -> anyhow::Result<Generations> {
        self.check(prompts)?;
        let _no_grad = tch::no_grad_guard();
        let start = |(index, prompt): (usize, &Vec<i64>)| Sequence {
            tokens: prompt.clone(),
            prompt: prompt.len(),
            sampler: Sampler::new(&self.config, index, prompt),
            finish_reason: None,
        };
        let mut sequences: Vec<Sequence> = prompts.iter().enumerate().map(start).collect();
        let device = self.device()?;
        let context = self.model.context_length();
        let began = Instant::now();
        let (mut prefill, mut cache_bytes) = (None, 0);
        loop {
            // beyond the context, each token takes this path: the model sees other places of the same tokens
            let (tokens, padding) = last_tokens(&sequences, context);
            let time = tokens.len() as i64 / sequences.len() as i64;
            let done = sequences.iter().map(|sequence| sequence.generated().len()).max().unwrap_or(0);
            let left = self.config.max_new_tokens.saturating_sub(done) as i64;
            let cache = KvCache::new(padding, context.min(time + left - 1).max(time));
            let tokens = Tensor::f_from_slice(&tokens)?.f_view([-1, time])?.f_to_device(device.into())?;
            let logits = self.pass(&tokens, &cache)?;
            let has_ended = self.choose(&logits, &mut sequences)?;
            prefill.get_or_insert_with(|| began.elapsed());
            let has_ended = has_ended || self.decode(&cache, &mut sequences, device)?;
            cache_bytes = cache_bytes.max(cache.num_bytes());
            if has_ended {
                break;
            }
        }
        let prefill = prefill.unwrap_or_default();
        let finished = |sequence: Sequence| Generated {
            tokens: sequence.tokens[sequence.prompt..].to_vec(),
            finish_reason: sequence.finish_reason.unwrap_or(FinishReason::Length),
        };
        let decode = began.elapsed().saturating_sub(prefill);
        let sequences = sequences.into_iter().map(finished).collect();
        Ok(Generations { sequences, prefill, decode, cache_bytes })
    }

    /// One token for each sequence and pass, until all have ended or the cache is full; returns whether all have ended.
    fn decode(
        &mut self,
        cache: &KvCache,
        sequences: &mut [Sequence],
        device: Device,
    ) -> anyhow::Result<bool> {
        let graph = self.config.use_graph.then(|| HpuGraph::on(device).compiled());
        let mut replayed: Option<(Tensor, Tensor)> = None;
        if graph.is_some() {
            cache.make_static();
        }
        while cache.len() < cache.capacity() {
            let last: Vec<i64> =
                sequences.iter().filter_map(|sequence| sequence.tokens.last().copied()).collect();
            let tokens = Tensor::f_from_slice(&last)?.f_unsqueeze(1)?;
            let logits = match (&graph, &mut replayed) {
                (Some(graph), Some((input, logits))) if graph.is_captured() => {
                    cache.begin(1, device.into())?;
                    input.f_copy_(&tokens)?;
                    graph.replay()?;
                    cache.end();
                    logits.shallow_clone()
                }
                (Some(graph), replayed) => {
                    cache.begin(1, device.into())?;
                    let input = tokens.f_to_device(device.into())?;
                    let logits = graph.capture(|| self.model.next_logits(&input, cache))?;
                    label_shown(graph.stats().count(), || "a token".to_owned());
                    cache.end();
                    *replayed = Some((input, logits.shallow_clone()));
                    logits
                }
                (None, _) => self.pass(&tokens.f_to_device(device.into())?, cache)?,
            };
            if self.choose(&logits, sequences)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn pass(&self, tokens: &Tensor, cache: &KvCache) -> anyhow::Result<Tensor> {
        cache.begin(tokens.size()[1], tokens.device())?;
        let logits = self.model.next_logits(tokens, cache)?;
        cache.end();
        Ok(logits)
    }

    /// Draws the next token of each sequence that has not ended; returns whether all have, on all ranks. Ranks vote once for each pass,
    /// whatever the lengths of their prompts.
    fn choose(&mut self, logits: &Tensor, sequences: &mut [Sequence]) -> anyhow::Result<bool> {
        let (batch, vocab_size) = (sequences.len() as i64, self.model.vocab_size());
        if logits.size() != [batch, vocab_size] {
            let expected = format!("next_logits gives [{batch}, {vocab_size}]");
            let shape = logits.size();
            return Err(
                ModuleError::Shape { layer: self.model.type_name().to_owned(), shape, expected }.into()
            );
        }
        let logits = logits.f_to_kind(Kind::Float)?.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
        let logits = Vec::<f32>::try_from(&logits.f_flatten(0, -1)?)?;
        let rows = logits.chunks_exact(vocab_size as usize);
        for (index, (sequence, row)) in sequences.iter_mut().zip(rows).enumerate() {
            if sequence.finish_reason.is_some() {
                continue; // what its last token would be continued with is not looked at
            }
            let token = sequence.sampler.next(row, &self.config)?;
            sequence.tokens.push(token);
            let generated = sequence.generated();
            sequence.finish_reason = match () {
                () if self.config.stop.iter().any(|stop| generated.ends_with(stop)) => {
                    Some(FinishReason::Stop)
                }
                () if generated.len() >= self.config.max_new_tokens => Some(FinishReason::Length),
                () => None,
            };
            if let Some(on_token) = &mut self.on_token {
                on_token(index, token)?;
            }
        }
        Ok(self.all_ended(sequences)?)
    }

    /// Whether there is nothing left to do, on any rank.
    fn all_ended(&self, sequences: &[Sequence]) -> Result<bool> {
        let ended = sequences.iter().all(|sequence| sequence.finish_reason.is_some());
        let Some(ranks) = self.ranks else { return Ok(ended) };
        let vote = Tensor::f_from_slice(&[i64::from(ended)])?;
        ranks.all_reduce(&vote, ReduceOp::Min)?;
        Ok(vote.f_int64_value(&[0])? == 1)
    }

    fn check(&self, prompts: &[Vec<i64>]) -> Result<()> {
        let refuse = |what: String, remedy: &'static str| {
            let layer = "generate".to_owned();
            Err(ModuleError::Input { layer, problem: Problem::new(what, remedy) }.into())
        };
        if prompts.is_empty() {
            return refuse("there is no prompt".to_owned(), "give one or more");
        }
        let vocab_size = self.model.vocab_size();
        for (index, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() {
                return refuse(format!("prompt {index} has no tokens"), "give each prompt one token or more");
            }
            if let Some(token) = prompt.iter().find(|token| !(0..vocab_size).contains(*token)) {
                let what = format!("prompt {index} has token {token}, the model has {vocab_size}");
                return refuse(what, "encode prompts with the tokenizer that the model was trained with");
            }
        }
        if training_modes(self.model.as_module()).contains(&true) {
            return refuse("the model is in training mode".to_owned(), "call its eval() first");
        }
        Ok(())
    }

    fn device(&self) -> Result<Device> {
        let parameters = self.model.as_module().parameters();
        parameters.first().map_or(Ok(Device::Cpu), |parameter| Device::of(parameter))
    }
}

/// The last `context` tokens of each sequence, one after the other, padded in front to one length; and the padding of each.
fn last_tokens(sequences: &[Sequence], context: i64) -> (Vec<i64>, Vec<i64>) {
    let longest = sequences.iter().map(|sequence| sequence.tokens.len()).max().unwrap_or(0);
    let time = longest.min(context as usize);
    let mut tokens = Vec::with_capacity(time * sequences.len());
    let mut padding = Vec::with_capacity(sequences.len());
    for Sequence { tokens: all, .. } in sequences {
        let last = &all[all.len().saturating_sub(time)..];
        tokens.extend(std::iter::repeat_n(0, time - last.len()));
        tokens.extend(last);
        padding.push((time - last.len()) as i64);
    }
    (tokens, padding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::shown;
    use crate::models::{Gpt, GptConfig};

    #[test]
    fn the_step_of_a_token_is_compiled() {
        assert!(crate::ffi::install_kernels().unwrap());
        let mut gpt = Gpt::new(GptConfig { n_layer: 2, ..GptConfig::tiny() }).unwrap();
        gpt.eval();
        let config = GenerationConfig { max_new_tokens: 4, use_graph: true, ..GenerationConfig::default() };
        let generate = || Generator::new(&gpt, config).unwrap().generate(&[vec![1, 2], vec![3]]).unwrap();
        let (_, graphs) = shown(generate);
        let [step] = &graphs[..] else { panic!("{} graphs", graphs.len()) };
        // of each layer: two norms with the sums before them, four products, attention, GELU; and the first sum, two embeddings, the head
        let calls = step.compiled().num_calls;
        assert!(calls <= 2 * 8 + 6, "{calls} calls:\n{}", step.text(true));
    }
}
