//! Operators of a few steps, recorded by libtorch's profiler (Kineto).

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
