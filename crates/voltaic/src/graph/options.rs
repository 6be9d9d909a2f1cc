//! Settings of compile, by the names of `torch.compile(model, backend="hpu_backend", options={..})`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::backend::CompileBackend;
use super::metrics::count_fallback;
use crate::accelerator::RuntimeFlags;
use crate::error::{GraphError, Result};

/// How training steps are compiled. A [`CompileBackend`] alone is one with the standard settings, and is written as its name.
///
/// ```
/// use voltaic::graph::{CompileBackend, CompileConfig, CompileOptions};
///
/// let options = CompileOptions { use_eager_fallback: Some(false), ..CompileOptions::default() };
/// let builder = voltaic::trainer::Trainer::builder().compile(CompileConfig { options, ..CompileBackend::HpuBackend.into() });
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(from = "Written", into = "Written")]
pub struct CompileConfig {
    /// Who compiles.
    pub backend: CompileBackend,
    /// How.
    pub options: CompileOptions,
    /// How many kinds of batches, and of calls of a module, are compiled; 8 unless set.
    pub recompile_limit: Option<usize>,
}

/// How a [`CompileConfig`] is written.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Written {
    /// A backend by name.
    Backend(CompileBackend),
    /// With settings.
    Settings(Settings),
}

/// Settings of compile.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    /// `hpu_backend` unless set.
    backend: CompileBackend,
    /// Options of the backend.
    options: CompileOptions,
    /// How many kinds of batches, and of calls of a module, are compiled; 8 unless set.
    recompile_limit: Option<usize>,
}

/// Options of a backend. Where one is not set, the variable of the environment decides that is named beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = refused(), "x-no-effect" = no_effect(), "x-no-effect-always" = true))]
pub struct CompileOptions {
    /// What cannot be captured runs as usual; else it is an error. On unless set (`PT_HPU_USE_EAGER_FALLBACK`).
    pub use_eager_fallback: Option<bool>,
    /// The pass `freezing`: where nothing has gradients, what depends on weights alone is computed once, and again after weights have
    /// changed. Off unless set (`PT_HPU_COMPILE_GRAPH_FREEZE`). A write to the memory of a weight that libtorch does not count, by
    /// `Tensor::data` or by its address, is seen after `clear_cache` only.
    pub use_graph_freezing: Option<bool>,
    /// Passes change what was captured; else it is replayed as it was recorded. On unless set (`PT_HPU_COMPILE_USE_RECIPES`).
    pub use_compiled_recipes: Option<bool>,
    /// Habana's name for `in_place`, which wins over it. On unless set (`PT_HPU_REINPLACE_ADD`).
    pub reinplace_add: Option<bool>,
    /// The pass `common_subexpressions`. On unless set (`PT_HPU_DISABLE_common_subexpressions`).
    pub common_subexpressions: Option<bool>,
    /// The pass `constant_folding`. On unless set (`PT_HPU_DISABLE_constant_folding`).
    pub constant_folding: Option<bool>,
    /// The pass `concatenations`. On unless set (`PT_HPU_DISABLE_concatenations`).
    pub concatenations: Option<bool>,
    /// The pass `fuse_elementwise`. On unless set (`PT_HPU_DISABLE_fuse_elementwise`).
    pub fuse_elementwise: Option<bool>,
    /// The pass `recomputation`: less memory, and some more time. Off unless set (`PT_HPU_DISABLE_recomputation=0`).
    pub recomputation: Option<bool>,
    /// The pass `in_place`. On unless set (`PT_HPU_DISABLE_in_place`).
    pub in_place: Option<bool>,
}

fn refused() -> Value {
    json!({
        "discard_frozen_params": {"what": "the weights of a compiled module stay there", "remedy": "remove it", "unless_off": true},
    })
}

/// Options of Habana's backend that choose what there is no choice of here.
fn no_effect() -> Value {
    let ranks = "a graph has no collectives";
    let copies = "copies run as they were recorded";
    json!({
        "decomposition_mode": "operators are recorded as libtorch runs them",
        "enable_allreduce_graph_split": ranks,
        "enable_sfg": ranks,
        "force_static_compile": "each shape is compiled by itself",
        "inference": "calls without grad are compiled by the same passes",
        "keep_input_mutations": "what a module writes to an input is always copied to it after the call",
        "reassign_copy_": copies,
        "reassign_full_copy": copies,
        "remove_unnecessary_clones": copies,
        "use_boxed_input": "a graph holds no inputs",
        "use_cpp_partitioner": "a graph has no partitions",
        "use_inplace_allreduce": ranks,
        "use_inplace_index_copy": copies,
    })
}

impl CompileOptions {
    /// Whether what cannot be captured is an error.
    pub(super) fn forbids_fallback(&self) -> bool {
        !or_variable(self.use_eager_fallback, "PT_HPU_USE_EAGER_FALLBACK")
    }

    /// Whether passes change graphs.
    pub(super) fn changes_graphs(&self) -> bool {
        or_variable(self.use_compiled_recipes, "PT_HPU_COMPILE_USE_RECIPES")
    }

    /// Whether the pass `freezing` runs.
    pub(super) fn freezes(&self) -> bool {
        let is_on = || RuntimeFlags::is_on("PT_HPU_COMPILE_GRAPH_FREEZE");
        self.changes_graphs() && self.use_graph_freezing.unwrap_or_else(is_on)
    }

    /// Whether the pass `recomputation` runs.
    pub(super) fn recomputes(&self) -> bool {
        self.recomputation.unwrap_or_else(|| RuntimeFlags::is_off("PT_HPU_DISABLE_recomputation"))
    }

    /// Whether the pass `in_place` runs.
    pub(super) fn in_place(&self) -> bool {
        self.in_place
            .or(self.reinplace_add)
            .unwrap_or_else(|| has_pass(None, "in_place") && or_variable(None, "PT_HPU_REINPLACE_ADD"))
    }
}

/// A switch that is on unless it, or else the environment, says otherwise.
fn or_variable(option: Option<bool>, variable: &str) -> bool {
    option.unwrap_or_else(|| !RuntimeFlags::is_off(variable))
}

/// Whether a pass runs by its option, or else by the environment.
pub(super) fn has_pass(option: Option<bool>, pass: &str) -> bool {
    option.unwrap_or_else(|| !RuntimeFlags::disables(pass))
}

/// Counts that code runs without a graph.
///
/// # Errors
/// With compile the error itself, if `use_eager_fallback` or `PT_HPU_USE_EAGER_FALLBACK` forbids that.
pub(crate) fn fall_back(compile: Option<CompileConfig>, error: &GraphError) -> Result<()> {
    count_fallback(error);
    match compile {
        Some(config) if config.options.forbids_fallback() => Err(error.clone().into()),
        _ => Ok(()),
    }
}

impl From<CompileBackend> for CompileConfig {
    fn from(backend: CompileBackend) -> Self {
        Self { backend, ..Self::default() }
    }
}

impl From<Written> for CompileConfig {
    fn from(written: Written) -> Self {
        match written {
            Written::Backend(backend) => backend.into(),
            Written::Settings(Settings { backend, options, recompile_limit }) => {
                Self { backend, options, recompile_limit }
            }
        }
    }
}

impl From<CompileConfig> for Written {
    fn from(config: CompileConfig) -> Self {
        let CompileConfig { backend, options, recompile_limit } = config;
        if config == backend.into() {
            return Self::Backend(backend);
        }
        Self::Settings(Settings { backend, options, recompile_limit })
    }
}
