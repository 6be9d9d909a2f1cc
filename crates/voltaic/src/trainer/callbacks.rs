//! The callbacks that can be named in YAML.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::callback::{
    Callback, DeviceStatsMonitor, DeviceStatsMonitorConfig, EarlyStopping, EarlyStoppingConfig,
    LearningRateMonitor, LearningRateMonitorConfig, ModelCheckpoint, ModelCheckpointConfig,
    ThroughputMonitor, ThroughputMonitorConfig, Timer, TimerConfig,
};
use crate::error::ConfigError;

/// A callback that can be named in YAML.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum CallbackConfig {
    /// Saves checkpoints.
    ModelCheckpoint(ModelCheckpointConfig),
    /// Ends training when a metric stops to improve.
    EarlyStopping(EarlyStoppingConfig),
    /// Gives the loggers the learning rates.
    LearningRateMonitor(LearningRateMonitorConfig),
    /// Gives the loggers how fast training goes.
    ThroughputMonitor(ThroughputMonitorConfig),
    /// Ends training when its time is over.
    Timer(TimerConfig),
    /// Gives the loggers what the device's memory is used for.
    DeviceStatsMonitor(DeviceStatsMonitorConfig),
}

impl CallbackConfig {
    /// Makes the callback.
    pub(super) fn build(self) -> Result<Box<dyn Callback>, ConfigError> {
        Ok(match self {
            Self::ModelCheckpoint(config) => Box::new(ModelCheckpoint::new(config)?),
            Self::EarlyStopping(config) => Box::new(EarlyStopping::new(config)?),
            Self::LearningRateMonitor(config) => Box::new(LearningRateMonitor::from(config)),
            Self::ThroughputMonitor(config) => Box::new(ThroughputMonitor::new(config)?),
            Self::Timer(config) => Box::new(Timer::from_config(config)?),
            Self::DeviceStatsMonitor(config) => Box::new(DeviceStatsMonitor::from(config)),
        })
    }
}
