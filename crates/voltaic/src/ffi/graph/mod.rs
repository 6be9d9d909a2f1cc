//! Graphs: recordings of operators and their replay (`recording`), and CUDA's own graphs (`cuda`).

pub(super) mod cuda;
pub(super) mod recording;
