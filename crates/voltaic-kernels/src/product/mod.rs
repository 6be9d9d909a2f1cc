//! Products of matrices.

pub(crate) mod amx;
pub(crate) mod batched;
#[cfg(target_arch = "x86_64")]
pub(crate) mod few_rows;
pub(crate) mod float8;
pub(crate) mod gemm;
pub(crate) mod matrix;
pub(crate) mod mkl;
pub(crate) mod multiply;
pub(crate) mod panels;
pub(crate) mod round;
#[cfg(target_arch = "x86_64")]
pub(crate) mod split;
pub(crate) mod strip;
pub(crate) mod strips;
pub(crate) mod transpose;
