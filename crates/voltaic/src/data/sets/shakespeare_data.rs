//! `ShakespeareData`: a text, character by character, as a data module.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::folders;
use crate::Result;
use crate::data::dataloader::DataLoader;
use crate::data::datamodule::{DataModule, Stage};
use crate::data::settings::Settings;
use crate::data::split_size::SplitSize;
use crate::data::text::TextDataset;
use crate::data::vocabulary::{CharVocabulary, Tokenizer};
use crate::error::{ConfigError, DataError, Error, Problem};

/// Shakespeare's plays by character, or the one that ships.
///
/// Settings of [`ShakespeareData`].
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ShakespeareDataConfig {
    /// Blocks of text per batch.
    #[default(64)]
    pub batch_size: usize,
    /// Characters of a block; by default what the default model for text takes.
    #[default(64)]
    pub context_length: usize,
    /// Blocks per epoch of training; without it, as many as fit into the text side by side.
    pub samples_per_epoch: Option<usize>,
    /// Part of the text kept for validation, after the training part: characters (20000) or a fraction (0.1).
    #[default(SplitSize::Fraction(0.1))]
    pub val_size: SplitSize,
    /// Part of the text kept for testing, at its end: characters or a fraction.
    #[default(SplitSize::Fraction(0.05))]
    pub test_size: SplitSize,
    /// Threads that load ahead; 0 loads on the training thread.
    pub num_workers: usize,
    /// A text of your own, in UTF-8. Without it, Shakespeare's works are searched in `VOLTAIC_DATA_DIR`, in `data/` of the
    /// current folder and of the source; one play ships with the source.
    pub text_file: Option<PathBuf>,
}

/// Blocks per epoch; the list of them has to fit into memory.
const MAX_SAMPLES: usize = 100_000_000;

impl ShakespeareDataConfig {
    /// Whether all settings can be used, as far as that shows without the text.
    ///
    /// # Errors
    /// All that cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut settings = Settings::default();
        settings.loader(self.batch_size, self.num_workers);
        settings.split("val_size", self.val_size);
        settings.split("test_size", self.test_size);
        let length = self.context_length;
        settings.require(length > 0, "context_length", format!("{length} characters"), "1 or more");
        if let Some(samples) = self.samples_per_epoch {
            let rule = format!("a number from 1 to {MAX_SAMPLES}");
            settings.require((1..=MAX_SAMPLES).contains(&samples), "samples_per_epoch", samples, &rule);
        }
        settings.finish()
    }
}

/// A text and the characters it is made of.
#[derive(Debug)]
struct Text {
    file: PathBuf,
    content: String,
    vocabulary: Arc<CharVocabulary>,
}

type TextLoader = DataLoader<(Tensor, Tensor)>;

/// A text to train character-level language models on: its head for training (blocks from random places), then a part
/// for validation and one for testing (blocks side by side).
///
/// Batches are (x, y): int64 `[B, context_length]`, `y` one character ahead of `x`. The vocabulary is that of the whole
/// text.
#[derive(Debug, Default)]
pub struct ShakespeareData {
    config: ShakespeareDataConfig,
    text: Option<Text>,
    train: Option<TextLoader>,
    val: Option<TextLoader>,
    test: Option<TextLoader>,
}

impl ShakespeareData {
    /// A data module with these settings; the text is read when it is first needed.
    pub fn new(config: ShakespeareDataConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// The characters of the text: models take their number of tokens from it.
    ///
    /// # Errors
    /// [`DataError::NotFound`] with the places searched, [`DataError::Missing`], [`Error::Io`], or [`DataError::Text`]
    /// if the file is empty or not UTF-8.
    pub fn vocabulary(&mut self) -> Result<Arc<CharVocabulary>> {
        Ok(self.text()?.vocabulary.clone())
    }

    /// The file that the text comes from.
    ///
    /// # Errors
    /// As for [`ShakespeareData::vocabulary`].
    pub fn text_file(&mut self) -> Result<&Path> {
        Ok(&self.text()?.file)
    }

    fn text(&mut self) -> Result<&Text> {
        let text = match self.text.take() {
            Some(text) => text,
            None => self.read()?,
        };
        Ok(self.text.insert(text))
    }

    fn read(&self) -> Result<Text> {
        let file = match &self.config.text_file {
            Some(file) if !file.exists() => {
                let remedy = "correct text_file, or leave it out to use Shakespeare's works".into();
                return Err(DataError::Missing { path: file.clone(), remedy }.into());
            }
            Some(file) => file.clone(),
            None => {
                let folders = folders::data_folders()?;
                let works = folders.iter().flat_map(|folder| {
                    [folder.join("shakespeare.txt"), folder.join("cache/shakespeare/shakespeare.txt")]
                });
                let play = folders.iter().map(|folder| folder.join("text/hamlet.txt"));
                let remedy = "run `scripts/data.sh shakespeare` in the source of voltaic, or set text_file";
                folders::first("Shakespeare's text", works.chain(play).collect(), Path::is_file, remedy)?
            }
        };
        let bytes =
            crate::config::read_file(&file, u64::MAX).map_err(|error| Error::io("read", &file, error))?;
        let content = String::from_utf8(bytes).map_err(|error| DataError::Corrupt {
            path: file.clone(),
            offset: error.utf8_error().valid_up_to() as u64,
            problem: Problem::new("this is not UTF-8", "convert the file to UTF-8"),
        })?;
        let vocabulary = Arc::new(CharVocabulary::of(&content)?);
        Ok(Text { file, content, vocabulary })
    }

    fn open(&mut self) -> Result<()> {
        let config = self.config.clone();
        let text = self.text()?;
        let starts: Vec<usize> = text.content.char_indices().map(|(start, _)| start).collect();
        let val_len = config.val_size.of(starts.len(), "ShakespeareData.val_size")?;
        let test_len = config.test_size.of(starts.len() - val_len, "ShakespeareData.test_size")?;
        let (test_at, val_at) = (starts.len() - test_len, starts.len() - test_len - val_len);
        let byte = |place: usize| starts.get(place).copied().unwrap_or(text.content.len());
        let (head, rest) = text.content.split_at(byte(val_at));
        let (middle, tail) = rest.split_at(byte(test_at) - byte(val_at));

        let mut train = TextDataset::random(head, text.vocabulary.clone(), config.context_length)?;
        if let Some(samples) = config.samples_per_epoch {
            train = train.num_samples(samples)?;
        }
        let held_out = |part: &str| -> Result<Option<TextLoader>> {
            if part.is_empty() {
                return Ok(None);
            }
            let blocks = TextDataset::consecutive(part, text.vocabulary.clone(), config.context_length)?;
            config.loader(blocks).map(Some)
        };
        let (val, test) = (held_out(middle)?, held_out(tail)?);
        self.train = Some(config.loader(train)?);
        self.val = val;
        self.test = test;
        Ok(())
    }
}

impl ShakespeareDataConfig {
    fn loader(&self, dataset: TextDataset) -> Result<TextLoader> {
        DataLoader::new(dataset).batch_size(self.batch_size).num_workers(self.num_workers).build()
    }
}

impl DataModule for ShakespeareData {
    type Batch = (Tensor, Tensor);

    fn setup(&mut self, _stage: Stage) -> anyhow::Result<()> {
        if self.train.is_none() {
            self.open()?;
            let text = self.text()?;
            let (chars, different) = (text.content.chars().count(), text.vocabulary.len());
            tracing::info!("data: {} ({chars} characters, {different} different ones)", text.file.display());
        }
        Ok(())
    }

    fn train_dataloader(&mut self) -> anyhow::Result<Option<TextLoader>> {
        Ok(self.train.clone())
    }

    fn val_dataloader(&mut self) -> anyhow::Result<Vec<TextLoader>> {
        Ok(self.val.iter().cloned().collect())
    }

    fn test_dataloader(&mut self) -> anyhow::Result<Vec<TextLoader>> {
        Ok(self.test.iter().cloned().collect())
    }

    /// That of the test part.
    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<TextLoader>> {
        self.test_dataloader()
    }

    fn tokenizer(&mut self) -> anyhow::Result<Option<Arc<dyn Tokenizer>>> {
        Ok(Some(self.vocabulary()?))
    }
}
