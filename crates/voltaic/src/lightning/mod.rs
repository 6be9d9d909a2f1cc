//! What a user writes: a module with its steps, its optimizers and its hooks.

mod callback;
mod facts;
mod hook_context;
mod hooks;
mod logged;
mod manual;
mod module;
mod module_hooks;
mod module_tensors;
mod output;
mod requests;
mod step_context;

pub use crate::checkpoint::Progress;
pub(crate) use crate::profiler::Profiling;
pub use crate::profiler::{Action, ProfiledRun, Profiler};
pub use callback::Callback;
pub(crate) use facts::BatchFacts;
pub use facts::RunFacts;
pub use hook_context::HookContext;
pub(crate) use hook_context::step_lr_scheduler;
pub(crate) use hooks::HookFacts;
pub use hooks::{Hook, StepHook};
#[cfg(test)]
pub(crate) use logged::READS;
pub(crate) use logged::{Level, LogScope, Logged, MetricStore, MetricsMark, MetricsState, Phase};
pub use logged::{LogEntry, LogValue, ReduceFx};
pub use manual::ManualOptimizer;
pub(crate) use manual::{ManualOptimization, StepState};
pub use module::LightningModule;
pub use module_tensors::ModuleTensors;
pub(crate) use output::{AnyBatch, NamedTensors};
pub use output::{OutputValue, StepOutput};
pub use requests::{CheckpointRequest, Requests};
pub use step_context::StepContext;
