//! Modules: the tree of named parameters, and the usual layers with PyTorch's names and initialisations.

mod module;
mod parameter;

pub use module::{Forward, Member, Module, ModuleExt, set_training};
pub use parameter::{Buffer, Parameter};
