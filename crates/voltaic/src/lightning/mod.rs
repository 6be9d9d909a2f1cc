//! What a user writes: a module with its steps, its optimizers and its hooks.
//!
//! [`LightningModule`] is the trait of a model, and [`Callback`] that of code beside it. Steps get a [`StepContext`], hooks a
//! [`HookContext`]: they log values (`logged`), and request what the trainer does after the hook ([`Requests`]). `hooks` has the table
//! of all hooks, from which the methods of both traits are generated.
//!
//! An error that a step, a hook, a callback or a method of the data module returns ends the run, and so does a panic. The trainer returns
//! it as [`Error::Hook`](crate::Error::Hook), with the hook, the rank, the epoch and the step.

mod callback;
mod facts;
mod groups;
mod hook_context;
mod hooks;
mod load;
mod logged;
mod manual;
mod module;
mod module_tensors;
mod offload_states;
mod output;
mod param_values;
mod requests;
mod step_context;

pub use crate::checkpoint::Progress;
pub(crate) use crate::profiler::Profiling;
pub use crate::profiler::{Action, ProfiledRun, Profiler};
pub use callback::Callback;
pub use facts::RunFacts;
pub(crate) use facts::{BatchFacts, CallSizes, Hardware};
pub(crate) use groups::{Logging, Position, Training};
pub use hook_context::HookContext;
pub use hooks::{Hook, StepHook};
pub(crate) use hooks::{HookFacts, each_hook, each_step_hook};
pub(crate) use load::load_weights;
#[cfg(test)]
pub(crate) use logged::READS;
pub(crate) use logged::{Level, LogScope, Logged, MetricStore, MetricsMark, MetricsState, Phase};
pub use logged::{LogEntry, LogValue, ReduceFx};
pub(crate) use manual::ManualOptimization;
pub use manual::ManualOptimizer;
pub use module::LightningModule;
pub(crate) use module::NotImplemented;
pub use module_tensors::ModuleTensors;
pub(crate) use output::{AnyBatch, NamedTensors};
pub use output::{OutputValue, StepOutput};
pub use requests::{CheckpointRequest, Requests};
pub use step_context::StepContext;
pub(crate) use step_context::StepModuleGraphs;
