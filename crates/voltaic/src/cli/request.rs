//! What the command line hands to a run.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::{Origins, Settings, deserialize_at, to_yaml};
use crate::error::{ConfigError, ConfigProblem, Problem};

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
}

impl Verb {
    /// As typed: `fit`, `validate`, `test` or `predict`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fit => "fit",
            Self::Validate => "validate",
            Self::Test => "test",
            Self::Predict => "predict",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        [Self::Fit, Self::Validate, Self::Test, Self::Predict].into_iter().find(|verb| verb.as_str() == text)
    }
}

/// A checked configuration and what to do with it.
#[derive(Debug, Clone)]
pub struct RunRequest {
    verb: Verb,
    settings: Settings,
    seed: Option<u64>,
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
        Self { verb, settings, seed }
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
