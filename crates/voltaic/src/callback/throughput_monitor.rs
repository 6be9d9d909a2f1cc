//! Gives the loggers how fast training goes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Callback;
use crate::error::ConfigError;
use crate::module::HookContext;
use crate::nn::Module;

/// What [`ThroughputMonitor`] counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ThroughputMonitorConfig {
    /// Samples of a training batch; those of the data loader unless set.
    pub batch_size: Option<u64>,
    /// Items of a sample, such as tokens of a sequence; adds `items_per_sec`.
    pub length: Option<u64>,
    /// Floating-point operations of a training batch on this device, forward and backward; adds `flops_per_sec`.
    pub flops_per_batch: Option<f64>,
    /// Operations per second that the device is capable of; with `flops_per_batch` adds `mfu`, the part that is used.
    pub available_flops: Option<f64>,
    /// Batches that a rate is measured over; there is none before so many are done.
    #[schemars(range(min = 2))]
    pub window_size: usize,
    /// What stands between the parts of a name.
    pub separator: String,
}

impl Default for ThroughputMonitorConfig {
    fn default() -> Self {
        Self {
            batch_size: None,
            length: None,
            flops_per_batch: None,
            available_flops: None,
            window_size: 100,
            separator: "/".to_owned(),
        }
    }
}

/// Gives the loggers, with each of their rows of training, `train/time` (seconds of training without validation),
/// `train/batches`, `train/samples`, and over a window of batches `train/device/batches_per_sec`, `samples_per_sec`,
/// `items_per_sec`, `flops_per_sec` and `mfu`. Counts begin anew with each fit. Source: Lightning's `ThroughputMonitor`.
///
/// Time is the host's: on a device that works asynchronously a rate is right over a window, not for one batch.
#[derive(Debug)]
pub struct ThroughputMonitor {
    config: ThroughputMonitorConfig,
    started: Option<Instant>,
    /// Time of validations since the start.
    paused: Duration,
    validation_started: Option<Instant>,
    batches: u64,
    /// Seconds of training when each of the last batches was done.
    times: VecDeque<f64>,
}

impl ThroughputMonitor {
    /// Counts as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] if the window is too short, or a number of operations is not positive.
    pub fn new(config: ThroughputMonitorConfig) -> Result<Self, ConfigError> {
        let refuse = |key: &str, what: String, remedy: &str| {
            Err(ConfigError::new(format!("ThroughputMonitor.{key}"), what, remedy))
        };
        if config.window_size < 2 {
            return refuse(
                "window_size",
                format!("{} batches take no time", config.window_size),
                "use 2 or more",
            );
        }
        for (key, flops) in
            [("flops_per_batch", config.flops_per_batch), ("available_flops", config.available_flops)]
        {
            if let Some(flops) = flops.filter(|flops| !flops.is_finite() || *flops <= 0.0) {
                return refuse(key, format!("{flops} operations"), "use a positive number");
            }
        }
        if config.available_flops.is_some() && config.flops_per_batch.is_none() {
            return refuse("available_flops", "set without flops_per_batch".to_owned(), "set both");
        }
        Ok(Self {
            config,
            started: None,
            paused: Duration::ZERO,
            validation_started: None,
            batches: 0,
            times: VecDeque::new(),
        })
    }

    /// Counts a batch that was done after so many seconds of training.
    fn count(&mut self, seconds: f64) {
        self.batches += 1;
        if self.times.len() == self.config.window_size {
            self.times.pop_front();
        }
        self.times.push_back(seconds);
    }

    /// Names and values of a row.
    fn row(&self, batch_size: Option<u64>) -> Vec<(String, f64)> {
        let Self { config, batches, times, .. } = self;
        let separator = &config.separator;
        let mut row = Vec::new();
        let mut add = |name: &str, value: f64| row.push((format!("train{separator}{name}"), value));
        add("time", times.back().copied().unwrap_or(0.0));
        add("batches", *batches as f64);
        let size = batch_size.map(|size| size as f64);
        let length = config.length.zip(size).map(|(length, size)| length as f64 * size);
        size.into_iter().for_each(|size| add("samples", size * *batches as f64));
        length.into_iter().for_each(|length| add("lengths", length * *batches as f64));
        let (Some(first), Some(last)) = (times.front(), times.back()) else { return row };
        if times.len() < config.window_size || last <= first {
            return row;
        }
        let rate = (times.len() - 1) as f64 / (last - first);
        let mut add = |name: &str, value: f64| add(&format!("device{separator}{name}"), value);
        add("batches_per_sec", rate);
        size.into_iter().for_each(|size| add("samples_per_sec", size * rate));
        length.into_iter().for_each(|length| add("items_per_sec", length * rate));
        if let Some(flops) = config.flops_per_batch {
            add("flops_per_sec", flops * rate);
            config.available_flops.into_iter().for_each(|available| add("mfu", flops * rate / available));
        }
        row
    }
}

impl Callback for ThroughputMonitor {
    fn needs_logger(&self) -> bool {
        true
    }

    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let has_size = self.config.batch_size.is_some() || ctx.facts().train_batch_size.is_some();
        anyhow::ensure!(
            has_size || self.config.length.is_none(),
            "items cannot be counted, since the loader does not tell its batch size; set ThroughputMonitor.batch_size"
        );
        *self = Self::new(self.config.clone())?;
        self.started = Some(Instant::now());
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let elapsed = self.started.map(|started| started.elapsed()).unwrap_or_default();
        self.count(elapsed.saturating_sub(self.paused).as_secs_f64());
        if let Some(step) = ctx.log_step() {
            let batch_size = self.config.batch_size.or(ctx.facts().train_batch_size.map(|size| size as u64));
            ctx.log_metrics(self.row(batch_size), step);
        }
        Ok(())
    }

    fn on_validation_start(
        &mut self,
        _ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.validation_started = Some(Instant::now());
        Ok(())
    }

    fn on_validation_end(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.paused += self.validation_started.take().map(|started| started.elapsed()).unwrap_or_default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_a_full_window() {
        let config = ThroughputMonitorConfig {
            length: Some(8),
            flops_per_batch: Some(1e9),
            available_flops: Some(1e10),
            window_size: 3,
            ..Default::default()
        };
        let mut monitor = ThroughputMonitor::new(config).expect("valid");
        let mut rows = Vec::new();
        for seconds in [1.0, 2.0, 2.5, 3.0] {
            monitor.count(seconds);
            rows.push(monitor.row(Some(4)));
        }
        let named = |names: &[(&str, f64)]| -> Vec<(String, f64)> {
            names.iter().map(|(name, value)| (format!("train/{name}"), *value)).collect()
        };
        let counts = named(&[("time", 2.0), ("batches", 2.0), ("samples", 8.0), ("lengths", 64.0)]);
        assert_eq!(rows[1], counts, "two batches are no window of three");
        let expected = named(&[
            ("time", 3.0),
            ("batches", 4.0),
            ("samples", 16.0),
            ("lengths", 128.0),
            ("device/batches_per_sec", 2.0),
            ("device/samples_per_sec", 8.0),
            ("device/items_per_sec", 64.0),
            ("device/flops_per_sec", 2e9),
            ("device/mfu", 0.2),
        ]);
        assert_eq!(rows[3], expected);
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let default = ThroughputMonitorConfig::default;
        for (config, key) in [
            (ThroughputMonitorConfig { window_size: 1, ..default() }, "window_size"),
            (ThroughputMonitorConfig { flops_per_batch: Some(0.0), ..default() }, "flops_per_batch"),
            (ThroughputMonitorConfig { available_flops: Some(1.0), ..default() }, "available_flops"),
        ] {
            let error = ThroughputMonitor::new(config).expect_err(key).to_string();
            assert!(error.contains(&format!("ThroughputMonitor.{key}")), "{error}");
        }
    }
}
