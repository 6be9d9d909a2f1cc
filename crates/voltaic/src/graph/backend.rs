//! Backends of compile, by name.

use std::fmt;
use std::str::FromStr;
use std::sync::Once;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::nearest;
use crate::error::{Error, GraphError, Problem, Result};

/// Kinds of calls that are compiled for each module; calls of further kinds run as usual. That of `torch.compile`.
pub(crate) const RECOMPILE_LIMIT: usize = 8;

/// Who compiles, by the names of `torch.compile(model, backend=..)` on HPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CompileBackend {
    /// For training and for evaluation.
    #[default]
    HpuBackend,
    /// Older name of `hpu_backend`, for training.
    AotHpuTrainingBackend,
    /// Older name of `hpu_backend`, for calls without grad. A call that wants gradients is an error.
    AotHpuInferenceBackend,
}

impl CompileBackend {
    const ALL: [Self; 3] = [Self::HpuBackend, Self::AotHpuTrainingBackend, Self::AotHpuInferenceBackend];

    fn name(self) -> &'static str {
        match self {
            Self::HpuBackend => "hpu_backend",
            Self::AotHpuTrainingBackend => "aot_hpu_training_backend",
            Self::AotHpuInferenceBackend => "aot_hpu_inference_backend",
        }
    }

    /// Whether it computes gradients.
    pub(crate) fn trains(self) -> bool {
        self != Self::AotHpuInferenceBackend
    }

    /// Says once per process that a name is an older one.
    ///
    /// Source: the warning of `habana_frameworks.torch.dynamo.compile_backend`.
    pub(crate) fn warn_if_deprecated(self) {
        static SAID: Once = Once::new();
        if self != Self::HpuBackend {
            SAID.call_once(|| {
                tracing::warn!("*** Usage of deprecated backend! Please use hpu_backend. ***");
            });
        }
    }
}

impl fmt::Display for CompileBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CompileBackend {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        if let Some(backend) = Self::ALL.into_iter().find(|backend| backend.name() == name) {
            return Ok(backend);
        }
        let names = Self::ALL.map(Self::name);
        let remedy = match nearest(name, names) {
            Some(near) => format!("did you mean {near}"),
            None => format!("use {}", names.join(", ")),
        };
        let what = format!("compile: there is no backend `{name}`");
        Err(GraphError::Arguments { problem: Problem::new(what, remedy) }.into())
    }
}
