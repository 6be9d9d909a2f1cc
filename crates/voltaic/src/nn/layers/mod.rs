//! PyTorch's layers, one file for each kind: each is a `#[derive(Module)]` struct with `forward` and setters for its options.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod batch_norm;
pub(super) mod conv;
pub(super) mod conv_transpose;
pub(super) mod dropout;
pub(super) mod embedding;
pub(super) mod kv_cache;
pub(super) mod linear;
pub(super) mod matmul;
pub(super) mod norm;
pub(super) mod pool;
pub(super) mod recurrent;
pub(super) mod sync_batch_norm;
