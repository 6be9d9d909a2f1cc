//! The emulated HPU. A binary of its own: the back end and its memory pools are there for a whole process.

mod device;
mod operators;
mod support;
mod trainer;
mod training;
