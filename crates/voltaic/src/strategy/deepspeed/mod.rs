//! DeepSpeed's configuration: its file, and what it means here.
//!
//! `config` has the strategy classes with their arguments, `inference` the settings of inference, `settings` the keys of the JSON file with its sections in files of their own
//! (`zero_section`, `classes`, `batch`, [`offload`](super::offload)). `plan` turns both into the settings of [`Zero`](super::Zero).

mod batch;
mod classes;
pub(super) mod config;
pub(super) mod inference;
pub(super) mod plan;
mod settings;
#[cfg(test)]
mod tests;
mod zero_section;
