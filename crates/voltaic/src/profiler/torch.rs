//! `PyTorchProfiler`: operators, as libtorch's own profiler records them.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::profiler::{ProfiledRun, Profiler};
use super::trace::{
    Handle, METRICS, ProfiledRange, ProfilerSchedule, SORT_KEYS, SortKey, TraceOptions, Tracer,
};
use crate::error::{ConfigError, Result};
use crate::ffi::KinetoOptions;

/// What [`PyTorchProfiler`] records and reports, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PyTorchProfilerConfig {
    /// Folder of traces and reports; that of the run unless set.
    pub dirpath: Option<PathBuf>,
    /// Write the table to `<stage>-<filename>.txt`, with `-<rank>` if there are several ranks. Without this and `dirpath` rank 0
    /// prints it.
    pub filename: Option<String>,
    /// A row for each operator and shape of its inputs. Shapes are recorded then.
    pub group_by_input_shapes: bool,
    /// Write a Chrome trace for each window of steps.
    pub export_to_chrome: bool,
    /// Write a page for each window of steps, one HTML file for any browser: timeline, flame graph, memory, table.
    pub export_to_html: bool,
    /// Rows of the table; all if null.
    pub row_limit: Option<usize>,
    /// By what the rows are sorted: `cpu_time_total` unless set, `self_cpu_time_total`, `cpu_time`, `cpu_memory_usage`,
    /// `self_cpu_memory_usage`, the same of `hpu`, or `count`.
    pub sort_by_key: Option<String>,
    /// Record each call of a module, as `[module]Linear: fc1`.
    pub record_module_names: bool,
    /// Which steps are recorded.
    pub schedule: Option<ProfilerSchedule>,
    /// Record the shapes of inputs.
    pub record_shapes: bool,
    /// Count floating point operations of products and convolutions. Shapes are recorded then.
    pub with_flops: bool,
    /// Record memory: each change as an event of the trace, and by operator in the table.
    pub profile_memory: bool,
    /// As `record_module_names`.
    pub with_modules: bool,
    /// Without effect: there are no Python functions. A flame graph shows ranges, modules and operators.
    pub with_stack: bool,
    /// Write the stacks of a flame graph beside each trace, for `flamegraph.pl`, inferno or speedscope.
    pub export_to_flame_graph: bool,
    /// What a flame graph shows: `self_cpu_time_total` or `self_hpu_time_total`.
    pub metric: String,
}

impl Default for PyTorchProfilerConfig {
    fn default() -> Self {
        Self {
            dirpath: None,
            filename: None,
            group_by_input_shapes: false,
            export_to_chrome: true,
            export_to_html: false,
            row_limit: Some(20),
            sort_by_key: None,
            record_module_names: true,
            schedule: None,
            record_shapes: false,
            with_flops: false,
            profile_memory: false,
            with_modules: false,
            with_stack: false,
            export_to_flame_graph: false,
            metric: "self_cpu_time_total".to_owned(),
        }
    }
}

impl PyTorchProfilerConfig {
    pub(super) fn options(&self) -> Result<TraceOptions, ConfigError> {
        if let Some(schedule) = self.schedule {
            schedule.check()?;
        }
        Ok(TraceOptions {
            dirpath: self.dirpath.clone(),
            filename: self.filename.clone(),
            schedule: self.schedule,
            kineto: KinetoOptions {
                record_shapes: self.record_shapes || self.group_by_input_shapes || self.with_flops,
                with_flops: self.with_flops,
                all_threads: true,
                ..KinetoOptions::default()
            },
            group_by_input_shapes: self.group_by_input_shapes,
            export_to_chrome: self.export_to_chrome,
            export_to_html: self.export_to_html,
            row_limit: self.row_limit,
            sort_key: one_of(
                "sort_by_key",
                self.sort_by_key.as_deref(),
                "a column of the table",
                &SORT_KEYS,
            )?
            .unwrap_or(SortKey::Total),
            record_module_names: self.record_module_names || self.with_modules,
            profile_memory: self.profile_memory,
            records_devices: true,
            flame_graph: one_of("metric", Some(&self.metric), "a time that a flame graph shows", &METRICS)?
                .filter(|_| self.export_to_flame_graph),
            says_stacks_are_none: self.with_stack,
            is_for_hpus: false,
        })
    }
}

/// The value of a key that takes one of some names.
fn one_of<T: Copy>(
    key: &str,
    name: Option<&str>,
    what: &str,
    known: &[(&str, T)],
) -> Result<Option<T>, ConfigError> {
    let Some(name) = name else { return Ok(None) };
    if let Some((_, value)) = known.iter().find(|(known, _)| *known == name) {
        return Ok(Some(*value));
    }
    let names = known.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
    let (key, what) = (format!("trainer.profiler.{key}"), format!("`{name}` is not {what}"));
    Err(ConfigError::new(&key, what, format!("use one of {names}")))
}

/// Records operators of a few steps by libtorch's profiler (Kineto): a table of their times, and a Chrome trace for
/// chrome://tracing, Perfetto and TensorBoard's profile plugin. Source: Lightning's `PyTorchProfiler`.
///
/// It is a handle: a clone of it records ranges of your own wherever the module keeps it.
#[derive(Debug, Clone)]
pub struct PyTorchProfiler {
    handle: Handle,
}

impl PyTorchProfiler {
    /// Records as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] for a schedule that records nothing, or an unknown column.
    pub fn new(config: &PyTorchProfilerConfig) -> Result<Self, ConfigError> {
        Ok(Self { handle: Handle::new(Tracer::new(config.options()?)) })
    }

    /// A range of this name, which ends when the guard goes out of scope; ranges are nested.
    ///
    /// # Errors
    /// [`ProfilerError`](crate::error::ProfilerError) if one of this name is running on this thread.
    pub fn profile(&self, name: &str) -> Result<ProfiledRange> {
        self.handle.profile(name)
    }

    /// The traces that were written, the oldest first.
    pub fn traces(&self) -> Vec<PathBuf> {
        self.handle.traces()
    }

    /// Calls this with the path of each trace once it is written (`on_trace_ready` of torch).
    #[must_use]
    pub fn on_trace_ready(self, call: impl FnMut(&Path) + Send + 'static) -> Self {
        self.handle.lock().on_trace_ready(call);
        self
    }
}

impl Profiler for PyTorchProfiler {
    fn setup(&mut self, run: &ProfiledRun) -> Result<()> {
        self.handle.lock().setup(run)
    }

    fn records_modules(&self) -> bool {
        self.handle.lock().records_modules()
    }

    fn start(&mut self, action: &str) -> Result<()> {
        self.handle.lock().start(action)
    }

    fn stop(&mut self, action: &str) -> Result<()> {
        self.handle.lock().stop(action)
    }

    fn summary(&self) -> String {
        self.handle.lock().summary()
    }

    fn describe(&mut self) -> Result<()> {
        self.handle.lock().describe()
    }
}
