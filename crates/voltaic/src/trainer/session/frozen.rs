//! Training states that are kept for checkpoints to come.

use crate::checkpoint::{Checkpoint, LoopState, Part, TrainingState};

/// A run as it was when training was cut short. Checkpoints that are written later hold this, so that a resumed run does
/// the rest of the epoch as if it had not been stopped.
pub(crate) enum Frozen {
    /// Of rank 0: all that a checkpoint holds, on the host. Of any rank that saves its own parts: with these.
    Whole(Box<Checkpoint>),
    /// Of another rank: what it has to itself, as it is sent to rank 0.
    Own(Vec<u8>),
}

/// What `Trainer::save_checkpoint` writes of a fit that is over.
pub(crate) enum AfterFit {
    /// Training was cut short.
    Frozen(Frozen),
    /// Of rank 0, and of ranks that save their own parts: all but what callbacks, data and module add, on the host.
    Whole(Box<FitState>),
    /// Of another rank.
    Own(Vec<u8>),
}

/// The training state without what callbacks, data and module add.
pub(crate) struct FitState {
    pub state: LoopState,
    pub training: TrainingState,
    /// What this rank has of states that are divided among ranks.
    pub parts: Vec<Part>,
}
