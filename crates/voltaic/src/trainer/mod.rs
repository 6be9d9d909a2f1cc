//! The trainer: from configuration to plan, then fit, validate, test or predict.
//!
//! Modules, each of which uses those before it: `config/` (what is written), `plan/` (what will be done), `session/` (what one call
//! holds), `state/` (what is saved, and where a run resumes), `run/` (what happens, in order), `search/` (what is tried before).
//! Start with `run/fit.rs`: it holds the whole training step in reading order.

mod assemble;
mod builder;
mod config;
mod fabric;
mod join;
mod plan;
mod run;
mod search;
mod session;
mod state;
#[allow(clippy::module_inception)]
mod trainer;

pub use crate::accelerator::Devices;
pub use crate::accelerator::rng::{global_seed, seed_everything};
pub use crate::checkpoint::{Converted, from_lightning, state_dict, to_lightning};
pub use builder::TrainerBuilder;
pub use config::TrainerConfig;
pub(crate) use config::values::InitialWeights;

pub use config::activations::{
    ActivationCheckpointing, ActivationCheckpointingConfig, ActivationMode, MemorySize,
};
pub use config::callbacks::CallbackConfig;
pub use config::graph::{GraphMode, GraphReport};
pub use config::optimizers::LrSchedulerSettings;
pub use config::searches::{BatchSizeFinderConfig, BatchSizeSearch, LearningRateFinderConfig, LrGrowth};
pub use config::values::{
    CkptPath, Deterministic, FastDevRun, GradientClipAlgorithm, Limit, PluginConfig, ValCheckInterval,
    WarnText,
};
pub use fabric::{Fabric, FabricBatches, FabricBuilder, FabricDataLoader, FabricModule, FabricOptimizers};
pub use run::eval::EvalMetrics;
pub use search::lr_finder::LrFind;
pub use trainer::Trainer;
