//! The callbacks that can be named in YAML.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::callback::{
    BackboneFinetuning, BackboneFinetuningConfig, Callback, DeviceStatsMonitor, DeviceStatsMonitorConfig,
    EarlyStopping, EarlyStoppingConfig, EmaWeightAveragingConfig, GradientAccumulationScheduler,
    GradientAccumulationSchedulerConfig, LambdaCallback, LearningRateMonitor, LearningRateMonitorConfig,
    ModelCheckpoint, ModelCheckpointConfig, ModelSummary, ModelSummaryConfig, OnExceptionCheckpoint,
    OnExceptionCheckpointConfig, PredictionWriter, PredictionWriterConfig, ProgressBar, ProgressBarConfig,
    StochasticWeightAveraging, StochasticWeightAveragingConfig, ThroughputMonitor, ThroughputMonitorConfig,
    Timer, TimerConfig, WeightAveraging, WeightAveragingConfig,
};
use crate::config::conversions;
use crate::error::ConfigError;
use crate::trainer::config::searches::{BatchSizeFinderConfig, LearningRateFinderConfig};

/// A callback that can be named in YAML.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum CallbackConfig {
    /// Saves checkpoints.
    ModelCheckpoint(ModelCheckpointConfig),
    /// Ends training when a metric stops improving.
    EarlyStopping(EarlyStoppingConfig),
    /// Gives the loggers the learning rates.
    LearningRateMonitor(LearningRateMonitorConfig),
    /// Gives the loggers how fast training goes.
    ThroughputMonitor(ThroughputMonitorConfig),
    /// Ends training when its time is over.
    Timer(TimerConfig),
    /// Changes how many batches make an optimizer step as training proceeds.
    GradientAccumulationScheduler(GradientAccumulationSchedulerConfig),
    /// Freezes one module of the network, and trains it from an epoch on.
    BackboneFinetuning(BackboneFinetuningConfig),
    /// Keeps an equal average of the weights.
    WeightAveraging(WeightAveragingConfig),
    /// Keeps an exponential moving average of the weights.
    #[serde(rename = "EMAWeightAveraging")]
    EmaWeightAveraging(EmaWeightAveragingConfig),
    /// Averages the weights of the last epochs, trained at a learning rate of their own.
    StochasticWeightAveraging(StochasticWeightAveragingConfig),
    /// Saves a checkpoint when a run fails.
    OnExceptionCheckpoint(OnExceptionCheckpointConfig),
    /// Finds a learning rate before a fit that starts from the beginning, and uses it for all groups of parameters.
    LearningRateFinder(LearningRateFinderConfig),
    /// Shows how far the run is, as without it.
    #[serde(rename = "TQDMProgressBar")]
    #[schemars(extend("x-aliases" = ["RichProgressBar", "ProgressBar"]))]
    ProgressBar(ProgressBarConfig),
    /// Prints the module's layers before training.
    #[schemars(extend("x-aliases" = ["RichModelSummary"]))]
    ModelSummary(ModelSummaryConfig),
    /// Finds the largest batch size that memory has room for, before each fit that starts from the beginning and each evaluation, and
    /// uses it.
    BatchSizeFinder(BatchSizeFinderConfig),
    /// Writes predictions to files.
    PredictionWriter(PredictionWriterConfig),
    /// Gives the loggers what the device's memory is used for.
    DeviceStatsMonitor(DeviceStatsMonitorConfig),
}

conversions! { CallbackConfig:
    LearningRateFinderConfig => |config| Self::LearningRateFinder(config),
    BatchSizeFinderConfig => |config| Self::BatchSizeFinder(config),
}

impl CallbackConfig {
    /// Makes the callback. Searches for a learning rate or batch size are the trainer's part: they give one without hooks.
    pub(crate) fn build(self) -> Result<Box<dyn Callback>, ConfigError> {
        Ok(match self {
            Self::LearningRateFinder(_) | Self::BatchSizeFinder(_) => Box::new(LambdaCallback::new()),
            Self::ModelCheckpoint(config) => Box::new(ModelCheckpoint::new(config)?),
            Self::EarlyStopping(config) => Box::new(EarlyStopping::new(config)?),
            Self::LearningRateMonitor(config) => Box::new(LearningRateMonitor::from(config)),
            Self::ThroughputMonitor(config) => Box::new(ThroughputMonitor::new(config)?),
            Self::Timer(config) => Box::new(Timer::from_config(config)?),
            Self::GradientAccumulationScheduler(config) => {
                Box::new(GradientAccumulationScheduler::from_config(config)?)
            }
            Self::BackboneFinetuning(config) => Box::new(BackboneFinetuning::new(config)),
            Self::WeightAveraging(config) => Box::new(WeightAveraging::new(config)),
            Self::EmaWeightAveraging(config) => Box::new(WeightAveraging::ema(config)?),
            Self::StochasticWeightAveraging(config) => {
                Box::new(StochasticWeightAveraging::from_config(config)?)
            }
            Self::OnExceptionCheckpoint(config) => Box::new(OnExceptionCheckpoint::new(config)?),
            Self::ProgressBar(_) => Box::new(ProgressBar::default()),
            Self::ModelSummary(config) => Box::new(ModelSummary::new(config)?),
            Self::PredictionWriter(config) => Box::new(PredictionWriter::from(config)),
            Self::DeviceStatsMonitor(config) => Box::new(DeviceStatsMonitor::from(config)),
        })
    }
}

/// Whether a callback only shows something, which rank 0 may do alone.
pub(crate) fn is_display(callback: &dyn Callback) -> bool {
    is_a::<ProgressBar>(callback) || is_a::<ModelSummary>(callback)
}

/// Whether a callback is of this type.
pub(crate) fn is_a<T: Callback>(callback: &dyn Callback) -> bool {
    callback.type_name() == std::any::type_name::<T>()
}
