//! Layered configuration: defaults, then YAML files, then `VOLTAIC_...` variables, then the command line.
//!
//! The layers are merged as trees whose leaves remember where they were set, held against the JSON schema of the
//! target type (so that all problems are reported together), and deserialized once. The target's serde struct is the
//! only truth: its doc comments are the help, its `Default` is the default, and its fields are the keys. A field that
//! should accept an old name needs that name in its schema; `#[serde(alias)]` is invisible there.
//!
//! Text that begins with `~/` is a path: `$HOME` takes the place of `~`. `${oc.env:NAME,default}` stands for a variable of the environment, and
//! `${trainer.max_epochs}` for the value of another key, alone or within a text, as in OmegaConf; `\${` is text. What has no value, such
//! as `???`, is an error. Booleans and integers may be written as in YAML 1.1: `off`, `yes`, `10_000`.
//!
//! A struct may say why it lacks a key that its users will look for, with
//! `#[schemars(extend("x-refused" = json!({"key": {"what": "what is wrong", "remedy": "how to fix it"}})))]`. Null stands there for a key not given.
//!
//! This module does not depend on any component: it works for every type that is `DeserializeOwned + JsonSchema`.
//!
//! ```
//! use voltaic::config::{Assignment, Layers};
//!
//! #[derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
//! #[serde(default, deny_unknown_fields)]
//! struct Run {
//!     /// Number of epochs.
//!     max_epochs: usize,
//! }
//! impl Default for Run {
//!     fn default() -> Self {
//!         Self { max_epochs: 10 }
//!     }
//! }
//!
//! let mut layers = Layers::of::<Run>();
//! layers.text("run.yaml", "max_epochs: 3");
//! assert_eq!(layers.load::<Run>()?.value.max_epochs, 3);
//!
//! layers.assign(&Assignment::parse("max_epoch=5"));
//! let error = layers.load::<Run>().err().map(|error| error.to_string());
//! assert_eq!(error.as_deref(), Some("max_epoch (from command line): unknown key; did you mean max_epochs"));
//! # Ok::<(), voltaic::error::ConfigError>(())
//! ```

mod assign;
mod check;
mod defaults;
mod document;
mod dropped;
mod emit;
mod file;
mod home;
mod interpolate;
mod json;
mod keys;
mod layers;
mod macros;
mod merge;
mod node;
mod schema;
mod size;
mod suggest;
mod switch;
mod words;
mod yaml;

pub use assign::Assignment;
pub use emit::to_yaml;
pub use keys::{Key, faults, keys};
pub use layers::{Layers, Loaded, PrintConfig, Settings, deserialize_at, schema_of};
pub use node::{Origin, Origins};

pub(crate) use document::Document;
pub(crate) use emit::{first_paragraph, inline, wrap};
pub(crate) use file::{open_file, read_file, read_text_file};
pub(crate) use home::expand_home;
pub(crate) use layers::Survey;
pub(crate) use macros::{conversions, setters};
pub(crate) use size::{format_size, parse_size};
pub(crate) use suggest::nearest;
pub(crate) use switch::read_switch;
