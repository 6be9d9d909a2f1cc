//! What a run and one call of fit, validate, test or predict hold, and copies of it that are kept. The code that works on it is in
//! other files.

use std::path::PathBuf;
use std::time::Instant;

use tch::Tensor;

use crate::accelerator::rng;
use crate::callback::Callback;
use crate::checkpoint::{
    Checkpoint, CheckpointIo, CheckpointPaths, LoopState, Shard, TrainingState, shards_to_host,
};
use crate::data::{DataModule, Stage};
use crate::device::Device;
use crate::distributed::{Signals, World};
use crate::error::Result;
use crate::logger::Logger;
use crate::module::{
    LightningModule, Logging, MetricsMark, Position, Progress, Requests, RunFacts, StepOutput, Training,
};
use crate::nn::{ModuleExt, Snapshot, SnapshotParts};
use crate::precision::LossScale;
use crate::trainer::config::graph::GraphReport;
use crate::trainer::config::optimizers::OptimizerOverride;
use crate::trainer::config::values::{CkptPath, InitialWeights};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::engine::Engine;
use crate::trainer::session::graphs::StepGraphs;

/// Everything of a run that is not the model: outlives single calls of fit, validate, test and predict.
pub(crate) struct Run {
    pub at: Position,
    pub facts: RunFacts,
    pub log: Logging,
    pub requests: Requests,
    pub engine: Engine,
    pub checkpoint_io: Box<dyn CheckpointIo>,
    pub callbacks: Vec<Box<dyn Callback>>,
    pub loggers: Vec<Box<dyn Logger>>,
    /// Rows of each logger at the place from which a checkpoint of now goes on.
    pub rows: Vec<u64>,
    /// What callbacks have saved that a module has since replaced by others.
    pub replaced: Vec<CheckpointPaths>,
    /// Folders of the runs of this configuration: see `state/find.rs`. Empty on other ranks than 0.
    pub run_folders: Vec<PathBuf>,
    /// The checkpoint that this fit resumes; it is not replaced by better ones, as in Lightning.
    pub resumed_from: Option<PathBuf>,
    /// What the next call begins with, unless it has a checkpoint.
    pub weights: Option<InitialWeights>,
    /// Base of all shuffling.
    pub seed: u64,
    /// Calls of fit so far.
    pub fits: u64,
    /// The end of the last fit, for `Trainer::save_checkpoint`.
    pub snapshot: Option<RunSnapshot>,
    /// What graphs did in the last call.
    pub graphs: GraphReport,
}

impl Run {
    /// Begins a call, which ends with [`Engine::end_call`].
    pub(crate) fn begin_call(&mut self, stage: Stage) -> Result<()> {
        let progress = std::mem::take(&mut self.at.progress);
        self.at = Position { progress, stage, ..Position::default() };
        self.engine.of_call.signals = Some(Signals::watch()?);
        Ok(())
    }

    /// Notes the rows so far: a checkpoint of now goes on from here.
    pub(crate) fn mark_rows(&mut self) {
        self.rows.clear();
        self.rows.extend(self.loggers.iter().map(|logger| logger.num_rows()));
    }

    /// Lets the loggers continue after the rows that a checkpoint has.
    pub(crate) fn resume_loggers(&mut self) -> Result<()> {
        let step = self.at.progress.batches_that_stepped;
        let rows = self.rows.iter().copied().map(Some).chain(std::iter::repeat(None));
        self.loggers.iter_mut().zip(rows).try_for_each(|(logger, rows)| logger.resume(rows, step))?;
        self.mark_rows();
        Ok(())
    }

    /// The ranks.
    pub(crate) fn world(&self) -> &World {
        self.engine.strategy.world()
    }
}

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
    /// The fit has found that the module has no `validation_step`.
    pub has_no_validation_step: bool,
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
            graphs: StepGraphs::new(plan.graph, plan.compile),
            outputs: StepOutput::default(),
            has_no_validation_step: false,
        }
    }
}

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
    /// A short run of a search, which sets the learning rates by itself and cannot be resumed.
    pub is_trial: bool,
    /// The loop is the user's own: steps of [`Fabric`](crate::trainer::Fabric) clip as the settings say.
    pub is_own_loop: bool,
}

/// A run as it was when training ended, for the checkpoints that are written later.
pub(crate) enum RunSnapshot {
    /// Training was cut short within an epoch: all that a checkpoint holds, on the host. A resumed run does the rest of the epoch as
    /// if it had not been stopped.
    CutShort(Box<Checkpoint>),
    /// The fit is over. Weights, and what callbacks, data and module add, are those of the time of writing.
    Finished(Box<FitState>),
    /// Of a rank that does not write: its own state, as it is sent to rank 0.
    OwnState(Vec<u8>),
}

/// The training state without what callbacks, data and module add.
pub(crate) struct FitState {
    pub state: LoopState,
    pub training: TrainingState,
    /// This rank's shards of states that are sharded among ranks.
    pub shards: Vec<Shard>,
}

impl FitState {
    /// The same with all tensors on the host; those that are there are shared.
    pub(crate) fn to_host(&self) -> Result<Self> {
        let Self { state, training, shards } = self;
        Ok(Self { state: state.clone(), training: training.to_host()?, shards: shards_to_host(shards)? })
    }
}

/// What a training batch changes before its optimizer step, as it was before the batch, or with several ranks before the accumulation
/// window: a run that fails within the batch can be resumed from there. Weights and optimizers do not change until then.
pub(crate) struct Undo {
    /// Buffers.
    module: Snapshot,
    /// Gradients of the batches before in the window.
    grads: Vec<(String, Tensor)>,
    rng: Vec<(String, Tensor)>,
    metrics: MetricsMark,
    /// Where the run stood.
    progress: Progress,
    loss_scale: Option<LossScale>,
    rows: Vec<u64>,
}

impl Undo {
    /// What the batch to come may change.
    pub(crate) fn before<M: LightningModule>(
        module: &M,
        run: &Run,
        device: Device,
        opens_window: bool,
    ) -> Result<Self> {
        let parts = SnapshotParts { buffers: true, ..SnapshotParts::default() };
        let grads = if opens_window { Vec::new() } else { run.engine.strategy.grads(module.as_dyn())? };
        let grads = grads.into_iter().map(|(name, grad)| Ok((name, copied(&grad)?)));
        Ok(Self {
            module: Snapshot::of(module, parts)?,
            grads: grads.collect::<Result<_>>()?,
            rng: rng::states(device)?,
            metrics: run.log.metrics.mark()?,
            progress: run.at.progress.clone(),
            loss_scale: run.engine.loss_scale.clone(),
            rows: run.rows.clone(),
        })
    }

    /// Goes back to it.
    pub(crate) fn restore<M: LightningModule>(self, module: &M, run: &mut Run, device: Device) -> Result<()> {
        self.module.restore(module)?;
        run.engine.strategy.drop_grads(module.as_dyn())?;
        run.engine.strategy.set_grads(module.as_dyn(), &self.grads)?;
        run.log.metrics.go_back(self.metrics, device)?;
        run.at.progress = self.progress;
        run.engine.loss_scale = self.loss_scale;
        run.rows = self.rows;
        rng::set_states(&self.rng)
    }
}

fn copied(tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
