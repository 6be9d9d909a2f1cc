//! Lightning-style training for Rust on libtorch.

#![deny(unsafe_code)]

pub mod config;
pub mod device;
pub mod error;
pub mod ffi;
pub mod nn;

pub use device::Device;
pub use error::{Error, Result};
pub use tch::{Kind, Tensor};
