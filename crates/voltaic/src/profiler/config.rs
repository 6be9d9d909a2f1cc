//! The `profiler` key.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::advanced::{AdvancedProfiler, AdvancedProfilerConfig};
use super::hpu::{HpuProfiler, HpuProfilerConfig};
use super::profiler::Profiler;
use super::simple::{SimpleProfiler, SimpleProfilerConfig};
use super::torch::{PyTorchProfiler, PyTorchProfilerConfig};
use crate::config::conversions;
use crate::error::ConfigError;

/// A profiler by name, or by class with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ProfilerConfig {
    /// `simple`, `advanced`, `pytorch` or `hpu`.
    Name(String),
    /// With settings.
    Class(ProfilerClass),
}

/// A profiler by class name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum ProfilerClass {
    /// Adds up the time of each action.
    SimpleProfiler(SimpleProfilerConfig),
    /// Tells how the time of each action is spread and nested.
    AdvancedProfiler(AdvancedProfilerConfig),
    /// Records the operators of a few steps.
    PyTorchProfiler(PyTorchProfilerConfig),
    /// The same, and what HPUs do for them.
    #[serde(rename = "HPUProfiler")]
    HpuProfiler(HpuProfilerConfig),
}

impl ProfilerConfig {
    /// Makes the profiler.
    ///
    /// # Errors
    /// [`ConfigError`] if there is none of this name, or its settings are invalid.
    pub fn build(&self) -> Result<Box<dyn Profiler>, ConfigError> {
        Ok(match self {
            Self::Name(name) => match name.to_lowercase().as_str() {
                "simple" => Box::new(SimpleProfiler::default()),
                "advanced" => Box::new(AdvancedProfiler::default()),
                "pytorch" => Box::new(PyTorchProfiler::new(&PyTorchProfilerConfig::default())?),
                "hpu" => Box::new(HpuProfiler::from_config(&HpuProfilerConfig::default())?),
                _ => {
                    let what = format!("there is no profiler `{name}`");
                    return Err(ConfigError::new(
                        "trainer.profiler",
                        what,
                        "use simple, advanced, pytorch or hpu",
                    ));
                }
            },
            Self::Class(ProfilerClass::SimpleProfiler(config)) => {
                Box::new(SimpleProfiler::new(config.clone()))
            }
            Self::Class(ProfilerClass::AdvancedProfiler(config)) => {
                Box::new(AdvancedProfiler::new(config.clone())?)
            }
            Self::Class(ProfilerClass::PyTorchProfiler(config)) => Box::new(PyTorchProfiler::new(config)?),
            Self::Class(ProfilerClass::HpuProfiler(config)) => Box::new(HpuProfiler::from_config(config)?),
        })
    }
}

conversions! { ProfilerConfig:
    &str => |name| Self::Name(name.to_owned()),
    SimpleProfilerConfig => |config| Self::Class(ProfilerClass::SimpleProfiler(config)),
    PyTorchProfilerConfig => |config| Self::Class(ProfilerClass::PyTorchProfiler(config)),
    AdvancedProfilerConfig => |config| Self::Class(ProfilerClass::AdvancedProfiler(config)),
    HpuProfilerConfig => |config| Self::Class(ProfilerClass::HpuProfiler(config)),
}
