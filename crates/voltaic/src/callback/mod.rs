//! Code that runs at points of a run without being part of the model.
//!
//! A callback sees a [`HookContext`](crate::module::HookContext) and the module's tree, never the trainer; it acts through the context
//! (`log`, `log_metrics`, `request_stop`, `request_checkpoint`).

mod backbone_finetuning;
mod claims;
mod cpu_stats;
mod device_stats_monitor;
mod early_stopping;
mod file_name;
mod gradient_accumulation_scheduler;
mod lambda_callback;
mod learning_rate_monitor;
mod masters;
mod model_checkpoint;
mod model_summary;
mod on_exception_checkpoint;
mod prediction_writer;
mod progress_bar;
mod stochastic_weight_averaging;
mod throughput_monitor;
mod time_span;
mod timer;
mod weight_averaging;

pub use crate::module::Callback;
pub use backbone_finetuning::{BackboneFinetuning, BackboneFinetuningConfig};
pub use device_stats_monitor::{DeviceStatsMonitor, DeviceStatsMonitorConfig};
pub use early_stopping::{EarlyStopping, EarlyStoppingConfig, StoppingReason};
pub use gradient_accumulation_scheduler::{
    GradientAccumulationScheduler, GradientAccumulationSchedulerConfig,
};
pub use lambda_callback::LambdaCallback;
pub use learning_rate_monitor::{LearningRateMonitor, LearningRateMonitorConfig};
pub use model_checkpoint::{LinkText, Mode, ModelCheckpoint, ModelCheckpointConfig, SaveLast};
pub(crate) use model_summary::watch_sizes;
pub use model_summary::{ModelSummary, ModelSummaryConfig};
pub use on_exception_checkpoint::{OnExceptionCheckpoint, OnExceptionCheckpointConfig};
pub use prediction_writer::{
    PredictedBatch, PredictionWriter, PredictionWriterConfig, WriteInterval, WritePredictions,
};
pub use progress_bar::{ProgressBar, ProgressBarConfig};
pub(crate) use stochastic_weight_averaging::SWA_FILE;
pub use stochastic_weight_averaging::{
    EpochStart, StochasticWeightAveraging, StochasticWeightAveragingConfig,
};
pub use throughput_monitor::{ThroughputMonitor, ThroughputMonitorConfig};
pub use time_span::{TimeParts, TimeSpan};
pub use timer::{Timer, TimerConfig};
pub use weight_averaging::{EmaWeightAveragingConfig, WeightAveraging, WeightAveragingConfig};
