//! Logs statistics of the device, above all the use of its memory.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cpu_stats::CpuStats;
use crate::device::Device;
use crate::lightning::Callback;
use crate::logger::DEVICE_STATS;
use crate::module::{Hook, HookContext};
use crate::nn::Module;

/// What [`DeviceStatsMonitor`] logs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceStatsMonitorConfig {
    /// Log the load of the host's cores and memory too: `true`, `false`, or null for only if the device is the cpu.
    pub cpu_stats: Option<bool>,
}

/// Logs statistics of the run's device before and after batches of training, validation and test.
///
/// Metrics are named `DeviceStatsMonitor.<hook>/<metric>`, such as `DeviceStatsMonitor.on_train_batch_end/InUse`. The
/// metrics are those of [`Accelerator::device_stats`](crate::accelerator::Accelerator::device_stats):
///
/// | metric | unit |
/// |---|---|
/// | `Limit`, `InUse`, `MaxInUse`, `MaxAllocSize` | bytes |
/// | `NumAllocs`, `NumFrees`, `ActiveAllocs`, `TotalSystemAllocs`, `TotalSystemFrees`, `TotalActiveAllocs` | counts |
/// | `cpu_percent`, `cpu_vm_percent`, `cpu_swap_percent`, as `cpu_stats` says | percent of the whole machine |
///
/// They are logged at training steps at which the loggers are due (`log_every_n_steps`), and at the last batch of each
/// evaluation; see [`HookContext::log_step`]. [`CsvLogger`](crate::logger::CsvLogger) draws `InUse` and `MaxInUse` to
/// `memory.png`. A run without logger refuses the callback. If the device cannot be asked, a warning says so once, and
/// the run continues.
///
/// Source: Lightning's `DeviceStatsMonitor`, which logs every `log_every_n_steps`-th batch of an evaluation, all at the
/// same step, and with `cpu_stats=False` nothing at all on the cpu, where this leaves the memory's metrics.
#[derive(Debug, Default)]
pub struct DeviceStatsMonitor {
    config: DeviceStatsMonitorConfig,
    /// There while CPU metrics are logged.
    cpu: Option<CpuStats>,
    has_warned: bool,
}

impl From<DeviceStatsMonitorConfig> for DeviceStatsMonitor {
    fn from(config: DeviceStatsMonitorConfig) -> Self {
        Self { config, ..Self::default() }
    }
}

impl DeviceStatsMonitor {
    /// Logs the device's metrics, on the cpu also the load of the host.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the load of the host is logged, whatever the device.
    #[must_use]
    pub fn cpu_stats(mut self, cpu_stats: bool) -> Self {
        self.config.cpu_stats = Some(cpu_stats);
        self
    }

    /// Starts to measure the load of the host, if `cpu_stats` asks for it.
    fn start(&mut self, ctx: &HookContext) {
        let wants_cpu = self.config.cpu_stats.unwrap_or(ctx.device() == Device::Cpu);
        if wants_cpu && self.cpu.is_none() {
            self.cpu = Some(CpuStats::new());
        }
    }

    fn log(&mut self, hook: &str, ctx: &mut HookContext) {
        let Some(step) = ctx.log_step() else { return };
        let of_device = ctx.device_stats().unwrap_or_else(|error| {
            if !self.has_warned {
                tracing::warn!("DeviceStatsMonitor logs nothing of {}: {error}", ctx.device());
                self.has_warned = true;
            }
            Vec::new()
        });
        let of_cpu = self.cpu.as_mut().map(CpuStats::read);
        let stats = of_device.into_iter().chain(of_cpu.into_iter().flatten());
        let metrics: Vec<_> =
            stats.map(|(name, value)| (format!("{DEVICE_STATS}{hook}/{name}"), value)).collect();
        if !metrics.is_empty() {
            ctx.log_metrics(metrics, step);
        }
    }
}

impl Callback for DeviceStatsMonitor {
    fn needs_logger(&self) -> bool {
        true
    }

    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        match hook {
            Hook::OnFitStart | Hook::OnValidationStart | Hook::OnTestStart => self.start(ctx),
            Hook::OnTrainBatchStart
            | Hook::OnTrainBatchEnd
            | Hook::OnValidationBatchStart
            | Hook::OnValidationBatchEnd
            | Hook::OnTestBatchStart
            | Hook::OnTestBatchEnd => self.log(hook.name(), ctx),
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::accelerator::CudaAccelerator;
    use crate::module::{BatchFacts, Hardware, Logging, Position, Requests, RunFacts, Training};

    /// What is logged in a hook of a run on a GPU, whose memory is not measured.
    fn rows_on_a_gpu(monitor: &mut DeviceStatsMonitor, log_step: Option<u64>) -> Vec<(Vec<String>, u64)> {
        let hardware = Hardware { accelerator: Arc::new(CudaAccelerator), device: Device::Cuda(0) };
        let mut log = Logging::default();
        let mut ctx = HookContext {
            at: &mut Position::default(),
            run: &RunFacts { hardware, ..RunFacts::default() },
            of_batch: &BatchFacts { log_step, ..BatchFacts::default() },
            log: &mut log,
            requests: &mut Requests::default(),
            training: &mut Training::default(),
            batch: None,
        };
        monitor.start(&ctx);
        monitor.log("on_train_batch_end", &mut ctx);
        let names = |metrics: Vec<(String, f64)>| metrics.into_iter().map(|(name, _)| name).collect();
        log.rows.into_iter().map(|(metrics, step)| (names(metrics), step)).collect()
    }

    #[test]
    fn a_device_that_cannot_be_asked_leaves_what_can() {
        let mut monitor = DeviceStatsMonitor::new();
        assert_eq!(rows_on_a_gpu(&mut monitor, Some(7)), []);
        assert!(monitor.has_warned);
        let names = ["cpu_percent", "cpu_vm_percent", "cpu_swap_percent"]
            .map(|name| format!("DeviceStatsMonitor.on_train_batch_end/{name}"));
        let mut monitor = DeviceStatsMonitor::new().cpu_stats(true);
        assert_eq!(rows_on_a_gpu(&mut monitor, Some(7)), [(names.to_vec(), 7)]);
        assert!(monitor.has_warned);
    }

    #[test]
    fn nothing_is_asked_when_the_loggers_are_not_due() {
        let mut monitor = DeviceStatsMonitor::new().cpu_stats(true);
        assert_eq!(rows_on_a_gpu(&mut monitor, None), []);
        assert!(!monitor.has_warned);
    }
}
