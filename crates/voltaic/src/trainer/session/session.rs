//! What one call of fit, validate, test or predict holds. Data only: what is done with it is in other files.

use std::time::Instant;

use crate::data::DataModule;
use crate::module::{LightningModule, StepOutput, Training};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::graphs::StepGraphs;
use crate::trainer::session::options::CallOptions;
use crate::trainer::session::run::Run;
use crate::trainer::session::snapshot::RunSnapshot;
use crate::trainer::session::undo::Undo;

/// One call of fit, validate, test or predict.
pub(crate) struct Session<'a, M: LightningModule> {
    pub plan: &'a TrainPlan,
    pub options: &'a CallOptions,
    pub run: &'a mut Run,
    pub module: &'a mut M,
    pub data: &'a mut dyn DataModule<Batch = M::Batch>,
    pub training: Training,
    /// Batches per optimizer step, which a callback may change between epochs.
    pub accumulate_grad_batches: u64,
    /// When the last validation ended, or training began.
    pub last_validation: Instant,
    /// The hooks at the end of an epoch have begun, and schedules and metrics have not had their turn.
    pub is_ending_epoch: bool,
    /// There once training has been cut short, or is over: what full checkpoints hold from then on.
    pub snapshot: Option<RunSnapshot>,
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
    ) -> Self {
        Self {
            plan,
            options,
            run,
            module,
            data,
            training: Training::default(),
            accumulate_grad_batches: plan.accumulate_grad_batches,
            last_validation: Instant::now(),
            is_ending_epoch: false,
            snapshot: None,
            undo: None,
            graphs: StepGraphs::new(plan.graph),
            outputs: StepOutput::default(),
        }
    }
}
