//! Section `zero_optimization`.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use voltaic_macros::Defaults;

use crate::config::Document;
use crate::strategy::offload::{self, OffloadDevice, OffloadOptimizer, OffloadParam};

/// Section `zero_optimization` with DeepSpeed's defaults.
#[derive(Defaults, Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-refused" = refused(), "x-no-effect" = no_effect(), "x-old-names" = old_names()))]
pub(crate) struct ZeroSection {
    /// What is sharded: 1 optimizer states, 2 gradients too, 3 weights too.
    pub stage: u64,
    /// Most elements of gradients that travel together.
    #[schemars(range(min = 1))]
    #[default(500_000_000)]
    pub reduce_bucket_size: u64,
    /// Most elements of weights that travel together; even.
    #[schemars(range(min = 1))]
    #[default(500_000_000)]
    pub allgather_bucket_size: u64,
    /// Each rank gets its part of the gradients only.
    #[default(true)]
    pub reduce_scatter: bool,
    /// Gradients travel while backward runs; by the stage unless set.
    pub overlap_comm: Option<bool>,
    /// Most elements that are updated at a time, with stage 3 and an offload.
    #[schemars(range(min = 1))]
    #[default(1_000_000_000)]
    pub sub_group_size: u64,
    /// Most elements of weights that are gathered ahead of use.
    #[serde(rename = "stage3_prefetch_bucket_size")]
    #[default(50_000_000)]
    pub prefetch_bucket_size: u64,
    /// Parameters of at most so many elements stay whole.
    #[serde(rename = "stage3_param_persistence_threshold")]
    #[default(100_000)]
    pub param_persistence_threshold: u64,
    /// Most elements of all parameters that stay whole.
    #[serde(rename = "stage3_model_persistence_threshold")]
    #[default(i64::MAX as u64)]
    pub model_persistence_threshold: u64,
    /// Most elements of weights that are gathered at a time.
    #[serde(rename = "stage3_max_live_parameters")]
    #[default(1_000_000_000)]
    pub max_live_parameters: u64,
    /// Weights that are used again within so many elements stay gathered.
    #[serde(rename = "stage3_max_reuse_distance")]
    #[default(1_000_000_000)]
    pub max_reuse_distance: u64,
    /// Checkpoints have the whole weights in 16 bits.
    #[serde(rename = "stage3_gather_16bit_weights_on_model_save")]
    pub gather_16bit_weights_on_model_save: bool,
    /// Parameters without a gradient are left alone.
    #[default(true)]
    pub ignore_unused_parameters: bool,
    /// Modules that are gathered and reduced as a whole.
    pub leaf_module: LeafModules,
    /// The norm of the gradients is computed.
    #[default(true)]
    pub compute_grad_norm: bool,
    /// Parts of ranks within a node, which hold the weights once more.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub zero_hpz_partition_size: u64,
    /// Where optimizer states are kept.
    pub offload_optimizer: OffloadOptimizer,
    /// Where weights are kept.
    pub offload_param: OffloadParam,
    /// As `offload_optimizer` with device `cpu`.
    pub cpu_offload: bool,
    /// As `offload_param` with device `cpu`.
    pub cpu_offload_param: bool,
}

fn refused() -> Value {
    let removed = json!({"what": "DeepSpeed has had it in older versions only", "remedy": "remove it"});
    let quantized =
        json!({"what": "what travels is not quantized", "remedy": "set false", "unless_off": true});
    json!({
        "mics_shard_size": removed,
        "mics_hierarchical_params_gather": removed,
        "zeropp_loco_param": removed,
        "legacy_stage1": {"what": "DeepSpeed has removed the old stage 1", "remedy": "remove it", "unless_off": true},
        "zero_quantized_weights": quantized,
        "zero_quantized_nontrainable_weights": quantized,
        "zero_quantized_gradients": quantized,
        "zenflow": {"what": "voltaic does not have it", "remedy": "remove it", "unless_off": true},
    })
}

fn no_effect() -> Value {
    let (collectives, division) =
        ("which collectives are used is fixed", "how parameters are divided is fixed");
    let (pytorch, debug) = ("it is for PyTorch's modules", "it is for finding faults in DeepSpeed");
    let (masters, units) = (
        "master weights are always loaded as saved",
        "which weights are gathered together follows from the modules",
    );
    json!({
        "contiguous_gradients": "gradients always lie in one piece",
        "allgather_partitions": collectives,
        "max_group_size": "DeepSpeed has no such key",
        "use_multi_rank_bucket_allreduce": collectives,
        "round_robin_gradients": division,
        "parameter_alignment": division,
        "memory_efficient_linear": pytorch,
        "override_module_apply": pytorch,
        "pipeline_loading_checkpoint": masters,
        "load_from_fp32_weights": masters,
        "overlap_comm": "gradients always travel while backward runs",
        "allgather_bucket_size": "weights are gathered in the pieces in which they lie",
        "save_muon_momentum_buffer_in_memory": "states are kept where offload_optimizer says",
        "stage3_model_persistence_threshold": "the size of each parameter decides (param_persistence_threshold)",
        "stage3_gather_16bit_weights_on_model_save": "checkpoints have the whole weights",
        "elastic_checkpoint": "a checkpoint can be loaded with any number of ranks as it is",
        "log_trace_cache_warnings": debug,
        "enable_sanity_checks": debug,
        "stage3_module_granularity_threshold": units,
        "stage3_use_all_reduce_for_fetch_params": units,
        "stage3_allgather_sequential": units,
    })
}

fn old_names() -> Value {
    json!({
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
    })
}

/// Section `leaf_module`: modules that are gathered and reduced as a whole.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct LeafModules {
    /// Types, by name or path.
    pub classes: Vec<String>,
    /// Fqns.
    pub names: Vec<String>,
    /// Ends of fqns.
    pub name_suffixes: Vec<String>,
}

impl LeafModules {
    /// Types, fqns and ends of fqns.
    pub fn all(&self) -> Vec<String> {
        let classes = self.classes.iter().map(|path| path.rsplit('.').next().unwrap_or_default().to_owned());
        let names = self.names.iter().chain(&self.name_suffixes);
        classes.chain(names.map(|name| name.trim_start_matches('.').to_owned())).collect()
    }
}

impl ZeroSection {
    /// Whether something is kept off the device.
    pub fn offloads(&self) -> bool {
        offload::offloads(&self.offload_optimizer, &self.offload_param)
    }

    /// Whether something is kept in files.
    pub fn has_files(&self) -> bool {
        [self.offload_optimizer.device, self.offload_param.device].contains(&OffloadDevice::Nvme)
    }

    /// Finds values that cannot be, or not together.
    pub(super) fn check(&mut self, document: &mut Document) {
        let mut refuse = |key: &str, what: String, remedy: &'static str| {
            document.refuse(&format!("zero_optimization.{key}"), what, remedy);
        };
        if self.stage > 3 {
            refuse("stage", format!("{} is not a stage", self.stage), "use 0, 1, 2 or 3");
        }
        if self.allgather_bucket_size % 2 == 1 {
            let what = format!("{} is odd", self.allgather_bucket_size);
            refuse("allgather_bucket_size", what, "use a multiple of 2");
        }
        if !self.compute_grad_norm && !(1..=2).contains(&self.stage.min(3)) {
            let what = format!("false with stage {}", self.stage.min(3));
            refuse("compute_grad_norm", what, "use stage 1 or 2, or true");
        }
        if self.zero_hpz_partition_size > 1 {
            let what = format!("{}: there is no second division within a node", self.zero_hpz_partition_size);
            refuse("zero_hpz_partition_size", what, "set 1");
        }
        let LeafModules { classes, names, name_suffixes } = &self.leaf_module;
        for (key, texts) in [("classes", classes), ("names", names), ("name_suffixes", name_suffixes)] {
            if texts.iter().any(String::is_empty) {
                refuse(
                    &format!("leaf_module.{key}"),
                    "a text is empty".to_owned(),
                    "remove it, or name a module",
                );
            }
        }
        if !self.compute_grad_norm {
            let why = "the norm is computed only where it is needed";
            document.note("zero_optimization.compute_grad_norm", why);
        }
        if !self.ignore_unused_parameters {
            let why = "parameters without a gradient are left alone";
            document.note("zero_optimization.ignore_unused_parameters", why);
        }
        let optimizer = (&mut self.offload_optimizer, self.cpu_offload);
        offload::check(self.stage, optimizer, (&mut self.offload_param, self.cpu_offload_param), document);
    }
}
