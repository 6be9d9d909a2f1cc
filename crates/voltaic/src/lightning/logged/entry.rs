//! A value being logged, with its options.

use super::scope::LogOptions;
use super::store::MetricStore;
use super::value::{LogValue, ReduceFx};
use crate::config::setters;

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

    setters! {
        in options;
        /// Shows the value in the progress bar.
        prog_bar: bool;
        /// Gives the value to the loggers (the default).
        logger: bool;
        /// Reports the value of this step by itself.
        on_step: bool;
        /// Reports the value reduced over the epoch.
        on_epoch: bool;
        /// How the values of an epoch become one; the mean, weighted by batch size, unless set.
        reduce_fx: ReduceFx;
        /// Reduces the value over all ranks: the mean of an epoch by batch size, a step's as `reduce_fx` says. Without it
        /// each rank's steps show its own value, and of an epoch rank 0's counts on all ranks.
        ///
        /// # Collective
        /// All ranks must log the value; one of a step is reduced at once.
        sync_dist: bool;
        /// Whether the names of values contain the index of the evaluation loader, if there are several (the default). Without it, values
        /// of all loaders with the same name are reduced together.
        add_dataloader_idx: bool;
        /// Weight of this value in the epoch's mean; the batch's size unless set.
        batch_size: usize = Some(batch_size);
    }
}

impl Drop for LogEntry<'_> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.store.record(self.name, value, self.options);
        }
    }
}
