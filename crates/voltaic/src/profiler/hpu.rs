//! `HPUProfiler`: operators, and what HPUs do for them.

use std::env;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::profiler::{ProfiledRun, Profiler};
use super::torch::PyTorchProfilerConfig;
use super::trace::{Handle, ProfiledRange, ProfilerSchedule, SortKey, TraceOptions, Tracer};
use crate::error::{ConfigError, ProfilerError, Result};

/// The variable of Habana's own profiler, and the only value that goes with this one.
const VARIABLE: (&str, &str) = ("HABANA_PROFILE", "profile_api_light");

/// What [`HpuProfiler`] records and reports, and where: the arguments of lightning-Habana's `HPUProfiler`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HpuProfilerConfig {
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
    /// By what the rows are sorted: on HPUs `hpu_time_total` unless set, else `cpu_time_total`; or `self_hpu_time_total`,
    /// `hpu_time`, `hpu_memory_usage`, `self_hpu_memory_usage`, the same of `cpu`, or `count`.
    pub sort_by_key: Option<String>,
    /// Record each call of a module, as `[module]Linear: fc1`.
    pub record_module_names: bool,
    /// Which steps are recorded.
    pub schedule: Option<ProfilerSchedule>,
    /// What is recorded: the host's operators, what HPUs do, or both.
    pub activities: Vec<ProfilerActivity>,
    /// Record the shapes of inputs.
    pub record_shapes: bool,
    /// Count floating point operations of products and convolutions. Shapes are recorded then.
    pub with_flops: bool,
    /// Record memory: each change as an event of the trace, and by operator in the table. How much is in use on HPUs is in
    /// a trace also without this.
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

/// What a profiler records (`torch.profiler.ProfilerActivity`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ProfilerActivity {
    /// Operators on the host.
    #[serde(rename = "CPU", alias = "cpu")]
    Cpu,
    /// What HPUs do.
    #[serde(rename = "HPU", alias = "hpu")]
    Hpu,
}

impl Default for HpuProfilerConfig {
    fn default() -> Self {
        let PyTorchProfilerConfig { export_to_chrome, row_limit, metric, .. } =
            PyTorchProfilerConfig::default();
        Self {
            dirpath: None,
            filename: None,
            group_by_input_shapes: false,
            export_to_chrome,
            export_to_html: true,
            row_limit,
            sort_by_key: None,
            record_module_names: false,
            schedule: None,
            activities: vec![ProfilerActivity::Cpu, ProfilerActivity::Hpu],
            record_shapes: false,
            with_flops: false,
            profile_memory: false,
            with_modules: false,
            with_stack: false,
            export_to_flame_graph: false,
            metric,
        }
    }
}

impl HpuProfilerConfig {
    fn options(&self) -> Result<TraceOptions, ConfigError> {
        let has = |activity| self.activities.contains(&activity);
        if self.activities.is_empty() {
            let fix = "name CPU, HPU or both";
            return Err(ConfigError::new(
                "trainer.profiler.activities",
                "an empty list records nothing",
                fix,
            ));
        }
        let config = self.clone();
        let common = PyTorchProfilerConfig {
            dirpath: config.dirpath,
            filename: config.filename,
            group_by_input_shapes: config.group_by_input_shapes,
            export_to_chrome: config.export_to_chrome,
            export_to_html: config.export_to_html,
            row_limit: config.row_limit,
            sort_by_key: config.sort_by_key,
            record_module_names: config.record_module_names,
            schedule: config.schedule,
            record_shapes: config.record_shapes,
            with_flops: config.with_flops,
            profile_memory: config.profile_memory,
            with_modules: config.with_modules,
            with_stack: config.with_stack,
            export_to_flame_graph: config.export_to_flame_graph,
            metric: config.metric,
        };
        let mut options = common.options()?;
        options.kineto.without_operators = !has(ProfilerActivity::Cpu);
        options.records_devices = has(ProfilerActivity::Hpu);
        options.is_for_hpus = true;
        if self.sort_by_key.is_none() {
            options.sort_key = SortKey::DeviceTotal; // which is the host's time where there is no device
        }
        Ok(options)
    }
}

/// Records operators of a few steps, and what HPUs do for them: kernels, copies, graphs, collectives and memory, in rows of
/// their own with arrows from the operator that asked for it. Writes a Chrome trace for chrome://tracing, Perfetto and
/// TensorBoard's profile plugin, and a table. On other accelerators only the host is recorded, and on Gaudi cards, too: see
/// `docs/profilers.md`. Source: lightning-Habana's `HPUProfiler`.
///
/// It is a handle: a clone of it records ranges of your own wherever the module keeps it.
#[derive(Debug, Clone)]
pub struct HpuProfiler {
    handle: Handle,
}

impl HpuProfiler {
    /// Records as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] for a schedule that records nothing, or an unknown column;
    /// [`ProfilerError::HabanaProfile`] if `HABANA_PROFILE` is set to something else than `profile_api_light`.
    pub fn new(config: &HpuProfilerConfig) -> Result<Self> {
        check_variable(env::var_os(VARIABLE.0).map(|value| value.to_string_lossy().into_owned()))?;
        Ok(Self { handle: Handle::new(Tracer::new(config.options()?)) })
    }

    /// As [`HpuProfiler::new`], whose errors are those of the configuration.
    pub(super) fn from_config(config: &HpuProfilerConfig) -> Result<Self, ConfigError> {
        let options = config.options()?;
        check_variable(env::var_os(VARIABLE.0).map(|value| value.to_string_lossy().into_owned()))
            .map_err(|error| ConfigError::new("trainer.profiler", error.what(), error.remedy()))?;
        Ok(Self { handle: Handle::new(Tracer::new(options)) })
    }

    /// A range of this name, which ends when the guard goes out of scope; ranges are nested.
    ///
    /// # Errors
    /// [`ProfilerError`] if one of this name is running on this thread.
    pub fn profile(&self, name: &str) -> Result<ProfiledRange> {
        self.handle.profile(name)
    }

    /// Begins a range of this name, which [`HpuProfiler::stop`] ends on the same thread.
    ///
    /// # Errors
    /// [`ProfilerError`] if one of this name is running on this thread.
    pub fn start(&self, name: &str) -> Result<()> {
        self.handle.lock().start(name)
    }

    /// Ends a range.
    ///
    /// # Errors
    /// [`ProfilerError`] if none of this name is running on this thread.
    pub fn stop(&self, name: &str) -> Result<()> {
        self.handle.lock().stop(name)
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

fn check_variable(value: Option<String>) -> Result<(), ProfilerError> {
    match value {
        Some(value) if value != VARIABLE.1 => Err(ProfilerError::HabanaProfile { value }),
        _ => Ok(()),
    }
}

impl Profiler for HpuProfiler {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_of_habanas_profiler_must_not_ask_for_another() {
        for value in [None, Some("profile_api_light".to_owned())] {
            check_variable(value).unwrap();
        }
        for value in ["", "1", "profile_api"] {
            let error = check_variable(Some(value.to_owned())).unwrap_err().to_string();
            let expected = "`HABANA_PROFILE` should not be set when using `HPUProfiler`";
            assert!(error.contains(expected) && error.contains(&format!("is `{value}`")), "{error}");
        }
    }
}
