//! Operations between ranks.

mod collectives;
mod group;
mod objects;
mod shared;
mod split;
mod work;

pub use group::ProcessGroup;
pub use work::Work;
