//! What a DeepSpeed file says, with DeepSpeed's defaults, checked key by key.

use tch::Kind;

use super::batch::BatchSizes;
use super::document::{self, Data, Entry};
use super::section::{Findings, Section};
use super::zero_section::{ZeroSection, read_zero};
use crate::error::{ConfigError, ConfigProblem};
use crate::optim::{LrSchedulerConfig, OptimizerConfig};
use crate::precision::LossScalerConfig;
use crate::strategy::zero::config::GradientReduction;

/// The settings of a DeepSpeed file. Keys with which nothing can be done here are no part of it: they are refused, or named
/// in `notes`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DeepSpeedSettings {
    pub batch: BatchSizes,
    /// Limit of the norm of the gradients; the trainer's unless set.
    pub gradient_clipping: Option<f64>,
    /// Dtype in which gradients travel; by the precision unless set.
    pub communication_data_type: Option<Kind>,
    pub prescale_gradients: bool,
    pub gradient_predivide_factor: f64,
    pub sums_gradients: bool,
    pub zero_allow_untested_optimizer: bool,
    pub zero_force_ds_cpu_optimizer: bool,
    /// Dtype in which gradients are accumulated; that of the weights unless set.
    pub grad_accum_dtype: Option<Kind>,
    pub fp16: Fp16,
    pub bf16: Bf16,
    /// Whether the file has the sections `fp16` and `bf16`, which then decide the precision.
    pub names_precision: bool,
    pub zero: ZeroSection,
    pub optimizer: Option<OptimizerConfig>,
    pub scheduler: Option<LrSchedulerConfig>,
    /// Keys that have no effect, a sentence each.
    pub notes: Vec<String>,
    /// Those of them that DeepSpeed does not have, as mistakes beside others.
    pub unknown_keys: Vec<ConfigProblem>,
}

/// Section `fp16`: float16 weights, and how the loss is scaled.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Fp16 {
    pub enabled: bool,
    pub scaler: LossScalerConfig,
}

/// Section `bf16`: bfloat16 weights.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bf16 {
    pub enabled: bool,
    /// Steps whose gradients are not finite are left out.
    pub check_grad_overflow: bool,
    /// Weights and optimizer states are bfloat16 alone.
    pub optimizer_states: bool,
}

impl Default for Bf16 {
    fn default() -> Self {
        Self { enabled: false, check_grad_overflow: true, optimizer_states: false }
    }
}

/// DeepSpeed's words for dtypes.
pub(super) const DTYPES: [(&str, Kind); 9] = [
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

impl DeepSpeedSettings {
    /// How the gradients of the ranks are put together. DeepSpeed divides by the number of ranks beforehand in stage 2 and 3, or if told so,
    /// or if sums are scattered; its optimizer for bfloat16 with sums in float32 does not scatter.
    pub fn gradient_reduction(&self) -> GradientReduction {
        if self.sums_gradients {
            return GradientReduction::Sum;
        }
        if self.prescale_gradients || self.scatters() {
            return GradientReduction::Mean;
        }
        GradientReduction::Predivided(self.gradient_predivide_factor)
    }

    /// Whether DeepSpeed gives each rank its part of the sums only.
    fn scatters(&self) -> bool {
        let is_bf16_optimizer =
            self.bf16.enabled && self.zero.stage == 1 && self.grad_accum_dtype == Some(Kind::Float);
        self.zero.reduce_scatter && !is_bf16_optimizer
    }

    /// Reads a file's text; `path` is its name in errors.
    pub fn of_text(path: &str, text: &str) -> Result<Self, ConfigError> {
        Self::of_entry(path, "", &document::parse(path, text)?)
    }

    /// Reads settings given as a value; `key` is where they are.
    pub fn of_value(key: &str, value: &serde_json::Value) -> Result<Self, ConfigError> {
        Self::of_entry("", key, &document::from_value(key, value)?)
    }

    fn of_entry(path: &str, key: &str, entry: &Entry) -> Result<Self, ConfigError> {
        let mut found = Findings { path: path.to_owned(), ..Findings::default() };
        let Data::Map(entries) = &entry.data else {
            let what = format!("{} is not a section", entry.shown());
            let key = if key.is_empty() { "DeepSpeed file" } else { key };
            return Err(ConfigError::new(key, what, "write the settings in braces"));
        };
        let mut top = Section::new(key, entries);
        let settings = read(&mut top, &mut found);
        top.finish_leniently(&mut found);
        if found.problems.is_empty() {
            Ok(Self { notes: found.notes, unknown_keys: found.unknown, ..settings })
        } else {
            let problems = found.problems.into_iter().chain(found.unknown).collect();
            Err(ConfigError { problems })
        }
    }
}

fn read(top: &mut Section<'_>, found: &mut Findings) -> DeepSpeedSettings {
    refuse_removed(top, found);
    note_idle(top, found);
    let batch = BatchSizes {
        train_batch_size: top.count(found, "train_batch_size", 1),
        train_micro_batch_size_per_gpu: top.count(found, "train_micro_batch_size_per_gpu", 1),
    };
    if let Some(entry) = top.get("gradient_accumulation_steps") {
        let what = format!("{} is set, but the trainer accumulates", entry.shown());
        top.refuse(found, "gradient_accumulation_steps", entry, what, "set trainer.accumulate_grad_batches");
    }
    let zero = read_zero(top, found);
    let stage = zero.stage;
    let settings = DeepSpeedSettings {
        batch,
        gradient_clipping: top.number(found, "gradient_clipping", 0.0),
        communication_data_type: top.choice(found, "communication_data_type", &DTYPES),
        prescale_gradients: top.flag(found, "prescale_gradients", false),
        gradient_predivide_factor: top
            .number(found, "gradient_predivide_factor", f64::MIN_POSITIVE)
            .unwrap_or(1.0),
        sums_gradients: top
            .choice(found, "gradient_allreduce_op", &[("mean", false), ("sum", true)])
            .unwrap_or(false),
        zero_allow_untested_optimizer: top.flag(found, "zero_allow_untested_optimizer", false),
        zero_force_ds_cpu_optimizer: top.flag(found, "zero_force_ds_cpu_optimizer", true),
        grad_accum_dtype: read_data_types(top, found),
        names_precision: ["fp16", "bf16", "bfloat16"].into_iter().any(|key| top.get(key).is_some()),
        fp16: read_fp16(top, found),
        bf16: read_bf16(top, found),
        zero,
        optimizer: read_optimizer(top, found),
        scheduler: read_scheduler(top, found),
        notes: Vec::new(),
        unknown_keys: Vec::new(),
    };
    refuse_together(top, found, &settings, stage);
    read_activation_checkpointing(top, found);
    read_aio(top, found);
    read_checkpoint(top, found);
    settings
}

/// Values that are fine each, but not together.
fn refuse_together(top: &mut Section<'_>, found: &mut Findings, settings: &DeepSpeedSettings, stage: u64) {
    if settings.fp16.enabled
        && settings.bf16.enabled
        && let Some(entry) = top.get("fp16")
    {
        let what = "fp16 and bf16 are both enabled".to_owned();
        top.refuse(found, "fp16", entry, what, "enable one of the two");
    }
    let scatters = stage >= 2 && settings.zero.reduce_scatter;
    let scaled = [
        ("prescale_gradients", settings.prescale_gradients),
        ("gradient_predivide_factor", settings.gradient_predivide_factor != 1.0),
    ];
    for (key, _) in scaled.into_iter().filter(|(_, is_set)| *is_set && scatters && !settings.sums_gradients) {
        if let Some(entry) = top.get(key) {
            let what = format!("{} does not go with stage {stage} and reduce_scatter", entry.shown());
            top.refuse(found, key, entry, what, "remove it, or set zero_optimization.reduce_scatter=false");
        }
    }
    let has_effect = !settings.sums_gradients && !settings.scatters();
    for (key, is_set) in scaled.into_iter().filter(|_| stage == 1 && !has_effect) {
        if is_set {
            let why = if settings.sums_gradients {
                "gradients are summed"
            } else {
                "set zero_optimization.reduce_scatter=false"
            };
            top.note(found, key, why);
        }
    }
    if settings.sums_gradients
        && stage == 3
        && let Some(entry) = top.get("gradient_allreduce_op")
    {
        let what = "sum does not go with stage 3".to_owned();
        top.refuse(found, "gradient_allreduce_op", entry, what, "use mean, or a lower stage");
    }
    if !settings.zero.computes_grad_norm
        && settings.gradient_clipping.is_some_and(|limit| limit > 0.0)
        && let Some(entry) = top.get("gradient_clipping")
    {
        let what = format!("{} needs the norm, and compute_grad_norm is false", entry.shown());
        top.refuse(
            found,
            "gradient_clipping",
            entry,
            what,
            "set 0, or zero_optimization.compute_grad_norm=true",
        );
    }
}

fn refuse_removed(top: &mut Section<'_>, found: &mut Findings) {
    let removed = [
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "sparse_gradients",
        "eigenvalue",
        "sparse_attention",
        "elasticity",
        "graph_harvesting",
        "curriculum_learning",
        "progressive_layer_drop",
    ];
    for key in removed {
        if let Some(entry) = top.get(key) {
            let what = "DeepSpeed has had it in older versions only".to_owned();
            top.refuse(found, key, entry, what, "remove it");
        }
    }
    top.refused(found, &["autotuning"], "autotuning is not supported", "remove it");
    let absent =
        ["compile", "hybrid_engine", "expert_parallel", "data_efficiency", "pipeline", "tensor_parallel"];
    top.refused(found, &absent, "voltaic does not have it", "remove it");
    top.refused(found, &["torch_autocast"], "precision is the trainer's", "set trainer.precision");
    let inference = [
        "dtype",
        "replace_with_kernel_inject",
        "enable_cuda_graph",
        "injection_policy",
        "injection_policy_tuple",
    ];
    top.refused(found, &inference, "inference settings are not there yet", "remove it");
    top.idle(found, &["replace_method"], "there is no kernel injection");
    if let Some(false) = top.get("managed_gradient_accumulation").and_then(|entry| match entry.data {
        Data::Bool(flag) => Some(flag),
        _ => None,
    }) && let Some(entry) = top.get("managed_gradient_accumulation")
    {
        let what = "false is for training loops of your own".to_owned();
        top.refuse(found, "managed_gradient_accumulation", entry, what, "remove it: the trainer accumulates");
    }
}

/// Keys of DeepSpeed that do nothing here.
fn note_idle(top: &mut Section<'_>, found: &mut Findings) {
    top.idle(
        found,
        &["steps_per_print"],
        "what is logged, and how often, is the trainer's (log_every_n_steps)",
    );
    top.idle(
        found,
        &[
            "seq_parallel_communication_data_type",
            "sequence_parallel_size",
            "use_data_before_expert_parallelism",
        ],
        "there is no sequence parallelism",
    );
    top.idle(
        found,
        &["wall_clock_breakdown", "memory_breakdown", "flops_profiler", "timers"],
        "set trainer.profiler",
    );
    top.idle(found, &["comms_logger"], "set VOLTAIC_LOG=debug to see the collectives");
    top.idle(found, &["tensorboard", "wandb", "csv_monitor", "comet"], "set trainer.logger");
    top.idle(found, &["dump_state"], "`--print_config` shows what is in force");
    top.idle(found, &["disable_allgather"], "weights are always gathered");
    top.idle(found, &["disable_python_gc"], "there is no Python");
    top.idle(found, &["dataloader_drop_last"], "loaders are made by the data module");
    top.idle(found, &["zero_force_ds_cpu_optimizer"], "nothing is offloaded");
    top.idle(found, &["vocabulary_size"], "DeepSpeed only warns by it");
    top.idle(found, &["local_rank", "zero_allow_comm_data_type_fp32"], "it is for DeepSpeed's launcher");
}

fn read_data_types(top: &mut Section<'_>, found: &mut Findings) -> Option<Kind> {
    let mut section = top.section(found, "data_types")?;
    let accumulated = section.choice(found, "grad_accum_dtype", &DTYPES);
    section.idle(
        found,
        &["param_dtype", "buffer_dtype", "keep_in_fp32_modules"],
        "the sections fp16 and bf16 decide",
    );
    section.finish(found);
    accumulated
}

fn read_fp16(top: &mut Section<'_>, found: &mut Findings) -> Fp16 {
    let standard = LossScalerConfig::default();
    let Some(mut section) = top.section(found, "fp16") else { return Fp16::default() };
    let enabled = section.flag(found, "enabled", false);
    let scaler = LossScalerConfig {
        loss_scale: section.number(found, "loss_scale", 0.0).unwrap_or(standard.loss_scale),
        initial_scale_power: section
            .count(found, "initial_scale_power", 0)
            .map_or(standard.initial_scale_power, |power| u32::try_from(power).unwrap_or(u32::MAX)),
        loss_scale_window: section.count(found, "loss_scale_window", 1).unwrap_or(standard.loss_scale_window),
        hysteresis: section.count(found, "hysteresis", 1).unwrap_or(standard.hysteresis),
        consecutive_hysteresis: section.flag(found, "consecutive_hysteresis", false),
        min_loss_scale: section
            .number(found, "min_loss_scale", f64::MIN_POSITIVE)
            .unwrap_or(standard.min_loss_scale),
    };
    for (key, number) in [("loss_scale", scaler.loss_scale), ("min_loss_scale", scaler.min_loss_scale)] {
        if number > f64::from(f32::MAX)
            && let Some(entry) = section.get(key)
        {
            let what = format!("{} is infinite in float32", entry.shown());
            section.refuse(found, key, entry, what, "set a smaller number");
        }
    }
    if scaler.initial_scale_power > 127
        && let Some(entry) = section.get("initial_scale_power")
    {
        let what = format!("2 to the power of {} is infinite in float32", entry.shown());
        section.refuse(found, "initial_scale_power", entry, what, "set 16, or another number up to 127");
    }
    if !enabled {
        let of_scale = [
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        ];
        section.idle(found, &of_scale, "the loss is scaled with fp16.enabled=true only");
    }
    section.refused(found, &["auto_cast"], "inputs are not cast", "remove it: return float16 batches");
    let low = ["fp16_master_weights_and_grads"];
    section.refused(found, &low, "master weights are float32", "remove it");
    section.finish(found);
    Fp16 { enabled, scaler }
}

fn read_bf16(top: &mut Section<'_>, found: &mut Findings) -> Bf16 {
    let entries = (top.get("bf16"), top.get("bfloat16"));
    if let (Some(_), Some(entry)) = entries {
        let what = "is given beside bf16, which is the same".to_owned();
        top.refuse(found, "bfloat16", entry, what, "remove one of the two");
    }
    let key = if entries.0.is_some() { "bf16" } else { "bfloat16" };
    let Some(mut section) = top.section(found, key) else { return Bf16::default() };
    let bf16 = Bf16 {
        enabled: section.flag(found, "enabled", false),
        check_grad_overflow: section.flag(found, "check_grad_overflow", true),
        optimizer_states: section.flag(found, "bf16_optimizer_states", false),
    };
    let has_low_masters = section.flag(found, "bf16_master_weights_and_grads", false);
    if has_low_masters
        && !bf16.optimizer_states
        && let Some(entry) = section.get("bf16_master_weights_and_grads")
    {
        let what = "true without bf16_optimizer_states needs an offload, which is not there yet".to_owned();
        section.refuse(
            found,
            "bf16_master_weights_and_grads",
            entry,
            what,
            "set bf16_optimizer_states=true, too",
        );
    }
    if bf16.optimizer_states
        && !has_low_masters
        && let Some(entry) = section.get("bf16_optimizer_states")
    {
        let what = "true without bf16_master_weights_and_grads".to_owned();
        section.refuse(
            found,
            "bf16_optimizer_states",
            entry,
            what,
            "set bf16_master_weights_and_grads=true, too",
        );
    }
    section.idle(found, &["immediate_grad_update"], "gradients are always taken as they appear");
    section.finish(found);
    bf16
}

/// Names that DeepSpeed takes in lower case.
const OPTIMIZERS: [(&str, &str); 6] = [
    ("adam", "Adam"),
    ("adamw", "AdamW"),
    ("adagrad", "Adagrad"),
    ("lion", "Lion"),
    ("lamb", "Lamb"),
    ("muon", "MuonWithAuxAdam"),
];

/// The settings of section `key` that voltaic's class of this name takes.
fn class_of<'a>(
    top: &mut Section<'a>,
    found: &mut Findings,
    key: &'static str,
) -> Option<(&'a str, serde_json::Map<String, serde_json::Value>, Section<'a>)> {
    let mut section = top.section(found, key)?;
    let name = section.text(found, "type");
    let params = match section.get("params").map(|entry| (entry, &entry.data)) {
        None => Vec::new(),
        Some((_, Data::Map(entries))) => entries.clone(),
        Some((entry, _)) => {
            let what = format!("{} is not a section", entry.shown());
            section.refuse(found, "params", entry, what, "write the settings in braces");
            Vec::new()
        }
    };
    // `auto` leaves a setting to its default
    let is_open = |entry: &Entry| matches!(&entry.data, Data::Text(text) if text == "auto");
    let params =
        params.into_iter().filter(|(_, entry)| !is_open(entry)).map(|(key, entry)| (key, entry.to_value()));
    let params = params.collect();
    let Some(name) = name else {
        if let Some(entry) = top.get(key) {
            top.refuse(found, &format!("{key}.type"), entry, "is missing".to_owned(), "name the class");
        }
        return None;
    };
    Some((name, params, section))
}

/// A setting of an optimizer as it is written, such as `betas[0]`; the optimizer itself if it is not.
fn setting<'a>(optimizer: &'a Entry, key: &str) -> &'a Entry {
    let child = |entry: &'a Entry, key: &str| match &entry.data {
        Data::Map(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, entry)| entry),
        _ => None,
    };
    let name = key.split('[').next().unwrap_or(key);
    child(optimizer, "params").and_then(|params| child(params, name)).unwrap_or(optimizer)
}

fn read_optimizer(top: &mut Section<'_>, found: &mut Findings) -> Option<OptimizerConfig> {
    let (name, mut params, mut section) = class_of(top, found, "optimizer")?;
    section.idle(found, &["legacy_fusion"], "it is for DeepSpeed's fused kernels");
    let entry = top.get("optimizer")?;
    if let Some(norm) = params.remove("max_grad_norm") {
        let what = format!("{norm} is not a setting of an optimizer");
        top.refuse(found, "optimizer.params.max_grad_norm", entry, what, "set gradient_clipping");
    }
    let lower = name.to_lowercase();
    let known = OPTIMIZERS.iter().find(|(known, _)| *known == lower);
    let mut class = known.map_or(name, |(_, class)| *class);
    match class {
        "Adam" | "AdamW" => class = adam_class(class, &mut params),
        "MuonWithAuxAdam" => {
            take_flag(&mut params, "torch_adam", false);
            take_flag(&mut params, "fp32_optimizer_states", true);
            if take_flag(&mut params, "per_head_muon", false) {
                let what = "true: heads are not updated by themselves".to_owned();
                let at = setting(entry, "per_head_muon");
                top.refuse(found, "optimizer.params.per_head_muon", at, what, "set false");
            }
        }
        _ => {}
    }
    section.finish(found);
    let written = serde_json::json!({"class_path": class, "init_args": params});
    match serde_json::from_value::<OptimizerConfig>(written) {
        Ok(config) => {
            for ConfigProblem { key, problem, .. } in config.problems() {
                let key = key.trim_start_matches("optimizer.init_args.");
                let at = setting(entry, key);
                top.refuse(found, &format!("optimizer.params.{key}"), at, problem.what, problem.remedy);
            }
            Some(config)
        }
        Err(error) => {
            top.refuse(found, "optimizer", entry, error.to_string(), "use a setting of this optimizer");
            None
        }
    }
}

fn take_flag(params: &mut serde_json::Map<String, serde_json::Value>, key: &str, default: bool) -> bool {
    let flag = params.get(key).and_then(serde_json::Value::as_bool);
    if flag.is_some() {
        params.remove(key); // anything else stays, and is refused
    }
    flag.unwrap_or(default)
}

/// DeepSpeed's Adam is AdamW unless `adam_w_mode` is false; its weight decay is 0 unless given. `torch_adam` and
/// `fp32_optimizer_states` choose kernels, and the numbers stay the same.
fn adam_class(class: &str, params: &mut serde_json::Map<String, serde_json::Value>) -> &'static str {
    let (is_torch, w_mode) = (take_flag(params, "torch_adam", false), take_flag(params, "adam_w_mode", true));
    take_flag(params, "fp32_optimizer_states", true);
    if !params.contains_key("weight_decay") && !is_torch {
        params.insert("weight_decay".to_owned(), 0.0.into());
    }
    let decoupled = class == "AdamW" || w_mode;
    if decoupled { "AdamW" } else { "Adam" }
}

fn read_scheduler(top: &mut Section<'_>, found: &mut Findings) -> Option<LrSchedulerConfig> {
    let (name, params, section) = class_of(top, found, "scheduler")?;
    section.finish(found);
    let entry = top.get("scheduler")?;
    match serde_json::from_value(serde_json::json!({"class_path": name, "init_args": params})) {
        Ok(config) => Some(config),
        Err(error) => {
            top.refuse(found, "scheduler", entry, error.to_string(), "use a setting of this schedule");
            None
        }
    }
}

/// Checked, and refused if it would have an effect.
fn read_activation_checkpointing(top: &mut Section<'_>, found: &mut Findings) {
    let Some(mut section) = top.section(found, "activation_checkpointing") else { return };
    let keys = [
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "profile",
    ];
    for key in keys {
        let entry = section.get(key);
        if let (Some(true), Some(entry)) = (section.as_flag(found, key, entry), entry) {
            let what = "checkpointed activations are not there yet".to_owned();
            section.refuse(found, key, entry, what, "set false");
        }
    }
    if section.count(found, "number_checkpoints", 0).is_some() {
        section.note(found, "number_checkpoints", "activations are not checkpointed");
    }
    section.finish_leniently(found);
}

/// How files of an offload are read and written; has no effect without one.
fn read_aio(top: &mut Section<'_>, found: &mut Findings) {
    let Some(mut section) = top.section(found, "aio") else { return };
    section.count(found, "block_size", 1);
    section.count(found, "queue_depth", 1);
    let threads = section.get_either(found, "intra_op_parallelism", "thread_count");
    section.as_count(found, "intra_op_parallelism", threads, 1);
    section.flag(found, "single_submit", false);
    section.flag(found, "overlap_events", true);
    section.refused(found, &["use_gds"], "it is for GPUs only", "set false");
    section.finish_leniently(found);
    top.note(found, "aio", "nothing is offloaded to files");
}

fn read_checkpoint(top: &mut Section<'_>, found: &mut Findings) {
    let Some(mut section) = top.section(found, "checkpoint") else { return };
    let modes = [("Ignore", ()), ("Warn", ()), ("Fail", ())];
    if section.choice(found, "tag_validation", &modes).is_some() {
        section.note(found, "tag_validation", "rank 0 alone names a checkpoint");
    }
    section.idle(found, &["load_universal"], "a checkpoint can be loaded with any number of ranks as it is");
    let ways = ["use_node_local_storage", "parallel_write", "checkpoint_serialization", "writer"];
    section.idle(found, &ways, "how checkpoints are written is the trainer's (plugins)");
    section.finish_leniently(found);
}
