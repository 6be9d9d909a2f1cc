//! `MnistData`: handwritten digits as a data module.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::folders;
use super::mnist::{MNIST_MEAN, MNIST_STD, Mnist, MnistFiles, MnistSplit};
use crate::Result;
use crate::data::dataloader::DataLoader;
use crate::data::datamodule::{DataModule, Stage};
use crate::data::dataset::{Dataset, random_split};
use crate::data::settings::Settings;
use crate::data::split_size::SplitSize;
use crate::data::transforms::RandomCrop;
use crate::error::ConfigError;

/// Which MNIST to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MnistSet {
    /// The full set if it is there, otherwise the subset that ships with the source; of the first folder that has one of
    /// them.
    #[default]
    Auto,
    /// The full set: 60,000 and 10,000 images. `scripts/data.sh mnist` brings it.
    Full,
    /// The subset that ships with the source: 12,000 and 2,000 images.
    Subset,
}

/// Handwritten digits: MNIST, or the part of it that ships.
///
/// Settings of [`MnistData`].
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MnistDataConfig {
    /// Images per batch.
    #[default(64)]
    pub batch_size: usize,
    /// Threads that load ahead; 0 loads on the training thread.
    pub num_workers: usize,
    /// Training images kept for validation: a number (5000) or a fraction (0.1); 0 for none.
    #[default(SplitSize::Fraction(0.1))]
    pub val_size: SplitSize,
    /// Seed that decides which training images are kept for validation.
    #[default(42)]
    pub split_seed: u64,
    /// Folder with MNIST's four files, plain or .gz. Without it, `VOLTAIC_DATA_DIR`, `data/` of the current folder and of
    /// the source are searched.
    pub data_dir: Option<PathBuf>,
    /// Which MNIST to use: `auto`, `full` or `subset`.
    pub set: MnistSet,
    /// Height and width of the images in pixels; above 28 they are padded with black.
    #[default(28)]
    pub image_size: usize,
    /// Channels of the images; above 1 the grey channel is repeated.
    #[default(1)]
    pub channels: usize,
    /// Training images are padded by so many pixels and cropped back at a random place; 0 for none.
    pub random_crop_padding: usize,
    /// Mean that is subtracted, on a scale from 0 to 1.
    #[default(MNIST_MEAN)]
    pub mean: f64,
    /// Standard deviation that is divided by, on a scale from 0 to 1.
    #[default(MNIST_STD)]
    pub std: f64,
    /// Whether an incomplete last batch of training is left out.
    pub drop_last: bool,
}

/// Values of one image; more are a mistake.
const MAX_VALUES: usize = 1 << 22;
/// Far more than the scale of 0 to 1 asks for; float32 has room for it.
const MAX_SCALE: f64 = 1e6;

impl MnistDataConfig {
    /// Whether all settings can be used, as far as that shows without the images.
    ///
    /// # Errors
    /// All that cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut settings = Settings::default();
        settings.loader(self.batch_size, self.num_workers);
        settings.split("val_size", self.val_size);
        let size = self.image_size;
        let largest = MAX_VALUES.isqrt();
        let rule = format!("a number of pixels from 28 to {largest}");
        settings.require((28..=largest).contains(&size), "image_size", size, &rule);
        let room = MAX_VALUES / size.clamp(1, largest).pow(2);
        let rule = format!("a number from 1 to {room}, as an image has {MAX_VALUES} values at most");
        settings.require((1..=room).contains(&self.channels), "channels", self.channels, &rule);
        let padding = self.random_crop_padding;
        let rule = "a number of pixels up to image_size, beyond which the image is out of sight";
        settings.require(padding <= size, "random_crop_padding", padding, rule);
        let rule = format!("a number from -{MAX_SCALE} to {MAX_SCALE}");
        settings.require(self.mean.abs() <= MAX_SCALE, "mean", self.mean, &rule);
        let rule = format!("a number from {:e} to {MAX_SCALE}", 1.0 / MAX_SCALE);
        settings.require((1.0 / MAX_SCALE..=MAX_SCALE).contains(&self.std), "std", self.std, &rule);
        settings.finish()
    }
}

type MnistLoader = DataLoader<(Tensor, Tensor)>;

/// Handwritten digits: a shuffled training part, a validation part split off it, and the test set.
///
/// Batches are (images, labels): float32 `[B, channels, image_size, image_size]` and int64 `[B]`. The test images are
/// also those to predict on.
#[derive(Debug, Default)]
pub struct MnistData {
    config: MnistDataConfig,
    files: Option<MnistFiles>,
    train: Option<MnistLoader>,
    val: Option<MnistLoader>,
    test: Option<MnistLoader>,
}

impl MnistData {
    /// A data module with these settings; files are opened by [`DataModule::setup`].
    pub fn new(config: MnistDataConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Sets [`MnistDataConfig::batch_size`].
    #[must_use]
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.config.batch_size = batch_size;
        self
    }

    /// Where the images come from and how many there are, which distinguishes the full set from the subset.
    ///
    /// # Errors
    /// [`DataError::NotFound`](crate::error::DataError::NotFound) with the places searched,
    /// [`DataError::Missing`](crate::error::DataError::Missing) or
    /// [`DataError::Corrupt`](crate::error::DataError::Corrupt) if files are incomplete or damaged, [`ConfigError`] if
    /// they are not the set asked for.
    pub fn files(&mut self) -> Result<&MnistFiles> {
        let files = match self.files.take() {
            Some(files) => files,
            None => self.find()?,
        };
        Ok(self.files.insert(files))
    }

    fn find(&self) -> Result<MnistFiles> {
        let set = self.config.set;
        let folder = match &self.config.data_dir {
            Some(folder) => folder.clone(),
            None => {
                let folders = folders::data_folders()?;
                let parts: &[&str] = match set {
                    MnistSet::Auto => &["mnist", "cache/mnist", "digits"],
                    MnistSet::Full => &["mnist", "cache/mnist"],
                    MnistSet::Subset => &["digits"],
                };
                let within =
                    |folder: &PathBuf| parts.iter().map(|part| folder.join(part)).collect::<Vec<_>>();
                let candidates = folders.iter().flat_map(within).collect();
                let remedy = "run `scripts/data.sh mnist` in the source of voltaic, or set data_dir to the folder with \
                              MNIST's four files";
                folders::first("MNIST", candidates, MnistFiles::are_in, remedy)?
            }
        };
        let files = MnistFiles::of(folder)?;
        let fits = match set {
            MnistSet::Auto => true,
            MnistSet::Full => files.is_full(),
            MnistSet::Subset => !files.is_full(),
        };
        if !fits {
            let asked = if set == MnistSet::Full { "full" } else { "subset" };
            let remedy = "set it to auto, or data_dir to another folder";
            return Err(ConfigError::new(
                "MnistData.set",
                format!("{asked} asked for, found {files}"),
                remedy,
            )
            .into());
        }
        Ok(files)
    }

    fn open(&mut self, split: MnistSplit) -> Result<Mnist> {
        let folder = self.files()?.folder.clone();
        let MnistDataConfig { mean, std, image_size, channels, .. } = self.config;
        Mnist::open(folder, split)?.normalize(mean, std)?.image_size(image_size)?.channels(channels)
    }

    fn loader<D: Dataset<Batch = (Tensor, Tensor)>>(
        &self,
        dataset: D,
        training: bool,
    ) -> Result<MnistLoader> {
        DataLoader::new(dataset)
            .batch_size(self.config.batch_size)
            .num_workers(self.config.num_workers)
            .shuffle(training)
            .drop_last(training && self.config.drop_last)
            .build()
    }

    fn open_train(&mut self) -> Result<()> {
        let plain = self.open(MnistSplit::Train)?;
        let val_len = self.config.val_size.of(plain.len(), "MnistData.val_size")?;
        let mut augmented = plain.clone();
        if self.config.random_crop_padding > 0 {
            augmented = augmented.transform(RandomCrop::new(self.config.random_crop_padding));
        }
        let lengths = [plain.len() - val_len, val_len];
        let train = random_split(augmented, &lengths, self.config.split_seed)?.swap_remove(0);
        let val = random_split(plain, &lengths, self.config.split_seed)?.swap_remove(1);
        self.train = Some(self.loader(train, true)?);
        self.val = if val_len == 0 { None } else { Some(self.loader(val, false)?) };
        Ok(())
    }
}

impl DataModule for MnistData {
    type Batch = (Tensor, Tensor);

    fn setup(&mut self, stage: Stage) -> anyhow::Result<()> {
        if self.files.is_none() {
            tracing::info!("data: {}", self.files()?);
        }
        match stage {
            Stage::Fit | Stage::Validate if self.train.is_none() => self.open_train()?,
            Stage::Test | Stage::Predict if self.test.is_none() => {
                let test = self.open(MnistSplit::Test)?;
                self.test = Some(self.loader(test, false)?);
            }
            _ => {}
        }
        Ok(())
    }

    fn train_dataloader(&mut self) -> anyhow::Result<Option<MnistLoader>> {
        Ok(self.train.clone())
    }

    fn val_dataloader(&mut self) -> anyhow::Result<Vec<MnistLoader>> {
        Ok(self.val.iter().cloned().collect())
    }

    fn test_dataloader(&mut self) -> anyhow::Result<Vec<MnistLoader>> {
        Ok(self.test.iter().cloned().collect())
    }

    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<MnistLoader>> {
        Ok(self.test.iter().cloned().collect())
    }
}
