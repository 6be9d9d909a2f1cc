//! Settings of fp8 inference, from JSON: which layers are measured or quantized, and how.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use voltaic_macros::Defaults;

use super::quant_words::{
    HpDtype, MeasureExclude, Observer, QuantFormat, QuantMode, ScaleDevice, ScaleFormat,
};
use super::scale_method::{ScaleMethod, ScaleParams};
use crate::accelerator::{Generation, HpuEmulator, RuntimeFlags};
use crate::config::{expand_home, nearest};
use crate::error::{ConfigError, Error, Result};

/// Bytes that a file of settings may have.
const MAX_FILE: u64 = 1 << 20;

/// Keys of files for other versions, which have no effect here.
const NO_EFFECT: [&str; 8] = [
    "method",
    "dump_stats_xlsx_path",
    "measure_on_hpu",
    "recalc_scales",
    "use_stats_files",
    "local_rank",
    "global_rank",
    "world_size",
];

/// Layers by their names and types.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerList {
    /// Parts of fqns.
    pub names: Vec<String>,
    /// Names of types, of which the part behind the last dot counts: `torch.nn.Linear`, `Conv2d`. `BMM` is `Matmul`, `ModuleFusedSDPA`
    /// is `FusedAttention`, `KVCache` is `KvCacheLayer`.
    pub types: Vec<String>,
}

impl LayerList {
    fn has_name(&self, fqn: &str) -> bool {
        self.names.iter().any(|name| fqn.contains(name.as_str()))
    }

    fn has_type(&self, type_name: &str) -> bool {
        self.types.iter().any(|name| {
            let name = name.rsplit('.').next().unwrap_or(name);
            let name = match name {
                "BMM" => "Matmul",
                "ModuleFusedSDPA" => "FusedAttention",
                "KVCache" | "VLLMKVCache" => "KvCacheLayer",
                name => name,
            };
            name == type_name
        })
    }
}

/// Settings of fp8 inference, by the keys of Habana's JSON files.
///
/// Source: Habana Quantization Toolkit's `quant_config.py`, and Intel Neural Compressor's `FP8Config`.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QuantConfig {
    /// Whether layers are measured or quantized.
    pub mode: QuantMode,
    /// What is measured.
    pub observer: Observer,
    /// What is not measured.
    pub measure_exclude: MeasureExclude,
    /// The format of quantized numbers.
    pub fp8_config: QuantFormat,
    /// The dtype of what quantized layers give; null: that of activations, which is what autocast casts to, else the input's.
    pub hp_dtype: Option<HpDtype>,
    /// How scales are made of what was measured.
    pub scale_method: ScaleMethod,
    /// Numbers of that method.
    pub scale_params: ScaleParams,
    /// If it has names or types, only these layers.
    #[serde(alias = "whitelist")]
    pub allowlist: LayerList,
    /// Layers that stay as they are.
    #[serde(alias = "blacklist")]
    pub blocklist: LayerList,
    /// Where measurements are: a folder, and the beginning of the files' names. Null: `inc_output/measure` in the plugin's
    /// `fp8_data_path`, else in `HABANA_LOGS`, else in the folder of the run.
    pub dump_stats_path: Option<PathBuf>,
    /// Layers without measurements stay as they are; else calling one is an error.
    #[serde(deserialize_with = "bool_or_word")]
    pub ignore_modules_wo_measures: bool,
    /// Each rank has files of its own; else one has the largest magnitudes of all. (The original spells it so.)
    #[default(true)]
    pub seperate_measure_files: bool,
    /// Must be empty.
    pub mod_dict: Map<String, Value>,
    /// The generation whose scales are used; null: that of the emulated HPU, else Gaudi2.
    pub device_for_scales: Option<ScaleDevice>,
    /// The device that measurements are for; null: any.
    pub device_type: Option<ScaleDevice>,
    /// Has no effect: scales are tensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_format: Option<ScaleFormat>,
    /// Must be false.
    pub fake_quant: bool,
    /// Must be false.
    pub use_qdq: bool,
}

fn bool_or_word<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<bool, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Bool(value) => Ok(value),
        Value::String(word) if word.eq_ignore_ascii_case("true") => Ok(true),
        Value::String(word) if word.eq_ignore_ascii_case("false") => Ok(false),
        other => Err(serde::de::Error::custom(format!("{other} is neither true nor false"))),
    }
}

/// A mapping without the keys that have no effect. They are named in the log.
fn without_effect(origin: &str, mut given: Map<String, Value>) -> Map<String, Value> {
    for key in NO_EFFECT {
        if given.remove(key).is_some() {
            tracing::info!("{origin}: {key} has no effect");
        }
    }
    given
}

impl QuantConfig {
    /// `quant=True` of the original: the settings that lightning-Habana ships.
    pub fn quantize() -> Self {
        let blocklist = LayerList { names: vec!["lm_head".to_owned()], types: Vec::new() };
        Self { blocklist, ..Self::default() }
    }

    /// `quant=False` of the original.
    pub fn measure() -> Self {
        Self { mode: QuantMode::Measure, ..Self::default() }
    }

    /// Settings from a mapping; `origin` is where it comes from.
    ///
    /// # Errors
    /// The key that is unknown, or whose value makes no sense; as [`QuantConfig::check`].
    pub fn from_dict(given: Map<String, Value>, origin: &str) -> Result<Self, ConfigError> {
        let given = without_effect(origin, given);
        let config: Self = serde_path_to_error::deserialize(Value::Object(given)).map_err(|error| {
            let path = error.path().to_string();
            let key = if path == "." { origin.to_owned() } else { format!("{origin}.{path}") };
            let what = error.inner().to_string();
            let unknown = what.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
            let known = Self::default();
            let keys: Vec<String> = match serde_json::to_value(&known) {
                Ok(Value::Object(known)) => known.into_iter().map(|(key, _)| key).collect(),
                _ => Vec::new(),
            };
            let near = unknown.and_then(|name| nearest(name, keys.iter().map(String::as_str)));
            let remedy = match near {
                Some(near) => Cow::from(format!("did you mean {near}")),
                None => "see the keys in docs/fp8.md".into(),
            };
            ConfigError::new(key, what, remedy)
        })?;
        config.check(origin)?;
        if config.scale_format.is_some() {
            tracing::info!("{origin}: scale_format has no effect");
        }
        Ok(config)
    }

    /// Settings from a JSON file.
    ///
    /// # Errors
    /// If it cannot be read; as [`QuantConfig::from_dict`].
    pub fn from_json_file(path: &Path) -> Result<Self> {
        let origin = path.display().to_string();
        let open = |error| Error::io("open (QUANT PACKAGE: Can't open it)", path, error);
        let file = File::open(path).map_err(open)?;
        let mut text = String::new();
        file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(open)?;
        let refuse = |what: String| {
            let what = format!("QUANT PACKAGE: Can't load {origin} json: {what}");
            ConfigError::new(&origin, what, "give a JSON file with the keys of docs/fp8.md")
        };
        if text.len() as u64 > MAX_FILE {
            return Err(refuse(format!("it has more than {MAX_FILE} bytes")).into());
        }
        match serde_json::from_str(&text) {
            Ok(Value::Object(given)) => Ok(Self::from_dict(given, &origin)?),
            Ok(other) => Err(refuse(format!("{other} is no mapping")).into()),
            Err(error) => Err(refuse(error.to_string()).into()),
        }
    }

    /// Whether the settings fit together.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self, origin: &str) -> Result<(), ConfigError> {
        let refuse = |key: &str, what: String, remedy: &'static str| {
            Err(ConfigError::new(format!("{origin}.{key}"), what, remedy))
        };
        if !self.mod_dict.is_empty() {
            let names: Vec<&str> = self.mod_dict.keys().map(String::as_str).collect();
            let what = format!("Custom modules are not supported: {}", names.join(", "));
            return refuse("mod_dict", what, "leave it out");
        }
        for (key, is_set) in [("fake_quant", self.fake_quant), ("use_qdq", self.use_qdq)] {
            if is_set {
                let what = "quantized layers keep float8 numbers, not rounded ones of the wider dtype";
                return refuse(key, what.to_owned(), "leave it out: the values are the same");
            }
        }
        let method = self.scale_method;
        let needs_channels = self.mode == QuantMode::Quantize && method.needs_channels();
        if needs_channels && self.observer != Observer::MaxabsPerChannel {
            let what = format!("{method} with observer {}", self.observer);
            return refuse("scale_method", what, "measure and quantize with observer maxabs_per_channel");
        }
        if self.mode == QuantMode::Quantize {
            match self.observer {
                Observer::Shape => {
                    return refuse("observer", "shapes make no scales".to_owned(), "use maxabs");
                }
                Observer::Save => {
                    return refuse("observer", "saved tensors make no scales".to_owned(), "use maxabs");
                }
                Observer::Maxabs | Observer::MaxabsPerChannel => {}
            }
        }
        if self.mode == QuantMode::Measure && method.needs_no_measures() && method != ScaleMethod::default() {
            let what = format!("{method} with mode MEASURE");
            return refuse("scale_method", what, "use mode QUANTIZE: it needs no measurements");
        }
        if let Some(device) = self.device_for_scales {
            if method != ScaleMethod::MaxabsHw {
                let what = format!("{device} with {method}");
                return refuse("device_for_scales", what, "use it with scale_method maxabs_hw");
            }
            if device == ScaleDevice::Gaudi3 && self.own_device() == ScaleDevice::Gaudi2 {
                let what = "GAUDI3 on a Gaudi2, which has fewer scales".to_owned();
                return refuse("device_for_scales", what, "leave it out");
            }
        }
        self.scale_params.check(origin)
    }

    /// The observer of the files: shapes with mode `SHAPE`.
    pub(crate) fn observer_in_force(&self) -> Observer {
        if self.mode == QuantMode::Shape { Observer::Shape } else { self.observer }
    }

    /// Whether a layer is to be measured or quantized.
    pub(crate) fn takes(&self, fqn: &str, type_name: &str) -> bool {
        let Self { allowlist, blocklist, .. } = self;
        let is_allowed = (allowlist.names.is_empty() || allowlist.has_name(fqn))
            && (allowlist.types.is_empty() || allowlist.has_type(type_name));
        is_allowed && !blocklist.has_name(fqn) && !blocklist.has_type(type_name)
    }

    /// The generation whose scales are used.
    pub(crate) fn scale_device(&self) -> ScaleDevice {
        self.device_for_scales.unwrap_or_else(|| self.own_device())
    }

    fn own_device(&self) -> ScaleDevice {
        self.device_type.unwrap_or_else(|| match HpuEmulator::get().map(|it| it.settings().generation) {
            Some(Generation::Gaudi3) => ScaleDevice::Gaudi3,
            _ => ScaleDevice::Gaudi2,
        })
    }
}

impl From<QuantConfig> for Value {
    fn from(config: QuantConfig) -> Self {
        serde_json::to_value(config).unwrap_or_default()
    }
}

/// What a plugin says of fp8 inference.
#[derive(Debug, Clone, PartialEq)]
pub struct Inference {
    /// The settings.
    pub config: QuantConfig,
    /// Where they come from, for errors.
    pub origin: String,
}

impl Inference {
    /// Of the `quant` of a plugin: a dict, a path, true or false; null stands for `QUANT_CONFIG`, else true. A dict or path wins over
    /// `QUANT_CONFIG`, which wins over true and false.
    ///
    /// # Errors
    /// If it is none of these, a file cannot be read, a setting makes no sense, or `QUANT_CONFIG` contradicts true or false.
    pub fn resolve(quant: &Value, fp8_data_path: Option<&Path>, plugin: &str) -> Result<Self> {
        let flags = RuntimeFlags::from_env()?;
        let text = |name| flags.text(name).filter(|text| !text.is_empty()).map(PathBuf::from);
        Self::resolve_with(quant, fp8_data_path, plugin, text("QUANT_CONFIG"), text("HABANA_LOGS"))
    }

    fn resolve_with(
        quant: &Value,
        fp8_data_path: Option<&Path>,
        plugin: &str,
        quant_config: Option<PathBuf>,
        habana_logs: Option<PathBuf>,
    ) -> Result<Self> {
        let key = format!("{plugin}.quant");
        let (mut config, origin) = match (quant, quant_config) {
            (Value::Object(given), _) => (QuantConfig::from_dict(given.clone(), &key)?, key),
            (Value::String(path), _) => {
                let path = Path::new(path);
                (QuantConfig::from_json_file(path)?, path.display().to_string())
            }
            (Value::Bool(_) | Value::Null, Some(path)) => {
                let config = QuantConfig::from_json_file(&path)?;
                let origin = format!("QUANT_CONFIG ({})", path.display());
                let asked = match quant {
                    Value::Bool(true) => Some(QuantMode::Quantize),
                    Value::Bool(false) => Some(QuantMode::Measure),
                    _ => None,
                };
                if let Some(asked) = asked.filter(|asked| *asked != config.mode) {
                    let what = format!(
                        "mode {} of {origin} contradicts {key}={quant}, which is {asked}",
                        config.mode
                    );
                    let remedy = "unset QUANT_CONFIG, change its mode, or give the settings as quant";
                    return Err(ConfigError::new(key, what, remedy).into());
                }
                (config, origin)
            }
            (Value::Bool(false), None) => (QuantConfig::measure(), key),
            (Value::Bool(true) | Value::Null, None) => (QuantConfig::quantize(), key),
            (other, _) => {
                let what = format!("`quant` must be either a bool, file path or a dictionary. Got {other}");
                return Err(ConfigError::new(key, what, "give true, false, a path, or the settings").into());
            }
        };
        if config.dump_stats_path.is_none() {
            let folder = fp8_data_path.map(Path::to_path_buf).or(habana_logs);
            config.dump_stats_path = folder.map(|folder| expand_home(&folder).join(MEASURE));
        }
        Ok(Self { config, origin })
    }
}

/// The beginning of the files' names, in a folder of their own.
pub(crate) const MEASURE: &str = "inc_output/measure";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn dict(given: Value) -> std::result::Result<QuantConfig, String> {
        let Value::Object(given) = given else { panic!("a mapping") };
        QuantConfig::from_dict(given, "quant").map_err(|error| error.to_string())
    }

    #[test]
    fn all_keys_are_read() {
        let all = json!({
            "method": "HOOKS", "mode": "measure", "observer": "maxabs_per_channel", "measure_exclude": "none",
            "fp8_config": "e5m2", "hp_dtype": "bf16", "scale_method": "MAXABS_POW2",
            "scale_params": {"input_backoff": 0.5, "weight_backoff": 0.25, "alpha": 0.7},
            "whitelist": {"names": ["fc"]}, "blacklist": {"types": ["torch.nn.Conv2d"]},
            "dump_stats_path": "stats/run", "ignore_modules_wo_measures": "True", "seperate_measure_files": false,
            "mod_dict": {}, "device_type": "gaudi3", "scale_format": "CONST", "recalc_scales": true,
        });
        let config = dict(all).unwrap();
        assert_eq!(config.mode, QuantMode::Measure);
        assert_eq!(config.observer, Observer::MaxabsPerChannel);
        assert_eq!(config.fp8_config, QuantFormat::E5M2);
        assert_eq!(config.hp_dtype, Some(HpDtype::Bf16));
        assert!(config.ignore_modules_wo_measures && !config.seperate_measure_files);
        assert_eq!(config.scale_device(), ScaleDevice::Gaudi3);
        assert!(config.takes("net.fc1", "Linear") && !config.takes("net.conv", "Linear"));
        assert!(!config.takes("net.fc1", "Conv2d"));
        assert_eq!(config.dump_stats_path.as_deref(), Some(Path::new("stats/run")));
        let written = serde_json::to_value(&config).unwrap();
        assert_eq!(dict(written).unwrap(), config);
    }

    #[test]
    fn lists_know_names_of_types() {
        let types = |types: Value| dict(json!({"allowlist": {"types": types}})).unwrap();
        let given = types(json!(["torch.nn.Linear", "BMM", "ModuleFusedSDPA", "KVCache"]));
        for (type_name, takes) in [
            ("Linear", true),
            ("Matmul", true),
            ("FusedAttention", true),
            ("KvCacheLayer", true),
            ("Conv2d", false),
            ("Softmax", false),
        ] {
            assert_eq!(given.takes("a", type_name), takes, "{type_name}");
        }
        assert!(
            QuantConfig::quantize().takes("fc", "Linear")
                && !QuantConfig::quantize().takes("lm_head", "Linear")
        );
    }

    #[test]
    fn wrong_settings_are_named() {
        for (given, expected) in [
            (json!({"mode": "calibrate"}), "quant.mode"),
            (json!({"mode": "calibrate"}), "invalid mode in custom config. Enter Quantize or Measure"),
            (json!({"measure_exclude": "PARAMS"}), "Enter OUTPUT or NONE"),
            (json!({"fp8_config": "E3M4"}), "Enter E4M3 or E5M2"),
            (json!({"scale_method": "max"}), "max"),
            (json!({"observer": "histogram"}), "quant.observer"),
            (json!({"modes": "QUANTIZE"}), "did you mean mode"),
            (json!({"allowlist": {"name": []}}), "quant.allowlist"),
            (json!({"mod_dict": {"A": "B"}}), "Custom modules are not supported: A"),
            (json!({"fake_quant": true}), "quant.fake_quant"),
            (json!({"scale_method": "smoothquant_opt"}), "maxabs_per_channel"),
            (json!({"observer": "shape"}), "shapes make no scales"),
            (json!({"observer": "save"}), "saved tensors make no scales"),
            (json!({"scale_format": "VECTOR"}), "quant.scale_format"),
            (json!({"mode": "LOAD"}), "NONE, QUANTIZE, MEASURE, SHAPE"),
            (json!({"use_qdq": true}), "quant.use_qdq"),
            (json!({"mode": "MEASURE", "scale_method": "unit_scale"}), "needs no measurements"),
            (json!({"scale_method": "maxabs_pow2", "device_for_scales": "GAUDI2"}), "maxabs_hw"),
            (json!({"ignore_modules_wo_measures": 1}), "ignore_modules_wo_measures"),
            (json!({"scale_params": {"input_backoff": 0}}), "input_backoff"),
            (json!({"scale_params": {"weight_scales": []}}), "weight_scales"),
        ] {
            let message = dict(given.clone()).unwrap_err();
            assert!(message.contains(expected), "{given}: {message}");
        }
    }

    #[test]
    fn quant_wins_over_the_variable_which_wins_over_a_bool() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let measure = file("measure.json", r#"{"mode": "MEASURE"}"#);
        let pow2 = file("pow2.json", r#"{"mode": "QUANTIZE", "scale_method": "maxabs_pow2"}"#);
        let bad = file("bad.json", "[1");
        let resolve = |quant: Value, data: Option<&str>, env: Option<&PathBuf>, logs: Option<&str>| {
            let logs = logs.map(PathBuf::from);
            Inference::resolve_with(&quant, data.map(Path::new), "P", env.cloned(), logs)
        };
        let mode = |quant, env| resolve(quant, None, env, None).map(|found| found.config.mode);
        assert_eq!(mode(json!(true), None).unwrap(), QuantMode::Quantize);
        assert_eq!(mode(Value::Null, None).unwrap(), QuantMode::Quantize);
        assert_eq!(mode(json!(false), None).unwrap(), QuantMode::Measure);
        assert_eq!(mode(Value::Null, Some(&measure)).unwrap(), QuantMode::Measure);
        assert_eq!(mode(json!(false), Some(&measure)).unwrap(), QuantMode::Measure);
        assert_eq!(mode(json!({"mode": "quantize"}), Some(&measure)).unwrap(), QuantMode::Quantize);
        let found = resolve(json!(pow2), None, Some(&measure), None).unwrap();
        assert_eq!(found.config.scale_method, ScaleMethod::MaxabsPow2);
        let path = |data, logs| resolve(json!(true), data, None, logs).unwrap().config.dump_stats_path;
        assert_eq!(path(None, None), None);
        assert_eq!(path(Some("/d"), Some("/l")), Some("/d/inc_output/measure".into()));
        assert_eq!(path(None, Some("/l")), Some("/l/inc_output/measure".into()));
        for (quant, env, expected) in [
            (json!(true), Some(&measure), ") contradicts P.quant=true, which is QUANTIZE"),
            (json!(7), None, "must be either a bool, file path or a dictionary. Got 7"),
            (json!("/nowhere.json"), None, "/nowhere.json"),
            (json!(bad), None, "Can't load"),
        ] {
            let message = resolve(quant, None, env, None).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
