//! What a checkpoint, and a batch that may be undone, keep of the values logged in an epoch that is not over.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::scope::LogOptions;
use super::store::{Entry, MetricStore};
use super::value::{LogValue, Number};
use crate::device::Device;
use crate::error::Result;

/// Logged values of an epoch in progress, as a checkpoint keeps them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MetricsState {
    train: Vec<EntryState>,
    finished: Vec<(String, Number)>,
    /// Names that an evaluation has published since training steps logged them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    overridden: Vec<String>,
}

impl MetricsState {
    /// Without the values of the epoch that is not over, which another rank counts.
    pub(crate) fn without_open_epoch(self) -> Self {
        Self { train: Vec::new(), ..self }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct EntryState {
    #[serde(default = "training_step")]
    hook: String,
    name: String,
    options: LogOptions,
    last: Number,
    reduced: Option<Number>,
    weight: f64,
    /// Fqn of the metric that was logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metric: Option<String>,
}

/// The hook of values in checkpoints that name none.
fn training_step() -> String {
    "training_step".to_owned()
}

/// What training steps have logged up to a moment, to go back to.
#[derive(Debug)]
pub(crate) struct MetricsMark {
    /// Last value, reduced value and weight of each entry.
    values: Vec<(LogValue, Option<LogValue>, f64)>,
    objects: Vec<(String, Tensor)>,
}

impl MetricStore {
    /// State that a checkpoint needs to resume within the epoch. # Sync: reads all values back.
    pub(crate) fn state(&self) -> MetricsState {
        let train = self
            .train
            .entries
            .iter()
            .map(|entry| EntryState {
                hook: entry.hook.clone(),
                name: entry.name.clone(),
                options: entry.options,
                last: Number(entry.last.read()),
                reduced: entry.reduced.as_ref().map(|value| Number(value.read())),
                weight: entry.weight,
                metric: entry.metric.clone(),
            })
            .collect();
        let mut finished: Vec<_> =
            self.finished.iter().map(|(name, value)| (name.clone(), Number(*value))).collect();
        finished.sort_by(|a, b| a.0.cmp(&b.0));
        let mut overridden: Vec<_> = self.overridden.iter().cloned().collect();
        overridden.sort();
        MetricsState { train, finished, overridden }
    }

    /// What a checkpoint has to keep of the module's metrics, by fqn and part.
    pub(crate) fn metric_states(&self) -> Result<Vec<(String, Tensor)>> {
        self.objects.saved()
    }

    /// Restores what [`MetricStore::metric_states`] gave.
    pub(crate) fn restore_metrics(&mut self, saved: &[(String, Tensor)], device: Device) -> Result<()> {
        self.objects.restore(saved, device)
    }

    /// A snapshot of what is logged so far in the training epoch.
    pub(crate) fn mark(&self) -> Result<MetricsMark> {
        let entries = self.train.entries.iter();
        let value = |e: &Entry| (e.last.handle(), e.reduced.as_ref().map(LogValue::handle), e.weight);
        Ok(MetricsMark { values: entries.map(value).collect(), objects: self.objects.saved()? })
    }

    /// Discards what was logged in the training epoch since the snapshot.
    pub(crate) fn go_back(&mut self, mark: MetricsMark, device: Device) -> Result<()> {
        self.train.truncate(mark.values.len());
        for (entry, (last, reduced, weight)) in self.train.entries.iter_mut().zip(mark.values) {
            (entry.last, entry.reduced, entry.weight) = (last, reduced, weight);
        }
        self.objects.restore(&mark.objects, device)
    }

    /// Restores the values of a checkpoint.
    pub(crate) fn restore(&mut self, state: MetricsState) {
        self.train.clear();
        for EntryState { hook, name, options, last, reduced, weight, metric } in state.train {
            self.train.push(Entry {
                name,
                hook,
                options,
                last: LogValue::Host(last.0),
                updated_this_batch: false,
                reduced: reduced.map(|number| LogValue::Host(number.0)),
                weight,
                metric,
                is_restored: true,
            });
        }
        self.overridden = state.overridden.into_iter().collect();
        self.finished = state.finished.into_iter().map(|(name, number)| (name, number.0)).collect();
    }
}
