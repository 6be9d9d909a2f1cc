//! Graphs: what a function of tensors does is recorded once, below autograd, and replayed without the cost of doing it again.
//!
//! Every capture takes the same path:
//!
//! 1. **Static inputs** (`places`): the function runs on tensors at fixed places, laid out as the inputs are. `signature` says what makes
//!    a call another graph.
//! 2. **Warm-up** is the caller's: the function runs as usual, and kernels choose their algorithms.
//! 3. **Capture** (`capture`): operators run, and are recorded. A `mark_step` begins another part.
//! 4. **Reading** (`recordings`): recordings become data, [`Graph`], with names for the tensors that were there. They are checked for what
//!    cannot be replayed (`check`), and compared with another capture of the same function: only what is the same both times stands for it.
//! 5. **Compilation** (`compiled`): a plan says what runs and where memory lies (`plan`); views vanish, dead results are not computed. What is
//!    compiled (`compile`) is changed by passes before (`passes`).
//! 6. **Replay**: a loop over prepared kernel calls. `call` fills the inputs, gives the outputs, and makes the replay of a backward pass
//!    autograd's function. `metrics` counts.
//!
//! The public API are entry points to it: [`HpuGraph`] is steps 3 to 6, explicitly; [`make_graphed_callables`] makes one `call`
//! (`graphed_callable`); [`ModuleCacher`] and [`wrap_in_hpu_graph`] keep one for each signature (`cache`, `wrap`). Both are a module around the
//! module, or an interceptor of its calls (`graphed`). The trainer captures modules (`modules`), and steps 3 to 6 of training steps and
//! optimizer steps (`trainer/run/graphs.rs`). `show` tells what a step consists of.

mod backend;
mod cache;
mod call;
mod capture;
mod check;
mod compile;
mod compiled;
mod flops;
mod frozen;
mod graphed;
mod graphed_callable;
mod hpu_graph;
mod ir;
mod known;
mod metrics;
mod metrics_dump;
mod modules;
mod options;
mod passes;
mod places;
mod plan;
mod recordings;
mod show;
mod signature;
mod static_tensor;
mod wrap;

pub use crate::ffi::ReplayStats;
pub use crate::nn::{Callable, TensorTuple};
pub use backend::CompileBackend;
pub(crate) use backend::RECOMPILE_LIMIT;
pub use cache::{Buckets, CacheStats, CachedGraphs};
pub(crate) use capture::{Capture, scope_by_fqn};
pub use capture::{Scope, is_capturing, mark_step, refuse_capture, scope};
pub use compile::{Compiler, compile};
pub(crate) use compiled::CompiledGraph;
pub use flops::Flops;
pub use graphed::{Graphed, InPlace};
#[doc(hidden)]
pub use graphed_callable::OneGraph;
pub use graphed_callable::{
    GraphedCallable, GraphedCallableInPlace, make_graphed_callables, make_graphed_callables_inplace,
};
pub use hpu_graph::{CaptureGuard, HpuGraph, graph};
pub(crate) use hpu_graph::{
    GraphUses, MadeInCapture, forbid_replayed_steps, note_optimizer_step, replayed_steps, take_replayed_steps,
};
pub use ir::{Buffer, Graph, Node, Operand, Value};
pub use metrics::{
    GraphMetrics, LocalMetric, graph_metrics, metric_global, metric_localcontext, reset_metrics,
};
pub(crate) use metrics::{count_hit, count_miss};
pub(crate) use metrics_dump::dump_metrics_if_asked;
pub use metrics_dump::{MetricsFormat, metrics_dump};
pub(crate) use modules::ModuleGraphs;
pub(crate) use options::fall_back;
pub use options::{CompileConfig, CompileOptions};
pub(crate) use passes::Passes;
pub(crate) use places::{any_within, copy_of, fill, numbered, placeholder_for};
pub use plan::PlanStats;
pub(crate) use recordings::{FirstCapture, Recordings, named_tensors};
pub use show::{GraphTotals, ShownGraph};
pub(crate) use show::{label_shown, shown};
pub(crate) use signature::{Conditions, InputSignature};
pub use static_tensor::StaticTensor;
pub use wrap::{
    GraphedInPlace, GraphedModule, ModuleCacher, WrapOptions, wrap_in_hpu_graph, wrap_in_hpu_graph_inplace,
};
