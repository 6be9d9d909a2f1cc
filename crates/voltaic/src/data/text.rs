//! Blocks of a text for language models that predict the next character.

use std::fmt;
use std::sync::Arc;

use rand::RngExt;
use rand::rngs::StdRng;
use tch::Tensor;

use super::dataset::Dataset;
use super::vocabulary::CharVocabulary;
use crate::Result;
use crate::error::{ConfigError, DataError, Problem};

/// Where the blocks of a [`TextDataset`] begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocks {
    /// Anywhere, again in each epoch.
    Random,
    /// One after the other, without overlap.
    Consecutive,
}

/// A text as blocks of `context_length` characters, each with the characters that follow.
///
/// A batch is (x, y): int64 `[B, context_length]` both, where `y[b][t]` is the character after `x[b][t]`. Cloning is
/// cheap; clones share the text.
#[derive(Clone)]
pub struct TextDataset {
    tokens: Arc<[u16]>,
    vocabulary: Arc<CharVocabulary>,
    context_length: usize,
    num_samples: usize,
    blocks: Blocks,
}

impl TextDataset {
    /// Blocks that begin at random places, drawn again for each batch from the loader's seed, epoch and rank. There are
    /// as many per epoch as fit into the text side by side, unless [`TextDataset::num_samples`] says otherwise.
    /// For training.
    ///
    /// # Errors
    /// [`DataError::Text`] if the text holds characters that the vocabulary lacks, or not more than `context_length`
    /// characters; [`ConfigError`] if `context_length` is 0.
    pub fn random(text: &str, vocabulary: Arc<CharVocabulary>, context_length: usize) -> Result<Self> {
        Self::new(text, vocabulary, context_length, Blocks::Random)
    }

    /// Blocks side by side from the beginning of the text; characters at its end that fill no block are left out.
    /// For validation.
    ///
    /// # Errors
    /// As for [`TextDataset::random`].
    pub fn consecutive(text: &str, vocabulary: Arc<CharVocabulary>, context_length: usize) -> Result<Self> {
        Self::new(text, vocabulary, context_length, Blocks::Consecutive)
    }

    fn new(
        text: &str,
        vocabulary: Arc<CharVocabulary>,
        context_length: usize,
        blocks: Blocks,
    ) -> Result<Self> {
        if context_length == 0 {
            let (what, remedy) = ("0 characters", "set it to 1 or more");
            return Err(ConfigError::new("TextDataset.context_length", what, remedy).into());
        }
        let tokens: Arc<[u16]> = vocabulary.encode_u16(text)?.into();
        if tokens.len() <= context_length {
            return Err(DataError::Text {
                problem: Problem::new(
                    format!("a text of {} characters, context_length is {context_length}", tokens.len()),
                    "give a text with more characters than context_length, or a smaller context_length"
                        .to_owned(),
                ),
            }
            .into());
        }
        let num_samples = (tokens.len() - 1) / context_length;
        Ok(Self { tokens, vocabulary, context_length, num_samples, blocks })
    }

    /// Sets the number of blocks per epoch.
    ///
    /// # Errors
    /// [`ConfigError`] if it is 0, or the blocks are consecutive and the text has not so many.
    pub fn num_samples(mut self, num_samples: usize) -> Result<Self> {
        let available = (self.tokens.len() - 1) / self.context_length;
        if num_samples == 0 || (self.blocks == Blocks::Consecutive && num_samples > available) {
            let what = format!("{num_samples} blocks, the text has {available} side by side");
            let remedy = "choose 1 or more, and of consecutive blocks no more than there are";
            return Err(ConfigError::new("TextDataset.num_samples", what, remedy).into());
        }
        self.num_samples = num_samples;
        Ok(self)
    }

    /// Characters as tokens and back.
    pub fn vocabulary(&self) -> &CharVocabulary {
        &self.vocabulary
    }

    /// Characters of a block.
    pub fn context_length(&self) -> usize {
        self.context_length
    }

    /// Characters of the whole text.
    pub fn num_chars(&self) -> usize {
        self.tokens.len()
    }
}

impl Dataset for TextDataset {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.num_samples
    }

    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<(Tensor, Tensor)> {
        let last_start = self.tokens.len() - 1 - self.context_length;
        let capacity = indices.len() * self.context_length;
        let (mut x, mut y) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        for &index in indices {
            let start = match self.blocks {
                Blocks::Random => rng.random_range(0..=last_start),
                Blocks::Consecutive => index * self.context_length,
            };
            let block = &self.tokens[start..=start + self.context_length];
            x.extend(block[..self.context_length].iter().map(|&token| i64::from(token)));
            y.extend(block[1..].iter().map(|&token| i64::from(token)));
        }
        let shape = [indices.len() as i64, self.context_length as i64];
        Ok((Tensor::f_from_slice(&x)?.f_view(shape)?, Tensor::f_from_slice(&y)?.f_view(shape)?))
    }
}

impl fmt::Debug for TextDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextDataset")
            .field("num_chars", &self.tokens.len())
            .field("vocabulary", &self.vocabulary.len())
            .field("context_length", &self.context_length)
            .field("num_samples", &self.num_samples)
            .field("blocks", &self.blocks)
            .finish()
    }
}
