//! Operators of a few steps, recorded by libtorch's profiler (Kineto).
//!
//! [`TraceProfiler`] is the handle of a `tracer`, which records the steps that a [`ProfilerSchedule`] selects. `nest` and `lanes` add what
//! libtorch does not see; `export` writes the trace, and `table`, `flame` and `page` are the reports.

mod config;
mod export;
mod flame;
mod handle;
mod lanes;
mod nest;
mod page;
mod schedule;
mod table;
mod tracer;

pub(super) use config::{one_of, trace_config};
pub(super) use flame::METRICS;
pub use handle::{ProfiledRange, TraceProfiler};
pub use schedule::ProfilerSchedule;
pub(super) use table::{SORT_KEYS, SortKey};
pub(super) use tracer::TraceOptions;
