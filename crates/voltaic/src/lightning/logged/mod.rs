//! Logged values: kept on their device, reduced over the epoch, read back only when the number is needed.

mod entry;
mod objects;
mod scope;
mod share;
mod state;
mod store;
mod value;

pub use entry::LogEntry;
pub(crate) use scope::{Level, LogScope, Phase};
pub(crate) use state::{MetricsMark, MetricsState};
pub(crate) use store::{Logged, MetricStore};
#[cfg(test)]
pub(crate) use value::READS;
pub use value::{LogValue, ReduceFx};
