//! `HPUProfiler`: operators, and what HPUs do for them.

use std::env;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::trace::{
    METRICS, ProfilerSchedule, SORT_KEYS, SortKey, TraceOptions, TraceProfiler, one_of, trace_config,
};
use crate::error::{ConfigError, ProfilerError, Result};
use crate::ffi::KinetoOptions;

/// The variable of Habana's own profiler, and the only value that goes with this one.
const VARIABLE: (&str, &str) = ("HABANA_PROFILE", "profile_api_light");

trace_config! {
    /// What [`HpuProfiler`] records and reports, and where: the arguments of lightning-Habana's `HPUProfiler`.
    pub struct HpuProfilerConfig {
        export_to_html: true,
        record_module_names: false,
        /// What is recorded: the host's operators, what HPUs do, or both.
        pub activities: Vec<ProfilerActivity> = vec![ProfilerActivity::Cpu, ProfilerActivity::Hpu],
    }
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

impl HpuProfilerConfig {
    fn options(&self) -> Result<TraceOptions, ConfigError> {
        let has = |activity| self.activities.contains(&activity);
        if self.activities.is_empty() {
            let what = "an empty list records nothing";
            return Err(ConfigError::new("trainer.profiler.activities", what, "name CPU, HPU or both"));
        }
        // the device's time is the host's where there is no device
        let mut options = self.trace_options(SortKey::DeviceTotal)?;
        options.kineto.without_operators = !has(ProfilerActivity::Cpu);
        options.records_devices = has(ProfilerActivity::Hpu);
        options.is_for_hpus = true;
        Ok(options)
    }
}

/// Records operators of a few steps, and what HPUs do for them: kernels, copies, graphs, collectives and memory, in rows of
/// their own with arrows from the operator that asked for it. Writes a Chrome trace for chrome://tracing, Perfetto and
/// TensorBoard's profile plugin, and a table. On other accelerators only the host is recorded, and on Gaudi cards, too: see
/// `docs/profilers.md`. Source: lightning-Habana's `HPUProfiler`.
pub type HpuProfiler = TraceProfiler<HpuProfilerConfig>;

impl HpuProfiler {
    /// Records as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] for a schedule that records nothing, or an unknown column;
    /// [`ProfilerError::HabanaProfile`] if `HABANA_PROFILE` is set to something else than `profile_api_light`.
    pub fn new(config: &HpuProfilerConfig) -> Result<Self> {
        check_variable(env::var_os(VARIABLE.0).map(|value| value.to_string_lossy().into_owned()))?;
        Ok(Self::recording(config.options()?))
    }

    /// As [`HpuProfiler::new`], whose errors are those of the configuration.
    pub(super) fn from_config(config: &HpuProfilerConfig) -> Result<Self, ConfigError> {
        let options = config.options()?;
        check_variable(env::var_os(VARIABLE.0).map(|value| value.to_string_lossy().into_owned()))
            .map_err(|error| ConfigError::new("trainer.profiler", error.what(), error.remedy()))?;
        Ok(Self::recording(options))
    }
}

fn check_variable(value: Option<String>) -> Result<(), ProfilerError> {
    match value {
        Some(value) if value != VARIABLE.1 => Err(ProfilerError::HabanaProfile { value }),
        _ => Ok(()),
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
