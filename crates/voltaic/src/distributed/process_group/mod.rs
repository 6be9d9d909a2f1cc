//! Operations between ranks.

mod collectives;
mod group;
mod objects;
mod shared;
mod split;
mod work;

pub use group::ProcessGroup;
pub(crate) use shared::AbsentRanks;
pub use work::Work;
