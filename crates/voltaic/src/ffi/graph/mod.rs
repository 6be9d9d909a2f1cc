//! Graphs: recordings of operators and their replay (`recording`), memory that they take for constant (`frozen`), and CUDA's own graphs
//! (`cuda`).

pub(super) mod cuda;
pub(super) mod frozen;
pub(super) mod recording;
