//! Data sets that ship: each has a `DataModule` with a serde config; `folders` finds the files.

mod folders;
mod idx;
pub(super) mod mnist;
pub(super) mod mnist_data;
pub(super) mod shakespeare_data;
