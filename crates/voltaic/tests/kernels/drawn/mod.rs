//! Calls by chance: sizes (0 among them), strides, numbers at the edge, modes of libtorch, given outputs. Voltaic's kernels,
//! chosen as on several machines, must give what libtorch's give.

mod attentions;
pub mod calls;
mod convolutions;
mod draw;
mod elements;
mod far;
mod images;
mod products;
pub mod rows;
