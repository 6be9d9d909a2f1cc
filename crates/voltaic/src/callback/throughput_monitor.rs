//! Gives the loggers how fast training goes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use crate::error::ConfigError;
use crate::lightning::Callback;
use crate::module::{Hook, HookContext};
use crate::nn::Module;

/// What [`ThroughputMonitor`] counts.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ThroughputMonitorConfig {
    /// Samples of a training batch; those of the data loader unless set.
    pub batch_size: Option<u64>,
    /// Items of a sample, such as tokens of a sequence; adds `items_per_sec`.
    pub length: Option<u64>,
    /// Floating-point operations of a training batch on this device, forward and backward; adds `flops_per_sec`. Those that
    /// ModelSummary has counted unless set.
    pub flops_per_batch: Option<f64>,
    /// Operations per second that the device is capable of; with those of a batch adds `mfu`, the part that is used.
    pub available_flops: Option<f64>,
    /// Batches that a rate is measured over; there is none before so many are done.
    #[schemars(range(min = 2))]
    #[default(100)]
    pub window_size: usize,
    /// What stands between the parts of a name.
    #[default("/".to_owned())]
    pub separator: String,
}

/// Gives the loggers, with each of their rows of training, `train/time` (seconds of training without validation),
/// `train/batches`, `train/samples`, and over a window of batches `train/device/batches_per_sec`, `samples_per_sec`,
/// `items_per_sec`, `flops_per_sec` and `mfu`; with several ranks also `train/batches_per_sec` and so on of all of them.
/// The same of each validation (`validate/..`), test and prediction when it is over, in one row. Counts start again with
/// each fit and each evaluation. Source: Lightning's `ThroughputMonitor`.
///
/// Time is the host's: on a device that works asynchronously a rate is right over a window, not for one batch.
/// `flops_per_batch` is of training, and so is what follows from it.
#[derive(Debug)]
pub struct ThroughputMonitor {
    config: ThroughputMonitorConfig,
    /// Operations of a training batch.
    flops: Option<f64>,
    training: Counter,
    evaluation: Counter,
}

/// Batches of one stage.
#[derive(Debug, Default)]
struct Counter {
    started: Option<Instant>,
    /// Time of validations since the start.
    paused: Duration,
    batches: u64,
    samples: Option<u64>,
    /// Seconds of work, and samples, when each of the last batches was done.
    window: VecDeque<(f64, u64)>,
}

impl Counter {
    fn start() -> Self {
        Self { started: Some(Instant::now()), samples: Some(0), ..Self::default() }
    }

    fn elapsed(&self) -> f64 {
        let elapsed = self.started.map(|started| started.elapsed()).unwrap_or_default();
        elapsed.saturating_sub(self.paused).as_secs_f64()
    }

    /// Counts a batch that was done after so many seconds; a size that is not known makes all samples unknown.
    fn count(&mut self, seconds: f64, samples: Option<u64>, window_size: usize) {
        self.batches += 1;
        self.samples = self.samples.zip(samples).map(|(sum, samples)| sum + samples);
        if self.window.len() == window_size {
            self.window.pop_front();
        }
        self.window.push_back((seconds, self.samples.unwrap_or(0)));
    }
}

impl ThroughputMonitor {
    /// Counts as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] if the window is too short, or a number of operations is not positive.
    pub fn new(config: ThroughputMonitorConfig) -> Result<Self, ConfigError> {
        let refuse = |key: &str, what: String, remedy: &'static str| {
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
        Ok(Self {
            flops: config.flops_per_batch,
            config,
            training: Counter::default(),
            evaluation: Counter::default(),
        })
    }

    /// Names and values of a row of a stage.
    fn row(&self, stage: &str, counter: &Counter, num_ranks: usize) -> Vec<(String, f64)> {
        let config = &self.config;
        let separator = &config.separator;
        let mut row = Vec::new();
        let mut add = |name: &str, value: f64| row.push((format!("{stage}{separator}{name}"), value));
        add("time", counter.window.back().map_or(0.0, |(seconds, _)| *seconds));
        add("batches", counter.batches as f64);
        let length = config.length.filter(|_| counter.samples.is_some()).map(|length| length as f64);
        let samples = counter.samples.map(|samples| samples as f64);
        samples.into_iter().for_each(|samples| add("samples", samples));
        samples.zip(length).into_iter().for_each(|(samples, length)| add("lengths", samples * length));
        let (Some(first), Some(last)) = (counter.window.front(), counter.window.back()) else { return row };
        if counter.window.len() < config.window_size || last.0 <= first.0 {
            return row;
        }
        let seconds = last.0 - first.0;
        let batches_per_sec = (counter.window.len() - 1) as f64 / seconds;
        let mut rates = vec![("batches_per_sec", batches_per_sec)];
        if samples.is_some() {
            let samples_per_sec = (last.1 - first.1) as f64 / seconds;
            rates.push(("samples_per_sec", samples_per_sec));
            rates.extend(length.map(|length| ("items_per_sec", samples_per_sec * length)));
        }
        let flops = self.flops.filter(|_| stage == TRAIN).map(|flops| flops * batches_per_sec);
        rates.extend(flops.map(|flops| ("flops_per_sec", flops)));
        for (name, rate) in &rates {
            add(&format!("device{separator}{name}"), *rate);
        }
        if let Some((flops, available)) = flops.zip(config.available_flops) {
            add(&format!("device{separator}mfu"), flops / available);
        }
        if num_ranks > 1 {
            rates.iter().for_each(|(name, rate)| add(name, rate * num_ranks as f64));
        }
        row
    }

    fn log(&self, stage: &str, counter: &Counter, ctx: &mut HookContext, step: u64) {
        let num_ranks = ctx.device_mesh().dp.size;
        ctx.log_metrics(self.row(stage, counter, num_ranks), step);
    }

    fn begin_train(&mut self, ctx: &HookContext) -> anyhow::Result<()> {
        let has_size = self.config.batch_size.is_some() || ctx.facts().train_batch_size.is_some();
        anyhow::ensure!(
            has_size || self.config.length.is_none(),
            "items cannot be counted, since the loader does not tell its batch size; set ThroughputMonitor.batch_size"
        );
        let counted = ctx.facts().flops.as_ref().map(|flops| flops.total as f64);
        self.flops = self.config.flops_per_batch.or(counted);
        anyhow::ensure!(
            self.flops.is_some() || self.config.available_flops.is_none(),
            "ThroughputMonitor.available_flops is set, but not how many operations a batch takes; set flops_per_batch, or add \
             ModelSummary with flops=true"
        );
        self.training = Counter::start();
        Ok(())
    }

    fn count_training(&mut self, ctx: &mut HookContext) {
        let known = ctx.batch_size().or(ctx.facts().train_batch_size);
        let batch_size = self.config.batch_size.or(known.map(|size| size as u64));
        let seconds = self.training.elapsed();
        self.training.count(seconds, batch_size, self.config.window_size);
        // a row a step: at the batch that ends its accumulation window
        if let Some(step) = ctx.log_step().filter(|step| ctx.progress().batches_that_stepped > *step) {
            self.log(TRAIN, &self.training, ctx, step);
        }
    }

    fn count_evaluation(&mut self, ctx: &HookContext) {
        if !ctx.is_sanity_check() {
            let seconds = self.evaluation.elapsed();
            self.evaluation.count(seconds, ctx.batch_size().map(|n| n as u64), self.config.window_size);
        }
    }

    fn end_evaluation(&mut self, stage: &str, ctx: &mut HookContext) {
        if ctx.is_sanity_check() {
            return;
        }
        let steps = ctx.progress().batches_that_stepped;
        let step = if ctx.is_training() { steps.saturating_sub(1) } else { steps };
        self.log(stage, &self.evaluation, ctx, step);
    }
}

const TRAIN: &str = "train";

impl Callback for ThroughputMonitor {
    fn needs_logger(&self) -> bool {
        true
    }

    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        match hook {
            Hook::OnTrainStart => return self.begin_train(ctx),
            Hook::OnTrainBatchEnd => self.count_training(ctx),
            Hook::OnValidationStart | Hook::OnTestStart | Hook::OnPredictStart => {
                self.evaluation = Counter::start();
            }
            Hook::OnValidationBatchEnd | Hook::OnTestBatchEnd | Hook::OnPredictBatchEnd => {
                self.count_evaluation(ctx);
            }
            Hook::OnValidationEnd => {
                self.end_evaluation("validate", ctx);
                self.training.paused += self.evaluation.started.map(|at| at.elapsed()).unwrap_or_default();
            }
            Hook::OnTestEnd => self.end_evaluation("test", ctx),
            Hook::OnPredictEnd => self.end_evaluation("predict", ctx),
            _ => {}
        }
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
        let monitor = ThroughputMonitor::new(config).expect("valid");
        let mut counter = Counter::start();
        let mut rows = Vec::new();
        for seconds in [1.0, 2.0, 2.5, 3.0] {
            counter.count(seconds, Some(4), 3);
            rows.push(monitor.row(TRAIN, &counter, 1));
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
        let of_all = monitor.row(TRAIN, &counter, 2).split_off(expected.len());
        let rates = [("batches", 4.0), ("samples", 16.0), ("items", 128.0), ("flops", 4e9)];
        let rates = rates.map(|(name, rate)| (format!("train/{name}_per_sec"), rate));
        assert_eq!(of_all, rates);
        let evaluated: Vec<String> =
            monitor.row("validate", &counter, 1).into_iter().map(|(name, _)| name).collect();
        assert_eq!(evaluated.len(), 7, "operations are those of training: {evaluated:?}");
        assert!(evaluated.contains(&"validate/device/samples_per_sec".to_owned()));
    }

    #[test]
    fn a_size_that_is_not_known_leaves_samples_out() {
        let config = ThroughputMonitorConfig { length: Some(8), window_size: 2, ..Default::default() };
        let monitor = ThroughputMonitor::new(config).expect("valid");
        let mut counter = Counter::start();
        for (seconds, size) in [(1.0, Some(4)), (2.0, None), (3.0, Some(4))] {
            counter.count(seconds, size, 2);
        }
        let names: Vec<String> = monitor.row("test", &counter, 1).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["test/time", "test/batches", "test/device/batches_per_sec"]);
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let default = ThroughputMonitorConfig::default;
        for (config, key) in [
            (ThroughputMonitorConfig { window_size: 1, ..default() }, "window_size"),
            (ThroughputMonitorConfig { flops_per_batch: Some(0.0), ..default() }, "flops_per_batch"),
            (ThroughputMonitorConfig { available_flops: Some(-1.0), ..default() }, "available_flops"),
        ] {
            let error = ThroughputMonitor::new(config).expect_err(key).to_string();
            assert!(error.contains(&format!("ThroughputMonitor.{key}")), "{error}");
        }
    }
}
