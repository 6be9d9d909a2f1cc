//! DeepSpeed's configuration: its file, and what it means here.

mod batch;
mod classes;
pub(super) mod config;
mod offload;
pub(super) mod plan;
mod settings;
#[cfg(test)]
mod tests;
mod zero_section;
