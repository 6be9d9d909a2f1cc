//! Operators element by element.

pub(crate) mod chain;
pub(crate) mod gelu;
pub(crate) mod operators;
pub(crate) mod pointwise;
mod row_steps;
