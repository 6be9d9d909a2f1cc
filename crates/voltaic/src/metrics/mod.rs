//! Metrics whose value is computed from state that is accumulated over batches, with torchmetrics' definitions.
//!
//! State is tensors on the device of the inputs: `update` reads nothing back, and `compute` gives a tensor, which
//! `ctx.log` takes. A step has `&self`, so the state is behind a lock.
//!
//! ```no_run
//! # use voltaic::metrics::{Accuracy, Average, Metric};
//! # use voltaic::module::{HookContext, StepContext};
//! # use voltaic::Tensor;
//! # struct Net { accuracy: Accuracy }
//! # impl Net {
//! fn validation_step(&self, logits: &Tensor, labels: &Tensor) -> anyhow::Result<()> {
//!     Ok(self.accuracy.update(logits, labels)?) // Accuracy::new(10, Average::Macro)
//! }
//! fn on_validation_epoch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
//!     ctx.log("val_acc", self.accuracy.compute()?).prog_bar(true);
//!     Ok(self.accuracy.reset())
//! }
//! # }
//! ```

mod classification;
mod curve;
mod regression;
mod state;

use tch::Tensor;

use crate::error::Result;

pub use classification::{Accuracy, Average, ConfusionMatrix, F1Score};
pub use curve::Auroc;
pub use regression::{MeanMetric, MeanSquaredError, Perplexity};

/// A value over all batches since the last reset.
pub trait Metric: Send + Sync {
    /// The value; on the device of the inputs.
    ///
    /// # Errors
    /// If nothing has been accumulated yet.
    fn compute(&self) -> Result<Tensor>;

    /// Forgets all batches.
    fn reset(&self);

    /// The accumulated tensors by name, empty before the first batch.
    fn state_dict(&self) -> Vec<(String, Tensor)>;

    /// Adds the state of another metric of the same settings, such as that of another process.
    ///
    /// # Errors
    /// If the tensors do not fit.
    fn merge(&self, state: &[(String, Tensor)]) -> Result<()>;
}
