//! Logged values: kept on their device, reduced over the epoch, read back only when the number is needed.
//!
//! `ctx.log` returns a [`LogEntry`], whose setters are options. When it is dropped, [`MetricStore`] takes the value; the trainer
//! reads it back at the end of a step or epoch, reduced over ranks (`share`). Metrics that are members of the module go through `objects`.

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
