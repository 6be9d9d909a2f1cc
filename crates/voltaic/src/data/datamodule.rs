//! `DataModule`: where the loaders of a run come from.

use std::fmt;
use std::sync::Arc;

use super::batch::Batch;
use super::dataloader::DataLoader;
use super::vocabulary::Tokenizer;
use crate::device::Device;

/// What a run is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Training, with validation in between.
    Fit,
    /// Validation alone.
    Validate,
    /// Testing.
    Test,
    /// Prediction.
    Predict,
}

impl Stage {
    /// Lightning's name of the stage: `fit`, `validate`, `test` or `predict`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fit => "fit",
            Self::Validate => "validate",
            Self::Test => "test",
            Self::Predict => "predict",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Data of a run: how to get it, and a loader for each stage.
///
/// The trainer calls, per run, [`prepare_data`](Self::prepare_data) on one process of each node, then
/// [`setup`](Self::setup) on all, then the loaders of the stage, then [`teardown`](Self::teardown). A method left out
/// does nothing or gives no loader. Loaders are made for the whole dataset; dividing them among ranks is the trainer's part. An error of
/// a method ends the run.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say for which stage its data is",
    note = "give loaders by their stage: `&mut Loaders::new().train(loader)`, and `.val(..)`, `.test(..)`, `.predict(..)`",
    note = "or implement `DataModule`"
)]
pub trait DataModule {
    /// What the loaders yield.
    type Batch: Batch;

    /// Name of the type, with its path.
    fn type_name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Fetches or converts files. Called on one process per node, so it must not set state of `self`.
    fn prepare_data(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    /// What the loggers are given beside the module's own; an object, or null for nothing. A name that both have must have
    /// the same value.
    fn hyper_parameters(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// Opens and splits the data for `stage`, on all processes.
    fn setup(&mut self, stage: Stage) -> anyhow::Result<()> {
        let _ = stage;
        Ok(())
    }

    /// Loader for training.
    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Self::Batch>>> {
        Ok(None)
    }

    /// Loaders for validation.
    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Self::Batch>>> {
        Ok(Vec::new())
    }

    /// Loaders for testing.
    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Self::Batch>>> {
        Ok(Vec::new())
    }

    /// Loaders for prediction.
    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Self::Batch>>> {
        Ok(Vec::new())
    }

    /// Text as the tokens of the batches, and back, for data that is text: what `voltaic generate` encodes prompts with. Called
    /// without [`setup`](Self::setup).
    fn tokenizer(&mut self) -> anyhow::Result<Option<Arc<dyn Tokenizer>>> {
        Ok(None)
    }

    /// Changes a batch before it goes to the device, before the module's hook of this name.
    fn on_before_batch_transfer(
        &mut self,
        batch: Self::Batch,
        dataloader_idx: usize,
    ) -> anyhow::Result<Self::Batch> {
        let _ = dataloader_idx;
        Ok(batch)
    }

    /// Moves a batch to the device; one that this leaves where it is, as the default does, the module's hook moves.
    fn transfer_batch_to_device(
        &mut self,
        batch: Self::Batch,
        device: Device,
        dataloader_idx: usize,
    ) -> anyhow::Result<Self::Batch> {
        let _ = (device, dataloader_idx);
        Ok(batch)
    }

    /// Changes a batch that is on the device, before the module's hook of this name.
    fn on_after_batch_transfer(
        &mut self,
        batch: Self::Batch,
        dataloader_idx: usize,
    ) -> anyhow::Result<Self::Batch> {
        let _ = dataloader_idx;
        Ok(batch)
    }

    /// What has to be saved in checkpoints; `None` if nothing.
    fn state_dict(&self) -> Option<serde_json::Value> {
        None
    }

    /// Restores what [`state_dict`](Self::state_dict) returned, before the loaders are requested.
    ///
    /// # Errors
    /// If the state is not this data module's.
    fn load_state_dict(&mut self, state: &serde_json::Value) -> anyhow::Result<()> {
        let _ = state;
        Ok(())
    }

    /// Called when the run fails or is interrupted, after the callbacks were.
    fn on_exception(&mut self, error: &crate::Error) {
        let _ = error;
    }

    /// Lets go of what [`setup`](Self::setup) opened.
    fn teardown(&mut self, stage: Stage) -> anyhow::Result<()> {
        let _ = stage;
        Ok(())
    }
}

/// A [`DataModule`] made of ready loaders.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use voltaic::data::{DataLoader, Loaders, TensorDataset};
/// let x = Tensor::randn([10, 3], (Kind::Float, Device::Cpu));
/// let train = DataLoader::new(TensorDataset::new(x)?).batch_size(5).shuffle(true).build()?;
/// let data = Loaders::new().train(train);
/// # Ok::<(), voltaic::Error>(())
/// ```
#[derive(Debug)]
pub struct Loaders<B: Batch> {
    train: Option<DataLoader<B>>,
    val: Vec<DataLoader<B>>,
    test: Vec<DataLoader<B>>,
    predict: Vec<DataLoader<B>>,
}

impl<B: Batch> Default for Loaders<B> {
    fn default() -> Self {
        Self { train: None, val: Vec::new(), test: Vec::new(), predict: Vec::new() }
    }
}

impl<B: Batch> Loaders<B> {
    /// No loader yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the loader for training.
    pub fn train(mut self, loader: DataLoader<B>) -> Self {
        self.train = Some(loader);
        self
    }

    /// Adds a loader for validation.
    pub fn val(mut self, loader: DataLoader<B>) -> Self {
        self.val.push(loader);
        self
    }

    /// Adds a loader for testing.
    pub fn test(mut self, loader: DataLoader<B>) -> Self {
        self.test.push(loader);
        self
    }

    /// Adds a loader for prediction.
    pub fn predict(mut self, loader: DataLoader<B>) -> Self {
        self.predict.push(loader);
        self
    }
}

impl<B: Batch> DataModule for Loaders<B> {
    type Batch = B;

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<B>>> {
        Ok(self.train.clone())
    }

    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>> {
        Ok(self.val.clone())
    }

    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>> {
        Ok(self.test.clone())
    }

    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>> {
        Ok(self.predict.clone())
    }
}
