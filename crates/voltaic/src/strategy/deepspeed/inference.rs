//! Settings of DeepSpeed's inference, and which keys select it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};
use tch::Kind;
use voltaic_macros::Defaults;

use crate::config::{Document, schema_of};
use crate::distributed::ParallelDims;
use crate::error::{ConfigError, ConfigProblem, Result};
use crate::nn::parallel::InjectionPolicy;

/// Stands for the key in errors about the whole of the settings.
const TITLE: &str = "init_inference";

const METHOD: &str = "replace_method";

/// Keys of DeepSpeed's inference that none of its training settings share. `checkpoint` and `tensor_parallel` are of both:
/// see [`selects_inference`].
const KEYS: [&str; 32] = [
    "base_dir",
    "checkpoint_config",
    "config",
    "dtype",
    "enable_cuda_graph",
    "ep_group",
    "ep_mp_group",
    "ep_size",
    "injection_dict",
    "injection_policy",
    "injection_policy_tuple",
    "keep_module_on_host",
    "kernel_inject",
    "max_out_tokens",
    "max_tokens",
    "min_out_tokens",
    "min_tokens",
    "moe",
    "moe_experts",
    "moe_type",
    "mp_size",
    "quant",
    "replace_method",
    "replace_with_kernel_inject",
    "return_tuple",
    "save_mp_checkpoint_path",
    "set_empty_params",
    "tm",
    "tp",
    "training_mp_size",
    "transposed_mode",
    "triangular_masking",
];

/// Whether a key with this value makes settings those of inference: one that only inference has; `checkpoint` if it is a path, since it
/// is a section in training; `tensor_parallel` unless it has keys of training.
pub(crate) fn selects_inference(key: &str, value: &Value) -> bool {
    match key {
        "checkpoint" => value.is_string(),
        "tensor_parallel" => value.get("autotp_size").is_none_or(Value::is_null) && !value.is_null(),
        key => KEYS.contains(&key) && !value.is_null(),
    }
}

/// Section `tensor_parallel`.
#[derive(Defaults, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = json!({
    "mpu": {"what": "an object of Python", "remedy": "remove it: groups are made by the trainer"},
    "tp_group": {"what": "an object of Python", "remedy": "remove it: groups are made by the trainer"},
})))]
pub struct TensorParallel {
    /// Whether layers are divided.
    #[default(true)]
    pub enabled: bool,
    /// Ranks that have slices of the same layers.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub tp_size: u64,
    /// Features are divided in pieces of so many, where there are enough.
    #[schemars(range(min = 1))]
    #[default(64)]
    pub tp_grain_size: u64,
}

impl TensorParallel {
    /// Layers divided among so many ranks.
    pub fn size(tp_size: u64) -> Self {
        Self { tp_size, ..Self::default() }
    }
}

/// One name, or several.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Names {
    One(String),
    Several(Vec<String>),
}

/// Settings of [`init_inference`](crate::strategy::init_inference), with DeepSpeed's names.
///
/// ```
/// use voltaic::strategy::{InferenceConfig, TensorParallel};
///
/// # fn main() -> Result<(), voltaic::error::ConfigError> {
/// let config = InferenceConfig { tensor_parallel: TensorParallel::size(4), ..InferenceConfig::default() };
/// let json = serde_json::json!({"tensor_parallel": {"tp_size": 4}});
/// assert_eq!(InferenceConfig::of_value(&json)?, config);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = refused(), "x-no-effect" = no_effect(), "x-old-names" = old_names()))]
pub struct InferenceConfig {
    /// Section `tensor_parallel`.
    pub tensor_parallel: TensorParallel,
    /// Dtype of the weights: `float`, `half`, `bf16`, also with `torch.` before them; that of the trainer unless set.
    #[serde(deserialize_with = "dtype", serialize_with = "dtype_word")]
    #[schemars(schema_with = "dtypes")]
    pub dtype: Option<Kind>,
    /// Divides layers also of a model without blocks that DeepSpeed's rules know, if it says how. Kernels are voltaic's in any case.
    pub replace_with_kernel_inject: bool,
    /// Replays the calls that a step makes by `ctx.graphed`; goes with `tp_size` 1.
    pub enable_cuda_graph: bool,
    /// Names of row-wise layers, by the type of the module that they are in: `{Block: [attn.out, mlp.out]}`, or `{Net: l1}`.
    #[serde(deserialize_with = "policy")]
    #[schemars(with = "BTreeMap<String, Names>")]
    pub injection_policy: InjectionPolicy,
    /// Weights to begin with, unless the call has a `ckpt_path`.
    pub checkpoint: Option<String>,
    /// Folder that `checkpoint` is in.
    pub base_dir: Option<String>,
}

fn refused() -> Value {
    let unless_off = |what: &str, remedy: &str| json!({"what": what, "remedy": remedy, "unless_off": true});
    let experts = unless_off("voltaic has no experts", "remove it");
    json!({
        "moe": experts,
        "moe_experts": experts,
        "moe_type": experts,
        "ep_size": experts,
        "ep_group": experts,
        "ep_mp_group": experts,
        "quant": unless_off("voltaic does not quantize weights for inference", "remove it, or set trainer.precision=fp8"),
        "zero": unless_off("ZeRO-Inference is stage 3 without settings of inference", "use stage 3 alone"),
        "injection_policy_tuple": unless_off("it is how DeepSpeed passes injection_policy on", "set injection_policy"),
        "mp_size": unless_off("DeepSpeed has replaced it", "set tensor_parallel.tp_size"),
        "training_mp_size": unless_off("a checkpoint can be loaded with any number of ranks", "remove it"),
        "save_mp_checkpoint_path": unless_off("slices are not saved by themselves", "save with trainer.save_weights"),
        "checkpoint_config": unless_off("it is how DeepSpeed passes checkpoint on", "set checkpoint"),
        "keep_module_on_host": unless_off("the module goes to the device of the trainer", "remove it"),
        "set_empty_params": unless_off("weights get memory when they are loaded", "make the module in nn::init::deferred"),
    })
}

fn no_effect() -> Value {
    let cache = "a Generator makes room for as many tokens as are asked for";
    json!({
        "triangular_masking": "the model says what it masks",
        "return_tuple": "the model says what it returns",
        "transposed_mode": "it is for kernels of CUDA",
        "config": "it is for kernels of CUDA",
        "max_out_tokens": cache,
        "min_out_tokens": cache,
    })
}

fn old_names() -> Value {
    json!({
        "kernel_inject": "replace_with_kernel_inject",
        "tp": "tensor_parallel",
        "injection_dict": "injection_policy",
        "tm": "triangular_masking",
        "max_tokens": "max_out_tokens",
        "min_tokens": "min_out_tokens",
    })
}

/// DeepSpeed's words for dtypes of inference.
const DTYPES: [(&str, Kind); 13] = [
    ("float", Kind::Float),
    ("fp32", Kind::Float),
    ("float32", Kind::Float),
    ("torch.float", Kind::Float),
    ("torch.float32", Kind::Float),
    ("half", Kind::Half),
    ("fp16", Kind::Half),
    ("float16", Kind::Half),
    ("torch.half", Kind::Half),
    ("torch.float16", Kind::Half),
    ("bf16", Kind::BFloat16),
    ("bfloat16", Kind::BFloat16),
    ("torch.bfloat16", Kind::BFloat16),
];

fn dtypes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": DTYPES.map(|(word, _)| word)})
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Kind>, D::Error> {
    let given = Option::<String>::deserialize(deserializer)?;
    Ok(given.and_then(|given| DTYPES.iter().find(|(word, _)| *word == given)).map(|(_, kind)| *kind))
}

fn dtype_word<S: Serializer>(dtype: &Option<Kind>, serializer: S) -> Result<S::Ok, S::Error> {
    let word = dtype.and_then(|dtype| DTYPES.iter().find(|(_, kind)| *kind == dtype));
    word.map(|(word, _)| *word).serialize(serializer)
}

fn policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<InjectionPolicy, D::Error> {
    let given = BTreeMap::<String, Names>::deserialize(deserializer)?.into_iter();
    let names = |names| match names {
        Names::One(name) => vec![name],
        Names::Several(names) => names,
    };
    Ok(given.map(|(type_name, given)| (type_name, names(given))).collect())
}

/// Settings of inference, and what they say that has no effect.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InferenceSettings {
    pub config: InferenceConfig,
    /// A key that selects inference.
    pub key: String,
    /// Keys that have no effect, a sentence each.
    pub notes: Vec<String>,
}

impl InferenceConfig {
    /// Reads settings given as a value.
    ///
    /// # Errors
    /// Unknown keys, and values that cannot be.
    pub fn of_value(value: &Value) -> Result<Self, ConfigError> {
        let settings = read(Document::of_value(TITLE, "", value)?, &Map::new())?;
        settings.notes.iter().for_each(|note| tracing::warn!("{TITLE}: {note}"));
        Ok(settings.config)
    }

    /// Where the weights are.
    pub(crate) fn checkpoint_path(&self) -> Option<PathBuf> {
        let checkpoint = PathBuf::from(self.checkpoint.as_ref()?);
        Some(
            self.base_dir
                .as_ref()
                .map_or_else(|| checkpoint.clone(), |folder| PathBuf::from(folder).join(&checkpoint)),
        )
    }

    /// Ranks that have slices of the same layers.
    pub(crate) fn tp_size(&self) -> usize {
        match self.tensor_parallel {
            TensorParallel { enabled: true, tp_size, .. } => usize::try_from(tp_size).unwrap_or(usize::MAX),
            _ => 1,
        }
    }

    /// Values that are right each, but not together.
    pub(crate) fn problems(&self) -> Vec<(&'static str, String, &'static str)> {
        let mut problems = Vec::new();
        if self.replace_with_kernel_inject && !self.injection_policy.is_empty() {
            let what =
                "true beside injection_policy: one of the two says which layers are divided".to_owned();
            problems.push(("replace_with_kernel_inject", what, "set false, or remove injection_policy"));
        }
        if self.enable_cuda_graph && self.tp_size() > 1 {
            let what = format!(
                "true with tensor_parallel.tp_size={}: a replay would not exchange what ranks compute",
                self.tp_size()
            );
            problems.push(("enable_cuda_graph", what, "set false, or tensor_parallel.tp_size=1"));
        }
        if self.base_dir.is_some() && self.checkpoint.is_none() {
            problems.push(("base_dir", "without checkpoint".to_owned(), "set checkpoint, or remove it"));
        }
        problems
    }
}

/// The settings of a document and of arguments beside it, if one of them selects inference; else the document. `place` is what stands
/// before an argument in messages.
pub(crate) fn inference_of(
    document: Option<Document>,
    arguments: &Map<String, Value>,
    place: &str,
) -> Result<Result<InferenceSettings, Option<Document>>, ConfigError> {
    let of_document = document.iter().flat_map(Document::entries);
    let of_arguments = arguments.iter().map(|(key, value)| (key.clone(), value.clone()));
    let selecting = of_arguments.chain(of_document).find(|(key, value)| selects_inference(key, value));
    let Some((key, _)) = selecting else { return Ok(Err(document)) };
    let document = match document {
        Some(document) => document,
        None => Document::of_value(TITLE, place, &json!({}))?,
    };
    // what was given as an argument is none of the settings
    let by_argument = |text: &str| {
        let name = text.strip_prefix(place)?.strip_prefix(".config.")?;
        let is_argument = |own: &String| {
            name.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ' ']))
        };
        arguments.keys().any(is_argument).then(|| format!("{place}.{name}"))
    };
    let mut read = read(document, arguments).map_err(|mut error| {
        for ConfigProblem { key, .. } in &mut error.problems {
            *key = by_argument(key).unwrap_or_else(|| key.clone());
        }
        error
    })?;
    for note in &mut read.notes {
        *note = by_argument(note).unwrap_or_else(|| note.clone());
    }
    Ok(Ok(InferenceSettings { key, ..read }))
}

fn read(mut document: Document, arguments: &Map<String, Value>) -> Result<InferenceSettings, ConfigError> {
    let own: BTreeMap<String, Value> = document.entries().collect();
    let training = schema_of::<super::settings::DeepSpeedSettings>();
    let mut conflicts = Vec::new();
    for (key, value) in arguments {
        match own.get(key) {
            Some(other) if other != value => conflicts.push((
                key.clone(),
                format!("is {other} in the settings, and {value} as an argument"),
                "remove one of the two",
            )),
            _ => document.insert(key, value),
        }
    }
    for key in own.keys() {
        let is_inference =
            matches!(key.as_str(), "checkpoint" | "tensor_parallel") || KEYS.contains(&key.as_str());
        if !is_inference && training["properties"].get(key).is_some() {
            document.remove(key);
            conflicts.push((
                key.clone(),
                "is a setting of training, and others here are of inference".to_owned(),
                "remove one of the two",
            ));
        }
    }
    let has_method = own.contains_key(METHOD) || arguments.contains_key(METHOD);
    document.remove(METHOD); // its value is `auto`, which means its default elsewhere
    let config: InferenceConfig = document.read();
    for (key, what, remedy) in conflicts {
        document.refuse(&key, what, remedy);
    }
    for (key, what, remedy) in config.problems() {
        document.refuse(key, what, remedy);
    }
    if has_method {
        document.note(METHOD, "DeepSpeed ignores it, too");
    }
    if config.replace_with_kernel_inject {
        document.note("replace_with_kernel_inject", "the layers' own operators are fused already");
    }
    let (notes, _) = document.finish()?;
    Ok(InferenceSettings { config, key: String::new(), notes })
}

/// A strategy for inference once its settings are understood.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InferencePlan {
    /// Its name, such as `deepspeed`.
    pub name: &'static str,
    pub settings: InferenceSettings,
    pub timeout: Duration,
    /// Keys of what may differ between ranks.
    pub allow_differences: Vec<String>,
}

impl InferencePlan {
    /// The mesh of so many ranks: neighbours share layers, and the others are replicas with other batches.
    pub(crate) fn dims(&self, world_size: usize) -> ParallelDims {
        dims(&self.settings.config, world_size)
    }

    /// Why there is nothing to train.
    pub(crate) fn refuse_fit(&self) -> ConfigError {
        let what = format!("{} selects inference (init_inference), which trains nothing", self.settings.key);
        let remedy = "call predict, test or validate, or use a strategy without settings of inference";
        ConfigError::new("trainer.strategy", what, remedy)
    }
}

pub(crate) fn dims(config: &InferenceConfig, world_size: usize) -> ParallelDims {
    let tp = config.tp_size();
    ParallelDims { dp_replicate: world_size / tp.max(1), tp, ..ParallelDims::default() }
}

/// A size of tensor parallelism that does not divide the ranks.
pub(crate) fn check_ranks(config: &InferenceConfig, world_size: usize) -> Result<(), ConfigError> {
    let tp_size = config.tp_size();
    if tp_size > 0 && world_size.is_multiple_of(tp_size) {
        return Ok(());
    }
    let what = format!("tp_size is {tp_size}, but there are {world_size} rank(s)");
    let remedy = "use a number of ranks (trainer.devices x trainer.num_nodes) that tp_size divides";
    Err(ConfigError::new("tensor_parallel.tp_size", what, remedy))
}
