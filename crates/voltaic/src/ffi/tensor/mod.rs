//! Tensors: where they lie, lists of them, random numbers, autocast.

pub(super) mod autocast;
pub(super) mod device;
pub(super) mod lists;
pub(super) mod rng;
pub(super) mod storage;
