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
mod regression;
mod state;

use std::fmt::Debug;

use tch::Tensor;

use crate::error::Result;

pub use classification::{Accuracy, Average, ConfusionMatrix, F1Score};
pub use curve::Auroc;
pub use regression::{MeanMetric, MeanSquaredError, Perplexity};
pub use state::{MetricState, Reduction};

/// A value over all batches since the last reset.
///
/// One of one's own keeps a [`MetricState`], to which its `update` adds, and computes its value from it. Clones share
/// their state.
///
/// ```
/// use voltaic::metrics::{Metric, MetricState, Reduction};
/// use voltaic::{Kind, Module, Result, Tensor};
///
/// /// Largest value seen in a batch, on average.
/// #[derive(Debug, Clone, Module)]
/// #[module(metric)]
/// struct MeanMax {
///     state: MetricState,
/// }
///
/// impl MeanMax {
///     fn new() -> Self {
///         let parts = &[("sum", Reduction::Sum), ("batches", Reduction::Sum)];
///         Self { state: MetricState::new("MeanMax", parts) }
///     }
///
///     fn update(&self, values: &Tensor) -> Result<()> {
///         self.state.add(vec![values.f_max()?, Tensor::from(1.0_f32)])
///     }
/// }
///
/// impl Metric for MeanMax {
///     fn state(&self) -> &MetricState {
///         &self.state
///     }
///
///     fn value(&self, parts: &[Tensor]) -> Result<Tensor> {
///         Ok(parts[0].f_div(&parts[1])?)
///     }
/// }
///
/// # fn main() -> anyhow::Result<()> {
/// let metric = MeanMax::new();
/// metric.update(&Tensor::from_slice(&[1.0_f32, 3.0]))?;
/// metric.update(&Tensor::from_slice(&[5.0_f32, 4.0]))?;
/// assert_eq!(metric.compute()?.double_value(&[]), 4.0);
/// # Ok(()) }
/// ```
pub trait Metric: Debug + Send + Sync {
    /// What has been accumulated.
    fn state(&self) -> &MetricState;

    /// The value of accumulated tensors, in the order of the state's parts; on their device.
    ///
    /// # Errors
    /// If libtorch refuses them.
    fn value(&self, parts: &[Tensor]) -> Result<Tensor>;

    /// The value of all batches; on the device of the inputs.
    ///
    /// # Errors
    /// If nothing has been accumulated yet.
    fn compute(&self) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        self.value(&self.state().tensors()?)
    }

    /// The value of the last batch alone.
    ///
    /// # Errors
    /// If nothing has been accumulated yet.
    fn compute_last(&self) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        self.value(&self.state().last_tensors()?)
    }

    /// Forgets all batches.
    fn reset(&self) {
        self.state().reset();
    }

    /// Adds the state of another metric of the same settings, such as that of another process: its `state().named()`.
    ///
    /// # Errors
    /// If the tensors do not fit.
    fn merge(&self, state: &[(String, Tensor)]) -> Result<()> {
        self.state().merge(state)
    }
}
