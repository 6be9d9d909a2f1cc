//! Tensors: devices and storage, operators on lists of them, states of random generators, autocast.

pub(super) mod attention;
pub(super) mod autocast;
pub(super) mod device;
pub(super) mod float8;
pub(super) mod lists;
pub(super) mod rng;
pub(super) mod storage;
pub(super) mod updates;
