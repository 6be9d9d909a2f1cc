//! Metrics whose value is computed from state that is accumulated over batches, with torchmetrics' definitions.
//!
//! A metric is a field of the module. A step updates it and logs it; the trainer computes its value at the end of the
//! epoch, over all ranks, and resets it. State is tensors on the device of the inputs: `update` reads nothing back.
//!
//! ```no_run
//! # use voltaic::metrics::{Accuracy, Average, Metric};
//! # use voltaic::module::StepContext;
//! # use voltaic::nn::Linear;
//! # use voltaic::{Module, Tensor};
//! #[derive(Module)]
//! struct Net {
//!     fc: Linear,
//!     accuracy: Accuracy, // Accuracy::new(10, Average::Macro)
//! }
//! # impl Net {
//! fn validation_step(&self, logits: &Tensor, labels: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
//!     self.accuracy.update(logits, labels)?;
//!     ctx.log("val_acc", &self.accuracy).prog_bar(true);
//!     Ok(())
//! }
//! # }
//! ```
//!
//! Without a trainer: [`Metric::compute`] and [`Metric::reset`].

mod classification;
mod curve;
mod divide;
mod regression;

pub use crate::nn::{Metric, MetricState, Reduction};
pub use classification::{Accuracy, Average, ConfusionMatrix, F1Score};
pub use curve::Auroc;
pub use regression::{MeanMetric, MeanSquaredError, Perplexity};
