//! Steps of optimizers.

pub(crate) mod numbers;
pub(crate) mod pass;
pub(crate) mod rules;
