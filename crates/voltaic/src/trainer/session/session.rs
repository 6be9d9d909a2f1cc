//! What one call of fit, validate, test or predict holds. Data only: what is done with it is in other files.

use std::sync::Arc;
use std::time::Instant;

use crate::data::Stage;
use crate::ffi::AnomalyWatch;
use crate::module::LightningModule;
use crate::nn::Parameter;
use crate::optim::{ActiveLrScheduler, Optimizer};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::captured_optimizers::CapturedOptimizers;
use crate::trainer::session::data_hooks::DataHooks;
use crate::trainer::session::frozen::{AfterFit, Frozen};
use crate::trainer::session::graphs::StepGraphs;
use crate::trainer::session::run::Run;
use crate::trainer::session::signals::Signals;
use crate::trainer::session::undo::Undo;

/// One call of fit, validate, test or predict.
pub(crate) struct Session<'a, M: LightningModule> {
    pub plan: &'a TrainPlan,
    pub run: &'a mut Run,
    pub module: &'a mut M,
    pub data: &'a mut dyn DataHooks<M::Batch>,
    /// Empty outside fit.
    pub optimizers: Vec<Box<dyn Optimizer>>,
    /// Empty outside fit.
    pub schedulers: Vec<ActiveLrScheduler>,
    /// Batches per optimizer step, which a callback may change between epochs.
    pub accumulate_grad_batches: u64,
    /// Parameters that a manual step has switched, with what they required before.
    pub toggled: Vec<(Parameter, bool)>,
    /// Whose steps those with manual optimization have captured.
    pub captured_optimizers: CapturedOptimizers,
    /// The scale of the losses is in gradients: a loss was multiplied by it, or a checkpoint held such gradients.
    pub has_scaled: bool,
    /// When the last validation ended, or training began.
    pub last_validation: Instant,
    /// There with `detect_anomaly`.
    pub anomaly: Option<AnomalyWatch>,
    pub signals: Arc<Signals>,
    pub stage: Stage,
    pub is_sanity_check: bool,
    /// The hooks at the end of an epoch have begun, and schedules and metrics have not had their turn.
    pub is_ending_epoch: bool,
    /// Training has begun, so that there is something that a failure could lose.
    pub has_begun: bool,
    /// There once training has been cut short: what checkpoints hold from then on.
    pub frozen: Option<Frozen>,
    /// There when the fit is over.
    pub after_fit: Option<AfterFit>,
    /// There while a training batch has not come to its optimizer step, if that may have to be undone.
    pub undo: Option<Undo>,
    pub graphs: StepGraphs,
}
