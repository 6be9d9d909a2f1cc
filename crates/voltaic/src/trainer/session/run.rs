//! Everything of a run that is not the model: it outlives single calls of fit, validate, test and predict.

use std::path::PathBuf;
use std::sync::Arc;

use crate::accelerator::Accelerator;
use crate::callback::Callback;
use crate::checkpoint::{CheckpointIo, CheckpointPaths};
use crate::distributed::World;
use crate::logger::Logger;
use crate::module::{MetricStore, Profiling, Progress, Requests, RunFacts};
use crate::precision::GradScaler;
use crate::strategy::{Strategy, Votes};
use crate::trainer::config::graph::GraphReport;
use crate::trainer::session::frozen::AfterFit;

/// Everything of a run that is not the model: outlives single calls of fit, validate, test and predict.
pub(crate) struct Run {
    pub accelerator: Arc<dyn Accelerator>,
    pub strategy: Box<dyn Strategy>,
    /// What any rank has been asked, as far as all know.
    pub agreed: Votes,
    pub checkpoint_io: Box<dyn CheckpointIo>,
    pub callbacks: Vec<Box<dyn Callback>>,
    pub loggers: Vec<Box<dyn Logger>>,
    pub progress: Progress,
    pub metrics: MetricStore,
    pub profiling: Profiling,
    pub requests: Requests,
    pub facts: RunFacts,
    /// What callbacks have saved that a module has since replaced by others.
    pub replaced: Vec<CheckpointPaths>,
    /// Folders of the runs of this configuration: see `state/find.rs`. Rank 0 knows.
    pub run_folders: Vec<PathBuf>,
    /// The checkpoint that this fit goes on from; it is not replaced by better ones, as in Lightning.
    pub resumed_from: Option<PathBuf>,
    /// There with `16-mixed`.
    pub grad_scaler: Option<GradScaler>,
    /// Base of all shuffling.
    pub seed: u64,
    /// Calls of fit so far.
    pub fits: u64,
    /// What a checkpoint of the last fit goes on from.
    pub after_fit: Option<AfterFit>,
    /// What graphs did in the last fit.
    pub graphs: GraphReport,
}

impl Run {
    /// The ranks.
    pub(crate) fn world(&self) -> &World {
        self.strategy.world()
    }
}
