//! Everything of a run that is not the model: it outlives single calls of fit, validate, test and predict.

use std::path::PathBuf;

use crate::callback::Callback;
use crate::checkpoint::{CheckpointIo, CheckpointPaths};
use crate::data::Stage;
use crate::distributed::{Signals, World};
use crate::error::Result;
use crate::logger::Logger;
use crate::module::{Logging, Position, Requests, RunFacts};
use crate::trainer::config::graph::GraphReport;
use crate::trainer::session::engine::Engine;
use crate::trainer::session::snapshot::RunSnapshot;

/// Everything of a run that is not the model: outlives single calls of fit, validate, test and predict.
pub(crate) struct Run {
    pub at: Position,
    pub facts: RunFacts,
    pub log: Logging,
    pub asks: Requests,
    pub engine: Engine,
    pub checkpoint_io: Box<dyn CheckpointIo>,
    pub callbacks: Vec<Box<dyn Callback>>,
    pub loggers: Vec<Box<dyn Logger>>,
    /// What callbacks have saved that a module has since replaced by others.
    pub replaced: Vec<CheckpointPaths>,
    /// Folders of the runs of this configuration: see `state/find.rs`. Rank 0 knows.
    pub run_folders: Vec<PathBuf>,
    /// The checkpoint that this fit goes on from; it is not replaced by better ones, as in Lightning.
    pub resumed_from: Option<PathBuf>,
    /// Base of all shuffling.
    pub seed: u64,
    /// Calls of fit so far.
    pub fits: u64,
    /// The end of the last fit, for `Trainer::save_checkpoint`.
    pub snapshot: Option<RunSnapshot>,
    /// What graphs did in the last fit.
    pub graphs: GraphReport,
}

impl Run {
    /// Begins a call: whoever begins one ends it with [`Engine::end_call`].
    pub(crate) fn begin_call(&mut self, stage: Stage) -> Result<()> {
        let progress = std::mem::take(&mut self.at.progress);
        self.at = Position { progress, stage, ..Position::default() };
        self.engine.of_call.signals = Some(Signals::watch()?);
        Ok(())
    }

    /// The ranks.
    pub(crate) fn world(&self) -> &World {
        self.engine.strategy.world()
    }
}
