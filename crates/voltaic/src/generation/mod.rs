//! Text from a language model, one token at a time.
//!
//! A model says what comes next ([`CausalLm`]); [`Generator`] lets it continue prompts, with a cache of keys and values
//! ([`KvCache`]), and draws from its distribution as [`GenerationConfig`] says.
//!
//! ```
//! use voltaic::data::Tokenizer;
//! use voltaic::generation::{GenerationConfig, Generator};
//! use voltaic::models::{Gpt, GptConfig};
//! use voltaic::nn::ModuleExt;
//! # use voltaic::data::CharVocabulary;
//!
//! # fn main() -> anyhow::Result<()> {
//! # let vocabulary = CharVocabulary::of("to be, or not")?;
//! let mut gpt = Gpt::new(GptConfig { vocab_size: vocabulary.vocab_size(), ..GptConfig::tiny() })?;
//! gpt.eval();
//! let config = GenerationConfig { max_new_tokens: 16, temperature: 0.8, top_k: Some(5), ..GenerationConfig::default() };
//! let generated = Generator::new(&gpt, config)?.generate(&[vocabulary.encode("to be")?])?;
//! println!("to be{}", vocabulary.decode(&generated.sequences[0].tokens)?);
//! # Ok(())
//! # }
//! ```
//!
//! `voltaic generate` is the same on the command line. Source: `transformers.GenerationMixin.generate`, with its names.

mod cache;
mod config;
mod generator;
mod sampler;

pub use cache::KvCache;
pub use config::GenerationConfig;
pub use generator::{CausalLm, FinishReason, Generated, Generations, Generator};
