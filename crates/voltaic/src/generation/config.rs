//! How the next token is chosen, and when generation ends.

use voltaic_macros::Defaults;

use crate::error::{ConfigError, ConfigProblem, Problem, Result};

/// How [`Generator`](super::Generator) chooses tokens, and when it ends.
///
/// The distribution is changed in this order: tokens that are not allowed, repetition penalty, temperature, top-k, top-p.
/// Source: `transformers.GenerationConfig`.
#[derive(Defaults, Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// The largest number of tokens that a prompt is continued with (default 100).
    #[default(100)]
    pub max_new_tokens: usize,
    /// Logits are divided by it: below 1 likely tokens become more likely. 0 always takes the most likely one (default 1).
    #[default(1.0)]
    pub temperature: f64,
    /// Only this many of the most likely tokens can be drawn; those equally likely as the last of them, too (default: all).
    pub top_k: Option<usize>,
    /// Only the most likely tokens can be drawn whose probabilities together first reach this, `(0, 1]` (default 1: all;
    /// [Holtzman et al., 2019](https://arxiv.org/abs/1904.09751)).
    #[default(1.0)]
    pub top_p: f64,
    /// Above 1, tokens of the prompt and of what was generated become less likely: positive logits are divided by it, negative ones
    /// multiplied (default 1; [Keskar et al., 2019](https://arxiv.org/abs/1909.05858)).
    #[default(1.0)]
    pub repetition_penalty: f64,
    /// Generation of a sequence ends after any of these; they are part of what is generated (default: none).
    pub stop: Vec<Vec<i64>>,
    /// Seed of the random numbers. Each sequence has numbers of its own, which do not depend on the others (default 0).
    pub seed: u64,
    /// Tokens from this one on are never generated, for a model whose vocabulary is larger than the tokenizer's (default: none).
    pub vocab_size: Option<i64>,
    /// Captures the step that generates a token as a graph and replays it (default false): on the CPU and emulated HPUs compiled as by
    /// [`compile`](crate::graph::compile()), on CUDA as it is. Where libtorch attends, it then always goes over the whole cache.
    pub use_graph: bool,
}

impl GenerationConfig {
    /// Whether all settings can be used.
    ///
    /// # Errors
    /// All that cannot, by their keys.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        let mut require = |is_right: bool, key: &str, value: String, remedy: &'static str| {
            if !is_right {
                let problem = Problem::new(value, remedy);
                problems.push(ConfigProblem { key: key.to_owned(), origin: String::new(), problem });
            }
        };
        let Self { temperature, top_k, top_p, repetition_penalty, vocab_size, .. } = self;
        require(self.max_new_tokens > 0, "max_new_tokens", "0".to_owned(), "give 1 or more");
        let is_temperature = temperature.is_finite() && *temperature >= 0.0;
        require(
            is_temperature,
            "temperature",
            temperature.to_string(),
            "give 0 for the most likely token, or more",
        );
        require(*top_k != Some(0), "top_k", "0".to_owned(), "give 1 or more, or leave it out for all tokens");
        require(
            *top_p > 0.0 && *top_p <= 1.0,
            "top_p",
            top_p.to_string(),
            "give a probability above 0, at most 1",
        );
        let is_penalty = repetition_penalty.is_finite() && *repetition_penalty > 0.0;
        require(
            is_penalty,
            "repetition_penalty",
            repetition_penalty.to_string(),
            "give 1 for none, more to avoid repetitions",
        );
        let is_stop = self.stop.iter().all(|stop| !stop.is_empty());
        require(is_stop, "stop", "an empty sequence".to_owned(), "give sequences of one token or more");
        if let Some(vocab_size) = vocab_size {
            require(
                *vocab_size > 0,
                "vocab_size",
                vocab_size.to_string(),
                "give the number of the tokenizer's tokens",
            );
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }
}
