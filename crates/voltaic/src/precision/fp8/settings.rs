//! What a plugin says of a run in float8.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::quant_config::Inference;
use super::recipe::Recipe;
use crate::error::{ConfigError, Error};

/// A run in float8.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fp8Settings {
    /// How scales come about.
    pub recipe: Arc<Recipe>,
    /// Lets layers of the module compute in float8, if it has none that do.
    pub replace_layers: bool,
    /// Modules whose layers stay as they are: types, fqns, or patterns of fqns with `*`.
    pub exclude_layers: Vec<String>,
    /// Layers with fewer weights stay as they are.
    pub min_weights: i64,
    /// The run measures, or computes in float8 with scales that stay.
    pub inference: Option<Arc<Inference>>,
}

/// A plugin's keys of inference.
pub(in crate::precision) struct InferenceKeys<'a> {
    pub inference: bool,
    pub quant: &'a Value,
    pub fp8_data_path: Option<&'a Path>,
}

impl Fp8Settings {
    /// What a plugin named `plugin` says; `None` if its precision is another one.
    ///
    /// # Errors
    /// If there are settings for float8 and it is another precision; as [`Recipe::check`] and [`Inference::resolve`].
    pub(in crate::precision) fn of_plugin(
        plugin: &str,
        is_fp8: bool,
        recipe: Option<&Recipe>,
        own: Self,
        keys: &InferenceKeys<'_>,
    ) -> Result<Option<Self>, ConfigError> {
        let of_training = [
            ("replace_layers", own.replace_layers),
            ("recipe", recipe.is_some()),
            ("exclude_layers", !own.exclude_layers.is_empty()),
            ("min_weights", own.min_weights != 0),
        ];
        let of_inference =
            [("quant", !keys.quant.is_null()), ("fp8_data_path", keys.fp8_data_path.is_some())];
        let first =
            |keys: &[(&'static str, bool)]| keys.iter().find(|(_, is_set)| *is_set).map(|(key, _)| *key);
        let refuse = |key: &str, what: &str, remedy: &'static str| {
            Err(ConfigError::new(format!("{plugin}.{key}"), what, remedy))
        };
        if !is_fp8 {
            let own = [("inference", keys.inference)];
            return match first(&of_training).or(first(&own)).or(first(&of_inference)) {
                None => Ok(None),
                Some(key) => {
                    let what = "is for float8, and the precision is another one";
                    refuse(key, what, "set precision: fp8, or leave it out")
                }
            };
        }
        let inference = match keys.inference {
            true => {
                if let Some(key) = first(&of_training) {
                    return refuse(key, "is for training, and inference is set", "leave one of the two out");
                }
                let found = Inference::resolve(keys.quant, keys.fp8_data_path, plugin);
                Some(Arc::new(found.map_err(|error| match error {
                    Error::Config(error) => error,
                    error => ConfigError::at(format!("{plugin}.quant"), error.into_problem("check the path")),
                })?))
            }
            false => {
                if let Some(key) = first(&of_inference) {
                    return refuse(key, "is for inference, which is not set", "set inference: true");
                }
                None
            }
        };
        let recipe = recipe.cloned().unwrap_or_default();
        recipe.check().map_err(|error| error.within(plugin))?;
        Ok(Some(Self { recipe: Arc::new(recipe), inference, ..own }))
    }
}

/// What a plugin says of float8.
macro_rules! fp8_plugin {
    ($plugin:ident) => {
        impl $plugin {
            /// What it says of float8; `None` with another precision.
            ///
            /// # Errors
            /// If it has settings for float8 with another precision, or a recipe that is none.
            pub fn fp8(&self, precision: Precision) -> Result<Option<Fp8Settings>, ConfigError> {
                let own = Fp8Settings {
                    replace_layers: self.replace_layers,
                    exclude_layers: self.exclude_layers.clone(),
                    min_weights: self.min_weights,
                    ..Fp8Settings::default()
                };
                let is_fp8 = precision == Precision::Fp8;
                let keys = InferenceKeys {
                    inference: self.inference,
                    quant: &self.quant,
                    fp8_data_path: self.fp8_data_path.as_deref(),
                };
                Fp8Settings::of_plugin(stringify!($plugin), is_fp8, self.recipe.as_ref(), own, &keys)
            }

            /// The plugin for inference, to measure (`false`) or to quantize (`true`, the path of a JSON file, or the settings):
            /// `plugin.inference(false).convert_modules(&mut model)` is the original's
            /// `plugin.convert_modules(model, inference=True, quant=False)`.
            #[must_use = "it is another plugin"]
            pub fn inference(&self, quant: impl Into<Value>) -> Self {
                Self { inference: true, quant: quant.into(), ..self.clone() }
            }
        }
    };
}
pub(in crate::precision) use fp8_plugin;
