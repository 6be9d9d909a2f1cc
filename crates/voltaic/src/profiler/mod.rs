//! Where the time of a run goes: reports on its actions.
//!
//! [`SimpleProfiler`] adds up the time of each action; [`AdvancedProfiler`] also shows how it is distributed and nested;
//! [`PyTorchProfiler`] records the operators of a few steps; [`HpuProfiler`] also records what HPUs do. A profiler of your own
//! implements [`Profiler`].

pub(crate) mod actions;
mod advanced;
mod config;
mod durations;
mod hpu;
#[allow(clippy::module_inception)]
mod profiler;
mod report;
mod simple;
mod torch;
mod trace;

pub use advanced::{AdvancedProfiler, AdvancedProfilerConfig, RowLimit};
pub use config::{ProfilerClass, ProfilerConfig};
pub use hpu::{HpuProfiler, HpuProfilerConfig, ProfilerActivity};
pub(crate) use profiler::Profiling;
pub use profiler::{Action, ProfiledRun, Profiler};
pub use simple::{SimpleProfiler, SimpleProfilerConfig};
pub use torch::{PyTorchProfiler, PyTorchProfilerConfig};
pub use trace::{ProfiledRange, ProfilerSchedule, TraceProfiler};
