//! Operators of a few steps, recorded by libtorch's profiler (Kineto).

mod export;
mod flame;
mod handle;
mod lanes;
mod nest;
mod page;
mod schedule;
mod table;
mod tracer;

pub(super) use flame::METRICS;
pub(super) use handle::Handle;
pub use handle::ProfiledRange;
pub use schedule::ProfilerSchedule;
pub(super) use table::{SORT_KEYS, SortKey};
pub(super) use tracer::{TraceOptions, Tracer};
