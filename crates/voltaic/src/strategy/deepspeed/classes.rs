//! Sections `optimizer` and `scheduler`: a class of DeepSpeed or PyTorch, which is one of voltaic here.

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::config::Document;
use crate::error::ConfigProblem;
use crate::optim::{LrSchedulerConfig, OptimizerConfig};

/// Section `optimizer`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-no-effect" = json!({"legacy_fusion": "it is for DeepSpeed's fused kernels"})))]
pub(crate) struct OptimizerSection {
    /// The class.
    r#type: Option<String>,
    /// Its settings.
    params: Map<String, Value>,
}

/// Section `scheduler`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct SchedulerSection {
    /// The class.
    r#type: Option<String>,
    /// Its settings.
    params: Map<String, Value>,
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

impl OptimizerSection {
    /// The optimizer, if the section is given and nothing is wrong with it.
    pub fn resolve(&self, document: &mut Document) -> Option<OptimizerConfig> {
        let name = class_name("optimizer", self.r#type.as_deref(), document)?;
        let mut params = self.params.clone();
        if let Some(norm) = params.remove("max_grad_norm") {
            let what = format!("{norm} is not a setting of an optimizer");
            document.refuse("optimizer.params.max_grad_norm", what, "set gradient_clipping");
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
                    document.refuse("optimizer.params.per_head_muon", what, "set false");
                }
            }
            _ => {}
        }
        let config: OptimizerConfig = build("optimizer", class, params, "optimizer", document)?;
        for ConfigProblem { key, problem, .. } in config.problems() {
            let key = key.trim_start_matches("optimizer.init_args.");
            document.refuse(&format!("optimizer.params.{key}"), problem.what, problem.remedy);
        }
        Some(config)
    }
}

impl SchedulerSection {
    /// The schedule, if the section is given and nothing is wrong with it.
    pub fn resolve(&self, document: &mut Document) -> Option<LrSchedulerConfig> {
        let name = class_name("scheduler", self.r#type.as_deref(), document)?;
        build("scheduler", name, self.params.clone(), "schedule", document)
    }
}

/// The name of the class of a section that is given.
fn class_name<'a>(key: &str, name: Option<&'a str>, document: &mut Document) -> Option<&'a str> {
    if name.is_none() && document.has(key) {
        document.refuse(&format!("{key}.type"), "is missing".to_owned(), "name the class");
    }
    name
}

/// The class of this name with these settings.
fn build<T: DeserializeOwned>(
    key: &str,
    class: &str,
    params: Map<String, Value>,
    what: &str,
    document: &mut Document,
) -> Option<T> {
    match serde_json::from_value(json!({"class_path": class, "init_args": params})) {
        Ok(config) => Some(config),
        Err(error) => {
            document.refuse(key, error.to_string(), format!("use a setting of this {what}"));
            None
        }
    }
}

fn take_flag(params: &mut Map<String, Value>, key: &str, default: bool) -> bool {
    let flag = params.get(key).and_then(Value::as_bool);
    if flag.is_some() {
        params.remove(key); // anything else stays, and is refused
    }
    flag.unwrap_or(default)
}

/// DeepSpeed's Adam is AdamW unless `adam_w_mode` is false; its weight decay is 0 unless given. `torch_adam` and
/// `fp32_optimizer_states` choose kernels, and the numbers stay the same.
fn adam_class(class: &str, params: &mut Map<String, Value>) -> &'static str {
    let (is_torch, w_mode) = (take_flag(params, "torch_adam", false), take_flag(params, "adam_w_mode", true));
    take_flag(params, "fp32_optimizer_states", true);
    if !params.contains_key("weight_decay") && !is_torch {
        params.insert("weight_decay".to_owned(), 0.0.into());
    }
    let decoupled = class == "AdamW" || w_mode;
    if decoupled { "AdamW" } else { "Adam" }
}
