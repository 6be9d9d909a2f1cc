//! A value being logged, with its options.

use super::scope::LogOptions;
use super::store::MetricStore;
use super::value::{LogValue, ReduceFx};

/// A value being logged; recorded with its options when it goes out of scope, so it is not kept.
pub struct LogEntry<'a> {
    store: &'a mut MetricStore,
    name: &'a str,
    value: Option<LogValue>,
    options: LogOptions,
}

impl<'a> LogEntry<'a> {
    pub(crate) fn new(store: &'a mut MetricStore, name: &'a str, value: LogValue) -> Self {
        let options = store.default_options();
        Self { store, name, value: Some(value), options }
    }

    /// Shows the value in the progress bar.
    pub fn prog_bar(mut self, prog_bar: bool) -> Self {
        self.options.prog_bar = prog_bar;
        self
    }

    /// Gives the value to the loggers (the default).
    pub fn logger(mut self, logger: bool) -> Self {
        self.options.logger = logger;
        self
    }

    /// Reports the value of this step by itself.
    pub fn on_step(mut self, on_step: bool) -> Self {
        self.options.on_step = on_step;
        self
    }

    /// Reports the value reduced over the epoch.
    pub fn on_epoch(mut self, on_epoch: bool) -> Self {
        self.options.on_epoch = on_epoch;
        self
    }

    /// How the values of an epoch become one; the mean, weighted by batch size, unless set.
    pub fn reduce_fx(mut self, reduce_fx: ReduceFx) -> Self {
        self.options.reduce_fx = reduce_fx;
        self
    }

    /// Reduces the value over all ranks: the mean of an epoch by batch size, a step's as `reduce_fx` says. Without it
    /// each rank's steps show its own value, and of an epoch rank 0's counts on all ranks.
    ///
    /// # Collective
    /// All ranks must log the value; one of a step is reduced at once.
    pub fn sync_dist(mut self, sync_dist: bool) -> Self {
        self.options.sync_dist = sync_dist;
        self
    }

    /// Whether the names of values contain the index of the evaluation loader, if there are several (the default). Without it, values
    /// of all loaders with the same name are reduced together.
    pub fn add_dataloader_idx(mut self, add_dataloader_idx: bool) -> Self {
        self.options.add_dataloader_idx = add_dataloader_idx;
        self
    }

    /// Weight of this value in the epoch's mean; the batch's size unless set.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.options.batch_size = Some(batch_size);
        self
    }
}

impl Drop for LogEntry<'_> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.store.record(self.name, value, self.options);
        }
    }
}
