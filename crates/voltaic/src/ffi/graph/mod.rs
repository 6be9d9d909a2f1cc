//! Graphs: recordings of operators and their replay, CUDA's graphs.

pub(super) mod cuda;
pub(super) mod recording;
