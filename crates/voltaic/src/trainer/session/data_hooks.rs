//! The data module as a session sees it: without its type.

use serde_json::Value;

use crate::data::{Batch, DataLoader, DataModule, Stage};
use crate::device::Device;
use crate::error::Error;

/// A borrowed data module.
pub(crate) struct Data<'a, D: ?Sized>(pub &'a mut D);

/// What a session asks of a [`DataModule`]. A trait of its own because `DataModule` is `'static`, which no borrow is.
pub(crate) trait DataHooks<B: Batch> {
    fn type_name(&self) -> &'static str;
    fn hyper_parameters(&self) -> Value;
    fn prepare_data(&mut self) -> anyhow::Result<()>;
    fn setup(&mut self, stage: Stage) -> anyhow::Result<()>;
    fn teardown(&mut self, stage: Stage) -> anyhow::Result<()>;
    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<B>>>;
    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>>;
    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>>;
    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>>;
    fn on_before_batch_transfer(&mut self, batch: B, dataloader_idx: usize) -> anyhow::Result<B>;
    fn transfer_batch_to_device(
        &mut self,
        batch: B,
        device: Device,
        dataloader_idx: usize,
    ) -> anyhow::Result<B>;
    fn on_after_batch_transfer(&mut self, batch: B, dataloader_idx: usize) -> anyhow::Result<B>;
    fn state_dict(&self) -> Option<Value>;
    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()>;
    fn on_exception(&mut self, error: &Error);
}

impl<B: Batch, D: DataModule<Batch = B> + ?Sized> DataHooks<B> for Data<'_, D> {
    fn type_name(&self) -> &'static str {
        self.0.type_name()
    }

    fn hyper_parameters(&self) -> Value {
        self.0.hyper_parameters()
    }

    fn prepare_data(&mut self) -> anyhow::Result<()> {
        self.0.prepare_data()
    }

    fn setup(&mut self, stage: Stage) -> anyhow::Result<()> {
        self.0.setup(stage)
    }

    fn teardown(&mut self, stage: Stage) -> anyhow::Result<()> {
        self.0.teardown(stage)
    }

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<B>>> {
        self.0.train_dataloader()
    }

    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>> {
        self.0.val_dataloader()
    }

    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>> {
        self.0.test_dataloader()
    }

    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<B>>> {
        self.0.predict_dataloader()
    }

    fn on_before_batch_transfer(&mut self, batch: B, dataloader_idx: usize) -> anyhow::Result<B> {
        self.0.on_before_batch_transfer(batch, dataloader_idx)
    }

    fn transfer_batch_to_device(
        &mut self,
        batch: B,
        device: Device,
        dataloader_idx: usize,
    ) -> anyhow::Result<B> {
        self.0.transfer_batch_to_device(batch, device, dataloader_idx)
    }

    fn on_after_batch_transfer(&mut self, batch: B, dataloader_idx: usize) -> anyhow::Result<B> {
        self.0.on_after_batch_transfer(batch, dataloader_idx)
    }

    fn state_dict(&self) -> Option<Value> {
        self.0.state_dict()
    }

    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()> {
        self.0.load_state_dict(state)
    }

    fn on_exception(&mut self, error: &Error) {
        self.0.on_exception(error);
    }
}
