//! Training states that are kept for checkpoints to come.

use crate::checkpoint::{Checkpoint, LoopState, TrainingState};

/// A run as it was when training was cut short. Checkpoints that are written later hold this, so that a resumed run does
/// the rest of the epoch as if it had not been stopped.
pub(crate) enum Frozen {
    /// Of rank 0: all that a checkpoint holds, on the host.
    Whole(Box<Checkpoint>),
    /// Of another rank: what it has to itself, as it is sent to rank 0.
    Own(Vec<u8>),
}

/// What `Trainer::save_checkpoint` writes of a fit that is over.
pub(crate) enum AfterFit {
    /// Training was cut short.
    Frozen(Frozen),
    /// Of rank 0: all but what callbacks, data and module add, on the host.
    Whole(Box<(LoopState, TrainingState)>),
    /// Of another rank.
    Own(Vec<u8>),
}
