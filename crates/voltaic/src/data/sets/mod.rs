//! Data sets that are ready to use, and where their files are looked for.

mod folders;
mod idx;
pub(super) mod mnist;
pub(super) mod mnist_data;
pub(super) mod shakespeare_data;
