//! Collectives. A [`ProcessGroup`] (`group`) has PyTorch's operations on tensors (`collectives`) and on serializable values (`objects`),
//! and makes groups of some of its ranks (`split`).
//!
//! Each operation that is started returns a [`Work`] and is noted in the flight recorder. It goes to the device's library (NCCL, HCCL),
//! through memory that the ranks of one host share, or to Gloo; `shared` chooses.

mod collectives;
mod group;
mod objects;
mod shared;
mod split;
mod work;

pub use group::ProcessGroup;
pub(crate) use shared::AbsentRanks;
pub use work::Work;
