#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

extern crate self as voltaic; // the derive names everything from `::voltaic`

// in the order of the layers: a module uses only those above it
pub mod device;
mod dtype;
pub mod error;
pub mod ffi;

pub mod accelerator;
pub mod config;
pub mod swap;

pub mod distributed;

pub mod checkpoint;
pub mod data;
pub mod nn;
pub mod optim;
pub mod precision;

pub mod graph;
pub mod metrics;

pub mod profiler;
pub mod strategy;

pub mod lightning;

pub mod callback;
pub mod logger;

pub mod trainer;

pub mod generation;
pub mod models;
pub mod prelude;

pub mod cli;

pub use device::Device;
pub use error::{Error, Result};
pub use graph::compile;
pub use lightning as module;
pub use nn::{Module, te};
pub use tch;
pub use tch::Kind;
/// tch 0.24 takes slices of `half::bf16` for float16 (`from_slice`, `try_from`): make bfloat16 of float32, by
/// `to_kind(Kind::BFloat16)`.
pub use tch::Tensor;
pub use voltaic_kernels as kernels;
