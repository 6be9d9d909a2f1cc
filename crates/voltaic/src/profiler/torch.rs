//! `PyTorchProfiler`: operators, as libtorch's own profiler records them.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::trace::{
    METRICS, ProfilerSchedule, SORT_KEYS, SortKey, TraceOptions, TraceProfiler, one_of, trace_config,
};
use crate::error::ConfigError;
use crate::ffi::KinetoOptions;

trace_config! {
    /// What [`PyTorchProfiler`] records and reports, and where.
    pub struct PyTorchProfilerConfig {
        export_to_html: false,
        record_module_names: true,
    }
}

/// Records operators of a few steps by libtorch's profiler (Kineto): a table of their times, and a Chrome trace for
/// chrome://tracing, Perfetto and TensorBoard's profile plugin. Source: Lightning's `PyTorchProfiler`.
pub type PyTorchProfiler = TraceProfiler<PyTorchProfilerConfig>;

impl PyTorchProfiler {
    /// Records as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] for a schedule that records nothing, or an unknown column.
    pub fn new(config: &PyTorchProfilerConfig) -> Result<Self, ConfigError> {
        config.trace_options(SortKey::Total).map(Self::recording)
    }
}
