//! `trainer.activation_checkpointing`: what becomes of what modules save for the backward pass.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The modules whose activations are not simply kept: names alone, or with settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ActivationCheckpointing {
    /// Modules by type or fqn; what they save is computed again.
    Modules(Vec<String>),
    /// With settings.
    Settings(ActivationCheckpointingConfig),
}

/// Settings of [`ActivationCheckpointing`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ActivationCheckpointingConfig {
    /// Modules by type or fqn: `[Block]`, `[transformer.h.*]`.
    pub modules: Vec<String>,
    /// What becomes of what they save for the backward pass.
    pub mode: ActivationMode,
    /// Operators whose results are kept after all, with mode=recompute: `matmul`, `attention`, or as libtorch names them. None unless set.
    pub save: Vec<String>,
    /// So much of it may be kept on the device after all, in bytes or as `512MiB`: the first batch finds out what each module saves and how
    /// long it takes, and from then on those are kept that save the most time within the budget. None is kept unless set.
    pub budget: Option<MemorySize>,
}

/// What becomes of activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationMode {
    /// They are dropped, and computed again in the backward pass.
    #[default]
    Recompute,
    /// They go to the host's memory, and come back in the backward pass.
    Offload,
}

/// A size of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum MemorySize {
    /// So many bytes.
    Bytes(u64),
    /// With a unit: `512MiB`, `4GB`.
    Text(String),
}

impl ActivationCheckpointing {
    /// The settings, those that have defaults among them.
    pub(crate) fn settings(&self) -> ActivationCheckpointingConfig {
        match self {
            Self::Modules(modules) => {
                ActivationCheckpointingConfig { modules: modules.clone(), ..Default::default() }
            }
            Self::Settings(settings) => settings.clone(),
        }
    }
}

impl From<Vec<String>> for ActivationCheckpointing {
    fn from(modules: Vec<String>) -> Self {
        Self::Modules(modules)
    }
}

impl<const N: usize> From<[&str; N]> for ActivationCheckpointing {
    fn from(modules: [&str; N]) -> Self {
        Self::Modules(modules.map(str::to_owned).to_vec())
    }
}

impl From<ActivationCheckpointingConfig> for ActivationCheckpointing {
    fn from(settings: ActivationCheckpointingConfig) -> Self {
        Self::Settings(settings)
    }
}
