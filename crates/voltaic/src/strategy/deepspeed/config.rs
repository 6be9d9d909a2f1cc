//! `DeepSpeedStrategy` and `HPUDeepSpeedStrategy` with their arguments.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use voltaic_macros::Defaults;

use super::inference::{InferenceSettings, TensorParallel, inference_of};
use super::settings::{DeepSpeedSettings, TITLE};
use crate::config::{Document, read_text_file, setters};
use crate::error::{ConfigError, ConfigProblem};

/// Arguments that have an effect with float16 only.
const OF_LOSS_SCALE: [&str; 5] =
    ["loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"];

/// A longer file is not one of settings.
const MAX_FILE: u64 = 1 << 20;

/// Variable that names a file of settings, if neither the class nor its name has some.
const PATH_VARIABLE: &str = "PL_DEEPSPEED_CONFIG_PATH";

/// Arguments of Lightning's `DeepSpeedStrategy`, and of `HPUDeepSpeedStrategy`, with their names and defaults.
///
/// ```
/// use voltaic::strategy::DeepSpeedStrategy;
/// let strategy = DeepSpeedStrategy::stage(2).reduce_bucket_size(50_000_000);
/// let by_file = DeepSpeedStrategy::file("ds.json");
/// # assert_eq!((strategy.stage, by_file.config.is_some()), (2, true));
/// ```
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = refused()))]
pub struct DeepSpeedStrategy {
    /// Whether optimizer states and more are sharded over ranks.
    #[default(true)]
    pub zero_optimization: bool,
    /// What is sharded: 1 optimizer states, 2 gradients too, 3 weights too.
    #[default(2)]
    pub stage: u64,
    /// Where weights are made: `cpu` or `nvme`. With stage 3 they are made unit by unit in any case, and each rank keeps its shard where
    /// `offload_parameters` says.
    pub remote_device: Option<String>,
    /// Whether optimizer states are kept off the device.
    pub offload_optimizer: bool,
    /// Whether weights are kept off the device, with stage 3.
    pub offload_parameters: bool,
    /// Where weights are kept then: `cpu` or `nvme`.
    #[default("cpu".to_owned())]
    pub offload_params_device: String,
    /// Folder on a fast disk, for `nvme`.
    #[default("/local_nvme".to_owned())]
    pub nvme_path: String,
    /// Number of buffers for weights, for `nvme`.
    #[default(5)]
    pub params_buffer_count: u64,
    /// Elements of such a buffer.
    #[default(100_000_000)]
    pub params_buffer_size: u64,
    /// Most elements of weights that stay in the host's memory, for `nvme`.
    #[default(1_000_000_000)]
    pub max_in_cpu: u64,
    /// Where optimizer states are kept if they are off the device: `cpu` or `nvme`.
    #[default("cpu".to_owned())]
    pub offload_optimizer_device: String,
    /// Number of buffers for optimizer states, for `nvme`.
    #[default(4)]
    pub optimizer_buffer_count: u64,
    /// Bytes of one read or write, for `nvme`.
    #[default(1_048_576)]
    pub block_size: u64,
    /// Reads and writes under way at a time, for `nvme`.
    #[default(8)]
    pub queue_depth: u64,
    /// Submits reads and writes one by one.
    pub single_submit: bool,
    /// Submits reads and writes while others are under way.
    #[default(true)]
    pub overlap_events: bool,
    /// Threads of one read or write.
    #[default(1)]
    pub thread_count: u64,
    /// Whether memory of the host that is copied from and to is pinned.
    pub pin_memory: bool,
    /// Elements that are updated at a time, with stage 3.
    #[default(1_000_000_000_000)]
    pub sub_group_size: u64,
    /// Gradients lie in one piece.
    #[default(true)]
    pub contiguous_gradients: bool,
    /// Gradients travel while backward runs.
    #[default(true)]
    pub overlap_comm: bool,
    /// Weights are gathered by one collective.
    #[default(true)]
    pub allgather_partitions: bool,
    /// Each rank gets its part of the gradients only.
    #[default(true)]
    pub reduce_scatter: bool,
    /// Most elements of weights that travel together; even.
    #[default(200_000_000)]
    pub allgather_bucket_size: u64,
    /// Most elements of gradients that travel together.
    #[default(200_000_000)]
    pub reduce_bucket_size: u64,
    /// Takes optimizers that DeepSpeed has not tested.
    #[default(true)]
    pub zero_allow_untested_optimizer: bool,
    /// Samples of one batch of a rank, to which the batch sizes of a file must fit: a number, or `auto` for the loader's.
    #[default(Some(Value::from("auto")))]
    pub logging_batch_size_per_gpu: Option<Value>,
    /// Settings as in a DeepSpeed file, or the file's path. The other arguments have no effect then.
    pub config: Option<Value>,
    /// Level of DeepSpeed's log; has no effect, as there is one log (VOLTAIC_LOG).
    pub logging_level: Option<Value>,
    /// Constant factor of the loss with float16; 0 for a dynamic one.
    pub loss_scale: f64,
    /// The dynamic factor begins with 2 to the power of this.
    #[default(16)]
    pub initial_scale_power: u64,
    /// Steps without overflow after which the factor doubles.
    #[default(1000)]
    pub loss_scale_window: u64,
    /// Overflows before the factor is halved.
    #[default(2)]
    pub hysteresis: u64,
    /// Least factor.
    #[default(1)]
    pub min_loss_scale: u64,
    /// Divides inputs of checkpointed segments among the ranks of a model-parallel group; without one they stay whole.
    pub partition_activations: bool,
    /// Keeps inputs of checkpointed segments in the host's memory.
    pub cpu_checkpointing: bool,
    /// Keeps inputs of checkpointed segments in one piece.
    pub contiguous_memory_optimization: bool,
    /// Waits for the device before and after each checkpointed segment.
    pub synchronize_checkpoint_boundary: bool,
    /// Loads one file with all weights, with stage 3.
    pub load_full_weights: bool,
    /// Library of the collectives, which must be the accelerator's. That one unless set.
    pub process_group_backend: Option<String>,
    /// The devices, which must be those of `trainer.devices`: their number, or a list.
    pub parallel_devices: Option<Value>,
    /// Seconds that ranks wait for each other.
    #[default(crate::distributed::DEFAULT_TIMEOUT.as_secs_f64())]
    pub timeout_secs: f64,
    /// With stage 3: after a fit or an evaluation the module is unsharded on each rank; without, it stays sharded,
    /// and each evaluation divides it again.
    #[default(true)]
    pub gather_after_fit: bool,
    /// Leaves frozen parameters out of checkpoints.
    pub exclude_frozen_parameters: bool,
    /// What may differ between ranks, by the keys that the error of a difference names; a key stands for those below it, too.
    pub allow_differences: Vec<String>,
    /// Layers are divided among ranks, for inference: `{tp_size: 8}`. This and the following keys select inference
    /// (`deepspeed.init_inference`), which trains nothing; each may be in `config`, too.
    pub tensor_parallel: Option<TensorParallel>,
    /// Dtype of the weights, for inference: `float`, `half`, `bf16`.
    pub dtype: Option<String>,
    /// DeepSpeed's kernels, for inference: voltaic's own are used in any case.
    pub replace_with_kernel_inject: Option<bool>,
    /// Calls that a step makes by `ctx.graphed` are replayed, for inference with `tp_size` 1.
    pub enable_cuda_graph: Option<bool>,
    /// Names of row-wise layers by the type of their module, for inference: `{Block: [attn.out, mlp.out]}`, `{Net: l1}`.
    pub injection_policy: Option<Value>,
    /// Has no effect, as in DeepSpeed.
    pub replace_method: Option<String>,
    /// Weights to begin with, for inference.
    pub checkpoint: Option<String>,
    /// Folder that `checkpoint` is in.
    pub base_dir: Option<String>,
}

/// Arguments of inference.
const OF_INFERENCE: [&str; 8] = [
    "tensor_parallel",
    "dtype",
    "replace_with_kernel_inject",
    "enable_cuda_graph",
    "injection_policy",
    "replace_method",
    "checkpoint",
    "base_dir",
];

/// Arguments that count whatever the settings are.
const OF_ALL: [&str; 7] = [
    "config",
    "parallel_devices",
    "timeout_secs",
    "process_group_backend",
    "gather_after_fit",
    "exclude_frozen_parameters",
    "allow_differences",
];

/// Settings that were read.
pub(crate) enum Read {
    Training(Box<DeepSpeedSettings>),
    Inference(InferenceSettings),
}

/// Arguments of Lightning's class that are the trainer's own here.
fn refused() -> Value {
    let refused = |what: &str, remedy: &str| json!({"what": what, "remedy": remedy});
    json!({
        "accelerator": refused("the trainer has one accelerator", "set trainer.accelerator"),
        "precision_plugin": refused("the trainer has one precision", "name a class in trainer.plugins"),
        "cluster_environment": refused("the launcher is known by the variables that it sets", "remove it"),
        "timeout": refused("is given in seconds here", "set timeout_secs"),
    })
}

impl DeepSpeedStrategy {
    /// Lightning's settings with another stage.
    pub fn stage(stage: u64) -> Self {
        Self { stage, ..Self::default() }
    }

    /// By a DeepSpeed file.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        let path = path.into().to_string_lossy().into_owned();
        Self { config: Some(Value::from(path)), ..Self::default() }
    }

    /// By settings as in a DeepSpeed file.
    pub fn settings(config: Value) -> Self {
        Self { config: Some(config), ..Self::default() }
    }

    setters! {
        /// Sets the most elements of gradients that travel together.
        #[must_use]
        reduce_bucket_size: u64;
        /// Sets whether optimizers are taken that DeepSpeed has not tested.
        #[must_use]
        zero_allow_untested_optimizer: bool;
    }

    /// The arguments as DeepSpeed's settings, as Lightning writes them.
    fn generated(&self) -> Value {
        let mut zero = json!({
            "stage": if self.zero_optimization { self.stage } else { 0 },
            "contiguous_gradients": self.contiguous_gradients,
            "overlap_comm": self.overlap_comm,
            "allgather_partitions": self.allgather_partitions,
            "reduce_scatter": self.reduce_scatter,
            "allgather_bucket_size": self.allgather_bucket_size,
            "reduce_bucket_size": self.reduce_bucket_size,
            "sub_group_size": self.sub_group_size,
        });
        if self.offload_optimizer {
            zero["offload_optimizer"] = json!({
                "device": self.offload_optimizer_device,
                "nvme_path": self.nvme_path,
                "buffer_count": self.optimizer_buffer_count,
                "pin_memory": self.pin_memory,
            });
        }
        if self.offload_parameters {
            zero["offload_param"] = json!({
                "device": self.offload_params_device,
                "nvme_path": self.nvme_path,
                "buffer_count": self.params_buffer_count,
                "buffer_size": self.params_buffer_size,
                "max_in_cpu": self.max_in_cpu,
                "pin_memory": self.pin_memory,
            });
        }
        let mut all = json!({
            "activation_checkpointing": {
                "partition_activations": self.partition_activations,
                "cpu_checkpointing": self.cpu_checkpointing,
                "contiguous_memory_optimization": self.contiguous_memory_optimization,
                "synchronize_checkpoint_boundary": self.synchronize_checkpoint_boundary,
            },
            "aio": {
                "block_size": self.block_size,
                "queue_depth": self.queue_depth,
                "single_submit": self.single_submit,
                "overlap_events": self.overlap_events,
                "thread_count": self.thread_count,
            },
            "zero_allow_untested_optimizer": self.zero_allow_untested_optimizer,
            "zero_optimization": zero,
        });
        if let Some(size) = self.logging_batch_size_per_gpu.as_ref().filter(|size| size.is_number()) {
            all["train_micro_batch_size_per_gpu"] = size.clone();
        }
        all
    }

    /// The settings in force: of `config`, of the file that the environment names, or of the arguments. Those of inference are looked for
    /// first.
    pub(crate) fn read(&self) -> Result<Read, ConfigError> {
        const KEY: &str = "trainer.strategy.config";
        let by_variable = std::env::var(PATH_VARIABLE).ok().filter(|path| !path.is_empty());
        let document = match (&self.config, by_variable) {
            (Some(Value::String(path)), _) => Some(read_file(KEY, path)?),
            (Some(config), _) => Some(Document::of_value(TITLE, KEY, config)?),
            (None, Some(path)) => Some(read_file(PATH_VARIABLE, &path)?),
            (None, None) => None,
        };
        let document = match inference_of(document, &self.inference_arguments(), "trainer.strategy")? {
            Ok(mut settings) => {
                let key = settings.key.clone();
                let idle = format!("{key} selects inference");
                settings.notes.extend(self.idle(&|key| OF_INFERENCE.contains(&key), &idle));
                return Ok(Read::Inference(settings));
            }
            Err(document) => document,
        };
        let mut settings = match document {
            Some(document) => DeepSpeedSettings::of_document(document)?,
            None => {
                let mut settings = DeepSpeedSettings::of_value("", &self.generated())
                    .map_err(|error| self.by_arguments(error))?;
                self.keep_own_notes(&mut settings.notes);
                settings
            }
        };
        self.complete(&mut settings);
        Ok(Read::Training(Box::new(settings)))
    }

    /// The arguments of inference that are given.
    fn inference_arguments(&self) -> Map<String, Value> {
        let own = json!(self);
        let given = OF_INFERENCE.into_iter().map(|key| (key.to_owned(), own[key].clone()));
        given.filter(|(_, value)| !value.is_null()).collect()
    }

    /// Arguments that were set and do not count, a sentence each.
    fn idle(&self, counts: &dyn Fn(&str) -> bool, why: &str) -> Vec<String> {
        let standard = Self { config: None, ..Self::default() };
        let (own, standard) = (json!({ "of": self }), json!({ "of": standard }));
        let set = own["of"].as_object().into_iter().flatten();
        let idle = set.filter(|(key, value)| {
            !counts(key) && !OF_ALL.contains(&key.as_str()) && standard["of"][key] != **value
        });
        idle.map(|(key, _)| format!("trainer.strategy.{key} has no effect: {why}")).collect()
    }

    /// Fills in what Lightning takes from the arguments, however the settings were given.
    fn complete(&self, settings: &mut DeepSpeedSettings) {
        if !settings.names_precision {
            let fp16 = &mut settings.fp16.scaler;
            fp16.loss_scale = self.loss_scale;
            fp16.initial_scale_power = u32::try_from(self.initial_scale_power).unwrap_or(u32::MAX);
            fp16.loss_scale_window = self.loss_scale_window;
            fp16.hysteresis = self.hysteresis;
            fp16.min_loss_scale = self.min_loss_scale as f64;
        }
        if self.config.is_some() {
            let counts = |key: &str| OF_LOSS_SCALE.contains(&key) && !settings.names_precision;
            settings.notes.extend(self.idle(&counts, "the settings were given as DeepSpeed's"));
        }
        if self.logging_level.is_some() {
            settings.notes.push("trainer.strategy.logging_level has no effect: set VOLTAIC_LOG".to_owned());
        }
    }

    /// Drops notes on Lightning's defaults: only arguments that the user has set get one.
    fn keep_own_notes(&self, notes: &mut Vec<String>) {
        let (own, standard) = (json!({ "of": self }), json!({ "of": Self::default() }));
        let differs = |key: &str| own["of"][key] != standard["of"][key];
        let mut kept = Vec::new();
        for note in notes.iter() {
            let Some((key, why)) = note.split_once(' ') else { continue };
            let argument = argument_of(key.split('=').next().unwrap_or(key));
            if differs(argument) {
                kept.push(format!("trainer.strategy.{argument} {why}"));
            }
        }
        let (optimizer, params) = (self.offload_optimizer, self.offload_parameters);
        let is_nvme = |offloads: bool, device: &str| offloads && device == "nvme";
        let in_files = [
            is_nvme(optimizer, &self.offload_optimizer_device),
            is_nvme(params, &self.offload_params_device),
        ];
        let any_file = in_files[0] || in_files[1];
        for (key, counts) in [
            (
                "remote_device",
                self.remote_device.as_ref() == Some(&self.offload_params_device) || self.stage < 3,
            ),
            ("offload_optimizer_device", optimizer),
            ("offload_params_device", params),
            ("pin_memory", optimizer || params),
            ("nvme_path", any_file),
            ("optimizer_buffer_count", in_files[0]),
            ("params_buffer_count", in_files[1]),
            ("params_buffer_size", in_files[1]),
            ("max_in_cpu", in_files[1]),
            ("block_size", any_file),
            ("queue_depth", any_file),
            ("single_submit", any_file),
            ("overlap_events", any_file),
            ("thread_count", any_file),
        ] {
            if differs(key) && !counts {
                let what = match optimizer || params {
                    true if key == "remote_device" => "weights are where offload_params_device says",
                    true => "nothing of this is offloaded",
                    false => "nothing is offloaded",
                };
                kept.push(format!("trainer.strategy.{key} has no effect: {what}"));
            }
        }
        *notes = kept;
    }

    /// Names problems by the arguments that they come from.
    fn by_arguments(&self, mut error: ConfigError) -> ConfigError {
        for ConfigProblem { key, .. } in &mut error.problems {
            *key = format!("trainer.strategy.{}", argument_of(key));
        }
        error
    }

    /// `key=value` of the arguments that were set and have an effect with float16 only.
    pub(crate) fn loss_scale_arguments(&self) -> Vec<String> {
        let (own, standard) = (json!(self), json!(Self::default()));
        let set = OF_LOSS_SCALE.into_iter().filter(|key| own[*key] != standard[*key]);
        set.map(|key| format!("{key}={}", own[key])).collect()
    }

    /// What arguments outside DeepSpeed's own settings ask for and cannot be had.
    pub(crate) fn check_others(&self, accelerator: &str, devices: usize) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, what: String, remedy: &'static str| {
            problems.push(ConfigProblem::new(format!("trainer.strategy.{key}"), what, remedy));
        };
        let given = match &self.parallel_devices {
            None => None,
            Some(Value::Array(list)) => {
                if let Some(other) = list.iter().find(|device| !is_device(device, accelerator)) {
                    let what = format!("{other} is not a device of accelerator={accelerator}");
                    refuse("parallel_devices", what, "leave it out: trainer.devices says which are used");
                }
                Some(list.len() as u64)
            }
            Some(Value::Number(number)) if number.is_u64() => number.as_u64(),
            Some(other) => {
                refuse("parallel_devices", format!("{other} is not a number or a list"), "leave it out");
                None
            }
        };
        if let Some(number) = given.filter(|number| *number != devices as u64) {
            let what = format!("{number} devices, but trainer.devices means {devices}");
            refuse("parallel_devices", what, "set trainer.devices, or leave it out");
        }
        if let Some(device) = self.remote_device.as_deref().filter(|device| !["cpu", "nvme"].contains(device))
        {
            let what = format!("`{device}` is not a place off the device");
            refuse("remote_device", what, "set cpu or nvme, or leave it out");
        }
        if self.load_full_weights {
            let what = "true is not needed: any checkpoint of voltaic has the whole weights".to_owned();
            refuse("load_full_weights", what, "leave it out");
        }
        self.check_loss_scale(&mut refuse);
        if let Some(size) = &self.logging_batch_size_per_gpu
            && size != "auto"
            && size.as_u64().is_none_or(|size| size == 0)
        {
            let what = format!("{size} is not a batch size");
            refuse("logging_batch_size_per_gpu", what, "set a number from 1 on, auto, or null");
        }
        problems
    }
}

impl DeepSpeedStrategy {
    /// Refuses loss scales that cannot be.
    fn check_loss_scale(&self, refuse: &mut dyn FnMut(&str, String, &'static str)) {
        if !(0.0..=f64::from(f32::MAX)).contains(&self.loss_scale) {
            let what = format!("{} is not a scale", self.loss_scale);
            refuse("loss_scale", what, "set a number from 0 on, 0 for a scale that changes");
        }
        if self.initial_scale_power > 127 {
            let what = format!("2 to the power of {} is infinite in float32", self.initial_scale_power);
            refuse("initial_scale_power", what, "set 16, or another number up to 127");
        }
        let counts = [
            ("loss_scale_window", self.loss_scale_window),
            ("hysteresis", self.hysteresis),
            ("min_loss_scale", self.min_loss_scale),
        ];
        for (key, _) in counts.into_iter().filter(|(_, count)| *count == 0) {
            refuse(key, "0 is too small".to_owned(), "set a whole number from 1 on");
        }
    }
}

/// The argument that a key of DeepSpeed's settings comes from.
fn argument_of(key: &str) -> &str {
    match key {
        "zero_optimization.offload_param" => "offload_parameters",
        "zero_optimization.offload_param.device" => "offload_params_device",
        "zero_optimization.offload_optimizer.device" => "offload_optimizer_device",
        "train_micro_batch_size_per_gpu" => "logging_batch_size_per_gpu",
        other => other.rsplit('.').next().unwrap_or(other),
    }
}

/// Whether an element of `parallel_devices` is a device of the accelerator: `1`, `cpu`, `hpu:1`.
fn is_device(element: &Value, accelerator: &str) -> bool {
    let Some(text) = element.as_str() else { return element.is_u64() };
    let (name, index) = text.split_once(':').unwrap_or((text, "0"));
    name == accelerator && index.parse::<usize>().is_ok()
}

fn read_file(key: &str, path: &str) -> Result<Document, ConfigError> {
    let refuse = |what: String, remedy: &'static str| ConfigError::new(key, what, remedy);
    let remedy = "name a file with DeepSpeed's settings as JSON";
    let text = read_text_file(Path::new(path), MAX_FILE).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let what = "you passed in a path to a DeepSpeed config but the path does not exist";
            refuse(format!("{what}: {path} ({error})"), remedy)
        }
        _ => refuse(format!("{path} cannot be read: {error}"), remedy),
    })?;
    Document::of_json(TITLE, path, &text)
}
