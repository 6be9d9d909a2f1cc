//! The `profiler` key.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::advanced::{AdvancedProfiler, AdvancedProfilerConfig};
use super::profiler::Profiler;
use super::simple::{SimpleProfiler, SimpleProfilerConfig};
use crate::error::ConfigError;

/// A profiler by name, or by class with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ProfilerConfig {
    /// `simple` or `advanced`.
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
                _ => {
                    let what = format!("there is no profiler `{name}`");
                    return Err(ConfigError::new("trainer.profiler", what, "use simple or advanced"));
                }
            },
            Self::Class(ProfilerClass::SimpleProfiler(config)) => {
                Box::new(SimpleProfiler::new(config.clone()))
            }
            Self::Class(ProfilerClass::AdvancedProfiler(config)) => {
                Box::new(AdvancedProfiler::new(config.clone())?)
            }
        })
    }
}

impl From<&str> for ProfilerConfig {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl From<SimpleProfilerConfig> for ProfilerConfig {
    fn from(config: SimpleProfilerConfig) -> Self {
        Self::Class(ProfilerClass::SimpleProfiler(config))
    }
}

impl From<AdvancedProfilerConfig> for ProfilerConfig {
    fn from(config: AdvancedProfilerConfig) -> Self {
        Self::Class(ProfilerClass::AdvancedProfiler(config))
    }
}
