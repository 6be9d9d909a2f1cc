//! Lightning-style training for Rust on libtorch.

#![deny(unsafe_code)]

extern crate self as voltaic; // the derive names everything from `::voltaic`

pub mod device;
pub mod error;
pub mod ffi;
pub mod models;
pub mod nn;

pub use device::Device;
pub use error::{Error, Result};
pub use nn::Module;
pub use tch::{Kind, Tensor};
