//! Graphs: what a step does is recorded once, below autograd, and replayed without the cost of doing it again.
//!
//! A recording is data ([`Graph`]): operators, values, memory. Before it is replayed it is planned: views vanish, dead
//! results are not computed, and all memory gets its place once (`plan`). A replay is a loop over prepared kernel calls.

mod cache;
mod call;
mod capture;
mod check;
mod flops;
mod graphed_callable;
mod hpu_graph;
mod inplace;
mod ir;
mod known;
mod metrics;
mod modules;
mod plan;
mod static_tensor;
mod step;
mod wrap;

pub use crate::ffi::ReplayStats;
pub use crate::nn::{Callable, TensorTuple};
pub use cache::{Buckets, CacheStats};
pub(crate) use call::any_within;
pub(crate) use capture::{MadeInCapture, scope_by_fqn};
pub use capture::{Scope, is_capturing, mark_step, refuse_capture, scope};
pub use flops::Flops;
pub use graphed_callable::{GraphedCallable, make_graphed_callables};
pub use hpu_graph::{CaptureGuard, HpuGraph, graph};
pub(crate) use hpu_graph::{forbid_replayed_steps, note_optimizer_step, replayed_steps, take_replayed_steps};
pub use inplace::{GraphedCallableInPlace, GraphedInPlace, make_graphed_callables_inplace};
pub use ir::{Buffer, Graph, Node, Operand, Value};
pub use metrics::{GraphMetrics, graph_metrics, metric_global, reset_metrics};
pub(crate) use metrics::{count_fallback, count_hit, count_miss};
pub(crate) use modules::ModuleGraphs;
pub use plan::PlanStats;
pub use static_tensor::StaticTensor;
pub(crate) use step::{
    CapturedStep, SeenStep, StepCapture, StepGraph, copy_of, fill, numbered, placeholder_for,
};
pub use wrap::{GraphedModule, ModuleCacher, WrapOptions, wrap_in_hpu_graph, wrap_in_hpu_graph_inplace};
