//! Python's pickles as plain data: a reader that builds values and executes nothing, and a writer.
//!
//! Formats: Python's `pickletools`, and `torch/serialization.py`. A pickle names classes and functions; those that
//! only make plain data are allowed by name, any other is rejected.

mod globals;
mod reader;
mod value;
mod writer;

pub(super) use reader::{Stored, read};
pub(super) use writer::write;

pub use value::{Object, Value};
