//! States of a run that are kept for checkpoints that are written later.

use crate::checkpoint::{Checkpoint, LoopState, Part, TrainingState, parts_to_host};
use crate::error::Result;

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
    /// This rank's parts of states that are divided among ranks.
    pub parts: Vec<Part>,
}

impl FitState {
    /// The same with all tensors on the host; those that are there are shared.
    pub(crate) fn to_host(&self) -> Result<Self> {
        let Self { state, training, parts } = self;
        Ok(Self { state: state.clone(), training: training.to_host()?, parts: parts_to_host(parts)? })
    }
}
