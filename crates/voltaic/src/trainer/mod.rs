//! The trainer: from configuration to plan, then fit, validate, test or predict.
//!
//! Rooms, each of which uses those before it: `config/` (what is written), `plan/` (what will be done), `session/` (what one call
//! holds), `state/` (what is saved, and where it goes on), `run/` (what happens, in order), `search/` (what is tried before).
//! Start with `run/fit.rs`: it holds the whole training step in reading order.

mod builder;
mod config;
mod join;
mod lightning_file;
mod own_loaders;
mod plan;
mod run;
mod search;
mod session;
mod state;
#[allow(clippy::module_inception)]
mod trainer;

pub use crate::accelerator::Devices;
pub use crate::accelerator::rng::{global_seed, seed_everything};
pub use builder::TrainerBuilder;
pub use config::callbacks::CallbackConfig;
pub use config::{
    Deterministic, FastDevRun, GradientClipAlgorithm, Limit, PluginConfig, TrainerConfig, ValCheckInterval,
    WarnText,
};
pub use lightning_file::{Converted, from_lightning, state_dict, to_lightning};
pub use run::graphs::step::{GraphMode, GraphReport};
pub use run::optimizers::LrSchedulerSettings;
pub use search::batch_size_finder::{BatchSizeFinderConfig, BatchSizeSearch};
pub use search::lr_finder::{LearningRateFinderConfig, LrFind, LrGrowth};
pub use trainer::{EvalMetrics, Trainer};
