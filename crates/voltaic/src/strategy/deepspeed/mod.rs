//! DeepSpeed's configuration: its file, and what it means here.

mod batch;
pub(super) mod config;
mod document;
pub(super) mod plan;
mod section;
mod settings;
#[cfg(test)]
mod tests;
mod zero_section;
