//! libtorch's autograd engine: its switches, hooks of gradients, functions whose gradient is ours.

pub(super) mod function;
pub(super) mod hooks;
pub(super) mod modes;
