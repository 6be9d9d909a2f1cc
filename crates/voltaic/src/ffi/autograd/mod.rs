//! libtorch's autograd engine: its switches (`modes`), hooks on gradients (`hooks`), functions with a backward pass in
//! Rust (`function`), and segments that backward computes again (`segment`).

pub(super) mod function;
pub(super) mod hooks;
pub(super) mod modes;
pub(super) mod segment;
