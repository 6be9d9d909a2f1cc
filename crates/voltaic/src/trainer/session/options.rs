//! What one call is asked beside the plan.

use crate::trainer::config::optimizers::OptimizerOverride;
use crate::trainer::config::values::CkptPath;

/// What changes from call to call of fit, validate, test and predict, while the plan of the run stays as it is.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallOptions {
    /// Where it starts; from the beginning unless set.
    pub ckpt_path: Option<CkptPath>,
    /// In place of the module's `configure_optimizers`.
    pub optimizers: Option<OptimizerOverride>,
    /// A learning rate that was found, for all groups.
    pub lr: Option<f64>,
    /// A batch size that was found, for the loaders of this call.
    pub batch_size: Option<usize>,
    /// A short run of a search, which sets the learning rates by itself, and from which nothing goes on.
    pub is_trial: bool,
}
