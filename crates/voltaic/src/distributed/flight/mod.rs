//! The flight recorder: what each rank did last, for the time when one of them hangs or dies.
//!
//! Every operation between ranks is noted in a ring (`record`), with the names of who called it (`scope`). The ring is in
//! memory that ranks of one host share, so that it outlives its rank. When an operation fails, or a rank is gone, all
//! others write their rings below the run's folder and publish their positions (`watchdog`); `inquest` finds out on which ranks it failed. PyTorch has the same under this name.

pub(super) mod inquest;
pub(super) mod record;
pub(super) mod scope;
pub(super) mod watchdog;
