//! Runs of a module with its own loaders.

use tch::Tensor;

use crate::data::Loaders;
use crate::error::Result;
use crate::module::LightningModule;
use crate::trainer::run::eval::EvalMetrics;
use crate::trainer::trainer::Trainer;

/// What Lightning calls `fit(model)`, without data beside it. Rust has no arguments that may be left out, hence the names.
impl Trainer {
    /// [`Trainer::fit`] with the module's own [`train_dataloader`](LightningModule::train_dataloader) and
    /// [`val_dataloader`](LightningModule::val_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no training loader.
    pub fn fit_module<M: LightningModule>(&mut self, module: &mut M) -> Result<()> {
        self.fit(module, &mut Loaders::new())
    }

    /// [`Trainer::validate`] with the module's own [`val_dataloader`](LightningModule::val_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no validation loader.
    pub fn validate_module<M: LightningModule>(&mut self, module: &mut M) -> Result<EvalMetrics> {
        self.validate(module, &mut Loaders::new())
    }

    /// [`Trainer::test`] with the module's own [`test_dataloader`](LightningModule::test_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no test loader.
    pub fn test_module<M: LightningModule>(&mut self, module: &mut M) -> Result<EvalMetrics> {
        self.test(module, &mut Loaders::new())
    }

    /// [`Trainer::predict`] with the module's own [`predict_dataloader`](LightningModule::predict_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no prediction loader.
    pub fn predict_module<M: LightningModule>(&mut self, module: &mut M) -> Result<Vec<Vec<Tensor>>> {
        self.predict(module, &mut Loaders::new())
    }
}
