//! What the command line hands to a run.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::{Origins, Settings, deserialize_at, to_yaml};
use crate::error::{ConfigError, ConfigProblem, Problem};
use crate::generation::GenerationConfig;
use crate::trainer::{InitialWeights, Trainer, TrainerConfig};

/// What a run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Train, with validation in between.
    Fit,
    /// Run the validation data once.
    Validate,
    /// Run the test data once.
    Test,
    /// Compute predictions.
    Predict,
    /// Continue prompts.
    Generate,
    /// Measure, and write quantized weights.
    Quantize,
    /// Show what a compiled training step consists of.
    Graph,
}

impl Verb {
    pub(super) const ALL: [Self; 7] =
        [Self::Fit, Self::Validate, Self::Test, Self::Predict, Self::Generate, Self::Quantize, Self::Graph];

    /// As typed: `fit`, `validate`, `test`, `predict`, `generate`, `quantize` or `graph`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fit => "fit",
            Self::Validate => "validate",
            Self::Test => "test",
            Self::Predict => "predict",
            Self::Generate => "generate",
            Self::Quantize => "quantize",
            Self::Graph => "graph",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| verb.as_str() == text)
    }
}

/// `FROM=TO`.
pub(super) fn renamed(text: &str) -> Result<(String, String), String> {
    let split = text.split_once('=').filter(|(from, to)| from != to);
    let (from, to) = split.ok_or("give FROM=TO, such as model.= to take a prefix off")?;
    Ok((from.to_owned(), to.to_owned()))
}

/// Options of `generate`.
#[derive(Args, Clone, Debug)]
pub(super) struct GenerateArgs {
    /// Text to continue; several are continued together, and printed when all are there.
    #[arg(long, value_name = "TEXT", required_unless_present = "help")]
    pub prompt: Vec<String>,
    /// The largest number of tokens to add.
    #[arg(long = "max_new_tokens", value_name = "N", default_value_t = GenerationConfig::default().max_new_tokens)]
    pub max_new_tokens: usize,
    /// Below 1, likely tokens become more likely; 0 always takes the most likely one.
    #[arg(long, value_name = "T", default_value_t = GenerationConfig::default().temperature)]
    pub temperature: f64,
    /// Draw among this many of the most likely tokens only.
    #[arg(long = "top_k", value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw among the most likely tokens whose probabilities first reach this only.
    #[arg(long = "top_p", value_name = "P", default_value_t = GenerationConfig::default().top_p)]
    pub top_p: f64,
    /// Above 1, tokens that are there already become less likely.
    #[arg(long = "repetition_penalty", value_name = "X", default_value_t = GenerationConfig::default().repetition_penalty)]
    pub repetition_penalty: f64,
    /// End after this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Seed of what is drawn.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Replay the step of a token as a graph.
    #[arg(long)]
    pub graph: bool,
}

/// Options of `quantize`.
#[derive(Args, Clone, Debug)]
pub(super) struct QuantizeArgs {
    /// Where to write the quantized weights, as safetensors; a picture goes beside them.
    #[arg(long, value_name = "FILE", default_value = "quantized.safetensors")]
    pub output: PathBuf,
    /// How scales are made, such as maxabs_hw or act_maxabs_pow2_weights_pcs_opt_pow2.
    #[arg(long = "scale_method", value_name = "METHOD")]
    pub scale_method: Option<String>,
    /// JSON file with more settings, in Habana's keys.
    #[arg(long, value_name = "FILE")]
    pub quant: Option<PathBuf>,
    /// The data to measure on, and to compare: those of validate and test also give their metrics.
    #[arg(long, value_enum, value_name = "STAGE", default_value_t = MeasuredOn::Predict)]
    pub stage: MeasuredOn,
}

/// Options of `graph show`.
#[derive(Args, Clone, Debug)]
pub(super) struct ShowArgs {
    /// The folder of a run, whose config.yaml is used, or a YAML file as --config takes it.
    #[arg(value_name = "RUN|RECIPE")]
    pub source: Option<PathBuf>,
    /// Show every operator.
    #[arg(long)]
    pub all: bool,
    /// Also draw memory over the operators, as SVG.
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
}

/// The data that `quantize` measures on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum MeasuredOn {
    /// Those of predict.
    Predict,
    /// Those of validate.
    Validate,
    /// Those of test.
    Test,
}

/// A checked configuration and what to do with it.
#[derive(Debug, Clone)]
pub struct RunRequest {
    verb: Verb,
    settings: Settings,
    seed: Option<u64>,
    generate: Option<GenerateArgs>,
    quantize: Option<QuantizeArgs>,
    show: Option<ShowArgs>,
}

impl RunRequest {
    pub(super) fn new(verb: Verb, mut settings: Settings) -> Self {
        let seed = match settings.tree.get("seed_everything") {
            Some(Value::Bool(true)) => Some(0),
            Some(Value::Number(number)) => number.as_u64(),
            _ => None,
        };
        // The saved configuration names the seed that was used.
        if let (Some(seed), Some(entry)) = (seed, settings.tree.get_mut("seed_everything")) {
            *entry = Value::from(seed);
        }
        Self { verb, settings, seed, generate: None, quantize: None, show: None }
    }

    /// With the options of `generate`.
    pub(super) fn with_generate(mut self, generate: Option<GenerateArgs>) -> Self {
        self.generate = generate;
        self
    }

    /// With the options of `quantize`.
    pub(super) fn with_quantize(mut self, quantize: Option<QuantizeArgs>) -> Self {
        self.quantize = quantize;
        self
    }

    /// With the options of `graph show`.
    pub(super) fn with_show(mut self, show: Option<ShowArgs>) -> Self {
        self.show = show;
        self
    }

    pub(super) fn show(&self) -> Option<&ShowArgs> {
        self.show.as_ref()
    }

    pub(super) fn quantize(&self) -> Option<&QuantizeArgs> {
        self.quantize.as_ref()
    }

    pub(super) fn generate(&self) -> Option<&GenerateArgs> {
        self.generate.as_ref()
    }

    /// What to do.
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// The seed; `None` for `seed_everything: false`.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// The checkpoint to start from: a path, `last`, `best` or `hpc`.
    pub fn ckpt_path(&self) -> Option<&str> {
        self.settings.tree.get("ckpt_path")?.as_str()
    }

    /// The weights of a file that the call begins with.
    ///
    /// # Errors
    /// If it says how strict or what to rename, and not which file; if a rule is none.
    pub(super) fn weights(&self) -> Result<Option<InitialWeights>, ConfigError> {
        let Some(weights) = self.settings.tree.get("weights") else { return Ok(None) };
        let is_strict = weights.get("strict").and_then(Value::as_bool).unwrap_or(true);
        let rules = weights.get("rename").and_then(Value::as_array).into_iter().flatten();
        let rename =
            rules.map(|rule| renamed(rule.as_str().unwrap_or_default())).collect::<Result<Vec<_>, _>>();
        let rename = rename.map_err(|what| {
            ConfigError::new("weights.rename", what, "write it as in weights.rename=[model.=net.]")
        })?;
        match weights.as_str().or_else(|| weights.get("path")?.as_str()) {
            Some(path) => Ok(Some(InitialWeights { path: path.into(), strict: is_strict, rename })),
            None if !is_strict => {
                let remedy = "give weights.path=FILE, or leave weights.strict out";
                Err(ConfigError::new("weights.strict", "false, but there is no file", remedy))
            }
            None if !rename.is_empty() => {
                let remedy = "give weights.path=FILE, or leave weights.rename out";
                Err(ConfigError::new("weights.rename", "there is no file", remedy))
            }
            None => Ok(None),
        }
    }

    /// Gives the trainer what its next call begins with.
    ///
    /// # Errors
    /// As [`RunRequest::weights`].
    pub(super) fn begin(&self, trainer: &mut Trainer) -> Result<(), ConfigError> {
        if let Some(path) = self.ckpt_path() {
            trainer.ckpt_path(path);
        }
        if let Some(weights) = self.weights()? {
            trainer.begin_with(weights);
        }
        Ok(())
    }

    /// Whether all weights come from a file.
    pub(super) fn takes_all_weights(&self) -> bool {
        self.ckpt_path().is_some() || self.weights().is_ok_and(|weights| weights.is_some_and(|of| of.strict))
    }

    /// Whether the strategy may shard the weights. Not in code that is generic over the model: each program would compile the
    /// readers of all settings again.
    pub(super) fn may_shard_weights(&self) -> bool {
        let trainer: Result<TrainerConfig, _> = self.section("trainer");
        trainer.is_ok_and(|trainer| trainer.strategy.may_shard_weights())
    }

    /// Whether this runs a model that neither was trained nor has weights of a file.
    pub(super) fn weights_are_drawn(&self) -> bool {
        let keys = [
            "/ckpt_path",
            "/weights",
            "/weights/path",
            "/trainer/strategy/init_args/checkpoint",
            "/trainer/strategy/init_args/config/checkpoint",
        ];
        let is_path = |key: &str| self.settings.tree.pointer(key).is_some_and(Value::is_string);
        self.verb != Verb::Fit && !keys.into_iter().any(is_path)
    }

    /// Where each value of the configuration was set.
    pub fn origins(&self) -> &Origins {
        &self.settings.origins
    }

    /// The whole configuration, defaults included, as YAML: what a run saves as `config.yaml` to be run again.
    pub fn config_yaml(&self) -> String {
        format!("# voltaic=={}\n{}", env!("CARGO_PKG_VERSION"), to_yaml(&self.settings.tree))
    }

    /// A part of the configuration, such as `trainer`, or `optimizer` as an `Option`.
    ///
    /// # Errors
    /// [`ConfigError`] with the key that `T` refuses.
    pub fn section<T: DeserializeOwned>(&self, key: &str) -> Result<T, ConfigError> {
        deserialize_at(key, &self.settings.tree, &self.settings.origins)
    }

    /// The values that a model or data module is made from, by `model` or `data`.
    pub fn init_args(&self, key: &str) -> &Value {
        self.settings.tree.get(key).and_then(|part| part.get("init_args")).unwrap_or(&Value::Null)
    }

    /// The class at `model` or `data`.
    pub(super) fn class(&self, key: &str) -> Result<&str, ConfigError> {
        let class =
            self.settings.tree.get(key).and_then(|part| part.get("class_path")).and_then(Value::as_str);
        class.ok_or_else(|| {
            ConfigError::new(key, "none is chosen", format!("write --{key}=NAME; `models` lists the names"))
        })
    }

    /// A problem of this configuration at `key`, with its origin.
    pub(super) fn problem(&self, key: &str, what: String, remedy: String) -> ConfigError {
        let leaf = format!("{key}.class_path");
        let origin =
            self.settings.origins.get(&leaf).filter(|origin| **origin != crate::config::Origin::Default);
        let origin = origin.map(ToString::to_string).unwrap_or_default();
        let problem = Problem::new(what, remedy);
        ConfigError { problems: vec![ConfigProblem { key: key.to_owned(), origin, problem }] }
    }
}
