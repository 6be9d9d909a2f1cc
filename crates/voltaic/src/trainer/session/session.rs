//! What one call of fit, validate, test or predict holds. Data only: what is done with it is in other files.

use std::sync::Arc;
use std::time::Instant;

use crate::data::{DataModule, Stage};
use crate::error::Result;
use crate::ffi::AnomalyWatch;
use crate::module::{LightningModule, StepOutput};
use crate::nn::Parameter;
use crate::optim::{ActiveLrScheduler, Optimizer};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::captured_optimizers::CapturedOptimizers;
use crate::trainer::session::frozen::{AfterFit, Frozen};
use crate::trainer::session::graphs::StepGraphs;
use crate::trainer::session::options::CallOptions;
use crate::trainer::session::run::Run;
use crate::trainer::session::signals::Signals;
use crate::trainer::session::undo::Undo;

/// One call of fit, validate, test or predict.
pub(crate) struct Session<'a, M: LightningModule> {
    pub plan: &'a TrainPlan,
    pub options: &'a CallOptions,
    pub run: &'a mut Run,
    pub module: &'a mut M,
    pub data: &'a mut dyn DataModule<Batch = M::Batch>,
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
    /// What the step of a batch gave by name, until the hook after it.
    pub outputs: StepOutput,
}

impl<'a, M: LightningModule> Session<'a, M> {
    /// At the beginning of a call.
    pub(crate) fn new(
        plan: &'a TrainPlan,
        options: &'a CallOptions,
        run: &'a mut Run,
        module: &'a mut M,
        data: &'a mut dyn DataModule<Batch = M::Batch>,
        stage: Stage,
    ) -> Result<Self> {
        Ok(Self {
            plan,
            options,
            run,
            module,
            data,
            optimizers: Vec::new(),
            schedulers: Vec::new(),
            accumulate_grad_batches: plan.accumulate_grad_batches,
            toggled: Vec::new(),
            captured_optimizers: CapturedOptimizers::default(),
            has_scaled: false,
            last_validation: Instant::now(),
            anomaly: None,
            signals: Arc::new(Signals::watch()?),
            stage,
            is_sanity_check: false,
            is_ending_epoch: false,
            has_begun: false,
            frozen: None,
            after_fit: None,
            undo: None,
            graphs: StepGraphs::new(plan.graph),
            outputs: StepOutput::default(),
        })
    }
}
