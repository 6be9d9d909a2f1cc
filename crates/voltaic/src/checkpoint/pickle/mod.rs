//! Python's pickles as plain data: a reader that builds values and executes nothing, and a writer.
//!
//! Formats: `pickletools` of Python's library, and `torch/serialization.py`. A pickle names classes and functions; those that
//! only make plain data are known here by name, any other is refused.

mod globals;
mod reader;
mod value;
mod writer;

pub(super) use reader::{Stored, read};
pub(super) use writer::write;

pub use value::Value;
