//! What a DeepSpeed file says: its keys with DeepSpeed's defaults, and what does not go together.
//!
//! A key is one line: a field, or an entry of the table that says why it is refused or has no effect.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use tch::Kind;
use voltaic_macros::Defaults;

use super::batch::BatchSizes;
use super::classes::{OptimizerSection, SchedulerSection};
use super::zero_section::ZeroSection;
use crate::config::Document;
use crate::error::{ConfigError, ConfigProblem};
use crate::nn::CheckpointSettings;
use crate::optim::{LrSchedulerConfig, OptimizerConfig};
use crate::precision::LossScalerConfig;
use crate::strategy::offload::Aio;
use crate::strategy::zero::config::GradientReduction;

/// What stands for the key in errors that are about a whole file.
pub(super) const TITLE: &str = "DeepSpeed file";

/// The settings of a DeepSpeed file.
#[derive(Defaults, Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-refused" = refused(), "x-no-effect" = no_effect(), "x-old-names" = json!({"bfloat16": "bf16"}),
    "x-ignores-unknown" = "DeepSpeed"))]
pub(crate) struct DeepSpeedSettings {
    /// Samples of one optimizer step, of all ranks together.
    #[schemars(range(min = 1))]
    pub train_batch_size: Option<u64>,
    /// Samples of one batch of a rank.
    #[schemars(range(min = 1))]
    pub train_micro_batch_size_per_gpu: Option<u64>,
    /// Batches of an optimizer step, which the trainer counts here.
    pub gradient_accumulation_steps: Option<Value>,
    /// Whether DeepSpeed counts the batches of an optimizer step.
    #[default(true)]
    pub managed_gradient_accumulation: bool,
    /// Limit of the norm of the gradients; the trainer's unless set.
    #[schemars(range(min = 0))]
    pub gradient_clipping: Option<f64>,
    /// Dtype in which gradients travel; by the precision unless set.
    #[serde(deserialize_with = "dtype")]
    #[schemars(schema_with = "dtypes")]
    pub communication_data_type: Option<Kind>,
    /// Whether gradients are divided before they are added up.
    pub prescale_gradients: bool,
    /// By what gradients are divided before they are added up.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[default(1.0)]
    pub gradient_predivide_factor: f64,
    /// Mean or sum of the ranks' gradients.
    #[default(ReduceOp::Mean)]
    pub gradient_allreduce_op: ReduceOp,
    /// Takes optimizers that DeepSpeed has not tested.
    pub zero_allow_untested_optimizer: bool,
    /// Section `data_types`.
    pub data_types: DataTypes,
    /// Section `fp16`.
    pub fp16: Fp16,
    /// Section `bf16`.
    pub bf16: Bf16,
    /// Section `zero_optimization`; `true` is stage 1.
    #[serde(rename = "zero_optimization")]
    pub zero: ZeroSection,
    /// Section `optimizer`.
    #[serde(rename = "optimizer")]
    optimizer_section: OptimizerSection,
    /// Section `scheduler`.
    #[serde(rename = "scheduler")]
    scheduler_section: SchedulerSection,
    /// Section `activation_checkpointing`.
    activation_checkpointing: ActivationCheckpointing,
    /// Section `aio`.
    pub aio: Aio,
    /// Section `checkpoint`.
    checkpoint: CheckpointSection,
    /// Section `tensor_parallel`.
    tensor_parallel: TensorParallelSection,
    /// What the section `optimizer` is here.
    #[serde(skip)]
    pub optimizer: Option<OptimizerConfig>,
    /// What the section `scheduler` is here.
    #[serde(skip)]
    pub scheduler: Option<LrSchedulerConfig>,
    /// Whether the file has the sections `fp16` and `bf16`, which then decide the precision.
    #[serde(skip)]
    pub names_precision: bool,
    /// Keys that have no effect, a sentence each.
    #[serde(skip)]
    pub notes: Vec<String>,
    /// Those of them that DeepSpeed does not have, as mistakes beside others.
    #[serde(skip)]
    pub unknown_keys: Vec<ConfigProblem>,
}

fn refused() -> Value {
    let removed = json!({"what": "DeepSpeed has had it in older versions only", "remedy": "remove it"});
    let unless_off = |what: &str, remedy: &str| json!({"what": what, "remedy": remedy, "unless_off": true});
    let absent = unless_off("voltaic does not have it", "remove it");
    json!({
        "nebula": removed,
        "compression_training": removed,
        "amp": removed,
        "quantize_training": removed,
        "sparse_gradients": removed,
        "eigenvalue": removed,
        "sparse_attention": removed,
        "elasticity": removed,
        "graph_harvesting": removed,
        "curriculum_learning": removed,
        "progressive_layer_drop": removed,
        "autotuning": unless_off("autotuning is not supported", "remove it"),
        "compile": absent,
        "hybrid_engine": absent,
        "expert_parallel": absent,
        "data_efficiency": absent,
        "pipeline": absent,
        "torch_autocast": unless_off("precision is the trainer's", "set trainer.precision"),
    })
}

fn no_effect() -> Value {
    let (sequence, profiler) = ("there is no sequence parallelism", "set trainer.profiler");
    let (logger, launcher) = ("set trainer.logger", "it is for DeepSpeed's launcher");
    json!({
        "steps_per_print": "what is logged, and how often, is the trainer's (log_every_n_steps)",
        "seq_parallel_communication_data_type": sequence,
        "sequence_parallel_size": sequence,
        "use_data_before_expert_parallelism": sequence,
        "wall_clock_breakdown": profiler,
        "memory_breakdown": profiler,
        "flops_profiler": profiler,
        "timers": profiler,
        "comms_logger": "set VOLTAIC_LOG=debug to see the collectives",
        "tensorboard": logger,
        "wandb": logger,
        "csv_monitor": logger,
        "comet": logger,
        "dump_state": "`--print_config` shows what is in force",
        "disable_allgather": "weights are always gathered",
        "disable_python_gc": "there is no Python",
        "dataloader_drop_last": "loaders are made by the data module",
        "zero_force_ds_cpu_optimizer": "each optimizer can be updated on the host",
        "vocabulary_size": "DeepSpeed only warns by it",
        "local_rank": launcher,
        "zero_allow_comm_data_type_fp32": launcher,
    })
}

/// How the ranks' gradients are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReduceOp {
    Mean,
    Sum,
}

/// Section `data_types`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-no-effect" = json!({
    "param_dtype": "the sections fp16 and bf16 decide",
    "buffer_dtype": "the sections fp16 and bf16 decide",
    "keep_in_fp32_modules": "the sections fp16 and bf16 decide",
})))]
pub(crate) struct DataTypes {
    /// Dtype in which gradients are accumulated; that of the weights unless set.
    #[serde(deserialize_with = "dtype")]
    #[schemars(schema_with = "dtypes")]
    pub grad_accum_dtype: Option<Kind>,
}

/// Section `fp16`: float16 weights, and how the loss is scaled.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-refused" = json!({
    "auto_cast": {"what": "inputs are not cast", "remedy": "remove it: return float16 batches", "unless_off": true},
})))]
pub(crate) struct Fp16 {
    /// Whether weights are float16.
    pub enabled: bool,
    /// There are no master weights; optimizer states are float32.
    pub fp16_master_weights_and_grads: bool,
    /// How the loss is scaled.
    #[serde(flatten)]
    pub scaler: LossScalerConfig,
}

/// Section `bf16`: bfloat16 weights.
#[derive(Defaults, Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-no-effect" = json!({"immediate_grad_update": "gradients are always taken as they appear"})))]
pub(crate) struct Bf16 {
    /// Whether weights are bfloat16.
    pub enabled: bool,
    /// Steps whose gradients are not finite are left out.
    #[default(true)]
    pub check_grad_overflow: bool,
    /// Optimizer states are bfloat16, too; goes with the next key.
    pub bf16_optimizer_states: bool,
    /// There are no master weights.
    pub bf16_master_weights_and_grads: bool,
}

/// Section `activation_checkpointing`: how segments are run that a module checkpoints.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-ignores-unknown" = "DeepSpeed"))]
pub(crate) struct ActivationCheckpointing {
    /// Divides inputs of segments among the ranks of a model-parallel group.
    partition_activations: bool,
    /// Keeps inputs of segments in the host's memory.
    cpu_checkpointing: bool,
    /// Keeps inputs of segments in one piece of memory.
    contiguous_memory_optimization: bool,
    /// How many segments a step has.
    #[schemars(range(min = 1))]
    number_checkpoints: Option<u64>,
    /// Waits for the device before and after each segment.
    synchronize_checkpoint_boundary: bool,
    /// Logs how long each segment takes.
    profile: bool,
}

/// Section `checkpoint`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-no-effect" = checkpoint_no_effect(), "x-ignores-unknown" = "DeepSpeed"))]
pub(crate) struct CheckpointSection {
    /// What is done if ranks name a checkpoint in different ways.
    pub tag_validation: Option<TagValidation>,
}

/// Section `tensor_parallel` of training.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-no-effect" = json!({
    "preset_model": "the module says how it is divided, or rules for names do",
    "tp_overlap_comm": "what layers exchange is waited for",
})))]
pub(crate) struct TensorParallelSection {
    /// Ranks that have slices of the same layers; 0 and 1 divide nothing.
    autotp_size: u64,
}

/// What is done if ranks name a checkpoint in different ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
pub(crate) enum TagValidation {
    Ignore,
    Warn,
    Fail,
}

fn checkpoint_no_effect() -> Value {
    let writing = "how checkpoints are written is the trainer's (plugins)";
    json!({
        "tag_validation": "rank 0 alone names a checkpoint",
        "load_universal": "a checkpoint can be loaded with any number of ranks as it is",
        "use_node_local_storage": writing,
        "parallel_write": writing,
        "checkpoint_serialization": writing,
        "writer": writing,
    })
}

/// DeepSpeed's words for dtypes.
const DTYPES: [(&str, Kind); 9] = [
    ("fp32", Kind::Float),
    ("fp16", Kind::Half),
    ("bf16", Kind::BFloat16),
    ("float32", Kind::Float),
    ("float16", Kind::Half),
    ("bfloat16", Kind::BFloat16),
    ("torch.float32", Kind::Float),
    ("torch.float16", Kind::Half),
    ("torch.bfloat16", Kind::BFloat16),
];

fn dtypes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": DTYPES.map(|(word, _)| word)})
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Kind>, D::Error> {
    let given = String::deserialize(deserializer)?;
    Ok(DTYPES.iter().find(|(word, _)| *word == given).map(|(_, kind)| *kind))
}

impl DeepSpeedSettings {
    /// Ranks that have slices of the same layers.
    pub fn tp_size(&self) -> usize {
        usize::try_from(self.tensor_parallel.autotp_size).unwrap_or(usize::MAX).max(1)
    }

    /// The batch sizes that are given.
    pub fn batch(&self) -> BatchSizes {
        let Self { train_batch_size, train_micro_batch_size_per_gpu, .. } = *self;
        BatchSizes { train_batch_size, train_micro_batch_size_per_gpu }
    }

    /// Whether weights and gradients of 16 bits have no float32 copies.
    pub fn has_16_bit_masters(&self) -> bool {
        if self.fp16.enabled {
            self.fp16.fp16_master_weights_and_grads
        } else {
            self.bf16.bf16_master_weights_and_grads
        }
    }

    /// How checkpointed segments are run.
    pub fn checkpoints(&self) -> CheckpointSettings {
        let ActivationCheckpointing { cpu_checkpointing, synchronize_checkpoint_boundary, profile, .. } =
            self.activation_checkpointing;
        CheckpointSettings {
            inputs_on_host: cpu_checkpointing,
            synchronize: synchronize_checkpoint_boundary,
            profile,
        }
    }

    /// How the gradients of the ranks are reduced. DeepSpeed divides by the number of ranks beforehand in stages 2 and 3, with
    /// `prescale_gradients`, and with reduce_scatter; its optimizer for bfloat16 with sums in float32 does not scatter.
    pub fn gradient_reduction(&self) -> GradientReduction {
        if self.gradient_allreduce_op == ReduceOp::Sum {
            return GradientReduction::Sum;
        }
        if self.prescale_gradients || self.scatters() {
            return GradientReduction::Mean;
        }
        GradientReduction::Predivided(self.gradient_predivide_factor)
    }

    /// Whether DeepSpeed gives each rank its part of the sums only.
    fn scatters(&self) -> bool {
        let is_bf16_optimizer = self.bf16.enabled
            && self.zero.stage == 1
            && self.data_types.grad_accum_dtype == Some(Kind::Float);
        self.zero.reduce_scatter && !is_bf16_optimizer
    }

    /// Reads a file's text; `path` is its name in errors.
    #[cfg(test)]
    pub fn of_text(path: &str, text: &str) -> Result<Self, ConfigError> {
        Self::of_document(Document::of_json(TITLE, path, text)?)
    }

    /// Reads settings given as a value; `key` is where they are.
    pub fn of_value(key: &str, value: &Value) -> Result<Self, ConfigError> {
        Self::of_document(Document::of_value(TITLE, key, value)?)
    }

    /// Reads settings of a document.
    pub fn of_document(mut document: Document) -> Result<Self, ConfigError> {
        document.rewrite("zero_optimization", |value| Some(json!({"stage": u64::from(value.as_bool()?)})));
        let mut settings: Self = document.read();
        settings.names_precision = document.has("fp16") || document.has("bf16");
        settings.optimizer = settings.optimizer_section.resolve(&mut document);
        settings.scheduler = settings.scheduler_section.resolve(&mut document);
        settings.check(&mut document);
        settings.zero.check(&mut document);
        settings.zero.stage = settings.zero.stage.min(3);
        if settings.zero.stage == 0 {
            document.note("zero_optimization.stage", "0 is run as stage 1, whose updates are the same");
        }
        if document.has("aio") && !settings.zero.has_files() {
            document.note("aio", "nothing is offloaded to files");
        }
        if document.has("zero_optimization.sub_group_size") && !settings.zero.offloads() {
            document.note("zero_optimization.sub_group_size", "nothing is offloaded");
        }
        (settings.notes, settings.unknown_keys) = document.finish()?;
        Ok(settings)
    }
}

/// Values that are right each, but not together, and those that no schema describes.
impl DeepSpeedSettings {
    fn check(&self, document: &mut Document) {
        if let Some(steps) = &self.gradient_accumulation_steps {
            let what = format!("{steps} is set, but the trainer accumulates");
            document.refuse("gradient_accumulation_steps", what, "set trainer.accumulate_grad_batches");
        }
        if !self.managed_gradient_accumulation {
            let what = "false is for training loops of your own".to_owned();
            let remedy = "remove it: the trainer accumulates";
            document.refuse("managed_gradient_accumulation", what, remedy);
        }
        self.check_precision(document);
        self.check_reduction(document);
        self.check_checkpoints(document);
        if let Some(limit) =
            self.gradient_clipping.filter(|limit| *limit > 0.0 && !self.zero.compute_grad_norm)
        {
            let what = format!("{limit} needs the norm, and compute_grad_norm is false");
            let remedy = "set 0, or zero_optimization.compute_grad_norm=true";
            document.refuse("gradient_clipping", what, remedy);
        }
    }

    /// As `deepspeed.checkpointing.configure` checks them.
    fn check_checkpoints(&self, document: &mut Document) {
        let ActivationCheckpointing {
            partition_activations,
            contiguous_memory_optimization,
            number_checkpoints,
            ..
        } = self.activation_checkpointing;
        let key = |name: &str| format!("activation_checkpointing.{name}");
        if partition_activations {
            let why = "there is no model-parallel group, so that activations stay whole on each rank";
            document.note(&key("partition_activations"), why);
        }
        let contiguous = key("contiguous_memory_optimization");
        match (contiguous_memory_optimization, partition_activations, number_checkpoints) {
            (false, _, Some(_)) => {
                document.note(&key("number_checkpoints"), "contiguous_memory_optimization alone needs it");
            }
            (false, ..) => {}
            (true, false, _) => {
                let what = "true without partition_activations".to_owned();
                document.refuse(&contiguous, what, "set partition_activations=true, too");
            }
            (true, true, None) => {
                let what = "true without number_checkpoints".to_owned();
                let remedy = "set number_checkpoints to how many segments a step has, which only a file can, or set false";
                document.refuse(&contiguous, what, remedy);
            }
            (true, true, Some(_)) => {
                document
                    .note(&contiguous, "memory comes from pools, which keep freed blocks for the next step");
            }
        }
    }

    fn check_precision(&self, document: &mut Document) {
        let Self { fp16: Fp16 { enabled, fp16_master_weights_and_grads: low, scaler }, bf16, .. } = self;
        let of_scale = [
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        ];
        for key in of_scale.map(|key| format!("fp16.{key}")) {
            if !enabled && document.has(&key) {
                document.note(&key, "the loss is scaled with fp16.enabled=true only");
            }
        }
        if *enabled && bf16.enabled {
            document.refuse("fp16", "fp16 and bf16 are both enabled".to_owned(), "enable one of the two");
        }
        for (key, scale) in [("loss_scale", scaler.loss_scale), ("min_loss_scale", scaler.min_loss_scale)] {
            if scale > f64::from(f32::MAX) {
                let what = format!("{scale} is infinite in float32");
                document.refuse(&format!("fp16.{key}"), what, "set a smaller number");
            }
        }
        if scaler.initial_scale_power > 127 {
            let what = format!("2 to the power of {} is infinite in float32", scaler.initial_scale_power);
            document.refuse("fp16.initial_scale_power", what, "set 16, or another number up to 127");
        }
        if bf16.bf16_optimizer_states && !bf16.bf16_master_weights_and_grads {
            document.refuse(
                "bf16.bf16_optimizer_states",
                "true without bf16_master_weights_and_grads".to_owned(),
                "set bf16_master_weights_and_grads=true, too",
            );
        }
        if *low && !enabled {
            let key = "fp16.fp16_master_weights_and_grads";
            document.note(key, "weights are float16 with fp16.enabled=true only");
        }
    }

    /// How gradients are put together.
    fn check_reduction(&self, document: &mut Document) {
        let (stage, sums) = (self.zero.stage.min(3), self.gradient_allreduce_op == ReduceOp::Sum);
        let factor = self.gradient_predivide_factor;
        for (key, is_set, value) in [
            ("prescale_gradients", self.prescale_gradients, "true".to_owned()),
            ("gradient_predivide_factor", factor != 1.0, factor.to_string()),
        ] {
            if !is_set {
                continue;
            }
            match stage {
                2.. if self.zero.reduce_scatter && !sums => {
                    let what = format!("{value} does not go with stage {stage} and reduce_scatter");
                    let remedy = "remove it, or set zero_optimization.reduce_scatter=false";
                    document.refuse(key, what, remedy);
                }
                1 if sums => document.note(key, "gradients are summed"),
                1 if self.scatters() => document.note(key, "set zero_optimization.reduce_scatter=false"),
                _ => {}
            }
        }
        if sums && stage == 3 {
            let what = "sum does not go with stage 3".to_owned();
            document.refuse("gradient_allreduce_op", what, "use mean, or a lower stage");
        }
    }
}
