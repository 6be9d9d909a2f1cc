//! What a user writes: a module with its steps, its optimizers and its hooks.

mod callback;
mod facts;
mod hook_context;
mod logged;
mod manual;
mod module;
mod module_tensors;
mod requests;
mod step_context;

pub use crate::checkpoint::Progress;
pub(crate) use crate::profiler::Profiling;
pub use crate::profiler::{Action, ProfiledRun, Profiler};
pub use callback::Callback;
pub use facts::RunFacts;
pub use hook_context::HookContext;
pub(crate) use hook_context::step_lr_scheduler;
#[cfg(test)]
pub(crate) use logged::READS;
pub(crate) use logged::{Level, LogScope, Logged, MetricStore, MetricsMark, MetricsState, Phase};
pub use logged::{LogEntry, LogValue, ReduceFx};
pub use manual::ManualOptimizer;
pub(crate) use manual::{ManualOptimization, StepState};
pub use module::LightningModule;
pub use module_tensors::ModuleTensors;
pub use requests::{CheckpointRequest, Requests};
pub use step_context::StepContext;
