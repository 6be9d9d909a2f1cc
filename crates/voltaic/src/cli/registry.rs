//! The models and data modules that a binary offers by name.

use std::any::{Any, TypeId, type_name};

use schemars::{JsonSchema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::outcome::config_error;
use super::request::{RunRequest, Verb};
use crate::config::Survey;
use crate::error::{ConfigError, ConfigProblem};
use crate::ffi;
use crate::nn::init;

/// A model or data module that is made from configuration keys.
///
/// Each field of `Config` is a key below `model` or `data`; its doc comment is the help text and `Default` gives the
/// value if the key is left out. The first paragraph of the struct's own doc comment says in `models` and `--help` what is made
/// from it. Mark the struct `#[serde(default)]`, so that code may leave out fields, too.
pub trait FromConfig: Sized + 'static {
    /// The keys.
    type Config: Serialize + DeserializeOwned + JsonSchema + Default;

    /// What a sample is, if several kinds of samples have one type of batch: `images with their class`. A model and data that both name
    /// one fit together if they name the same.
    const SAMPLES: Option<&'static str> = None;

    /// Makes it. The random generators are seeded before.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the run. A [`ConfigError`] with keys below `model` or `data` is the user's mistake
    /// and ends with exit code 2.
    fn from_config(config: Self::Config) -> anyhow::Result<Self>;
}

type Run = Box<dyn Fn(&RunRequest, Box<dyn Any>, Box<dyn Any>) -> anyhow::Result<()>>;
type Generate = Box<dyn Fn(&RunRequest, Box<dyn Any>, Box<dyn Any>) -> anyhow::Result<()>>;
type Build = Box<dyn Fn(&RunRequest) -> anyhow::Result<Box<dyn Any>>>;
type OwnData = Box<dyn Fn() -> Box<dyn Any>>;
type Check = Box<dyn Fn(&RunRequest) -> Result<(), ConfigError>>;

/// A registered model or data module: its keys, and what it can be combined with.
pub(super) struct Class {
    pub name: String,
    pub summary: String,
    /// Name of the batch type, for people.
    batch: String,
    samples: Option<&'static str>,
    schema: fn(&mut SchemaGenerator) -> schemars::Schema,
    defaults: Value,
    /// The type that data must have to reach the model.
    seam: TypeId,
}

struct Section {
    key: String,
    schema: fn(&mut SchemaGenerator) -> schemars::Schema,
    default: Value,
    description: String,
}

/// Models and data modules by name, and the sections of the configuration.
pub struct Registry {
    sections: Vec<Section>,
    models: Vec<Model>,
    data: Vec<(Class, Build)>,
    checks: Vec<(Vec<&'static str>, Check)>,
    seed: Box<dyn Fn(u64) -> anyhow::Result<()>>,
}

/// How a model is made, and what runs it with its data.
struct Model {
    class: Class,
    build: Build,
    run: Run,
    /// What continues prompts with it, if it is a language model.
    generate: Option<Generate>,
    /// What it is run with if no data is chosen.
    own_data: Option<OwnData>,
}

impl Registry {
    /// A registry without models, data and sections.
    pub fn empty() -> Self {
        Self {
            sections: Vec::new(),
            models: Vec::new(),
            data: Vec::new(),
            checks: Vec::new(),
            seed: Box::new(|_| Ok(())),
        }
    }

    /// Adds a section that is always there, with its type's default, such as `trainer`.
    #[must_use]
    pub fn section<C: Serialize + JsonSchema + Default>(self, key: &str, description: &str) -> Self {
        let default = serde_json::to_value(C::default()).unwrap_or_else(|_| json!({}));
        self.add_section(key, description, SchemaGenerator::subschema_for::<C>, default)
    }

    /// Adds a section that is null unless given, such as `optimizer`.
    #[must_use]
    pub fn optional_section<C: JsonSchema>(self, key: &str, description: &str) -> Self {
        self.add_section(key, description, SchemaGenerator::subschema_for::<Option<C>>, Value::Null)
    }

    fn add_section(
        mut self,
        key: &str,
        description: &str,
        schema: fn(&mut SchemaGenerator) -> schemars::Schema,
        default: Value,
    ) -> Self {
        self.sections.push(Section {
            key: key.to_owned(),
            schema,
            default,
            description: description.to_owned(),
        });
        self
    }

    /// Sets what seeds the random generators; called before model and data are made.
    #[must_use]
    pub fn seed_with(mut self, seed: impl Fn(u64) -> anyhow::Result<()> + 'static) -> Self {
        self.seed = Box::new(seed);
        self
    }

    /// Adds a check of some sections, done before model and data are made, so that what it finds is reported
    /// together with their problems. Left out if one of the sections is so wrong that it has no value.
    #[must_use]
    pub fn check_with(
        mut self,
        sections: &[&'static str],
        check: impl Fn(&RunRequest) -> Result<(), ConfigError> + 'static,
    ) -> Self {
        self.checks.push((sections.to_vec(), Box::new(check)));
        self
    }

    /// Adds a model together with what runs it.
    ///
    /// `D` is the seam to the data, such as `dyn DataModule<Batch = B>`: only data registered with the same `D` reaches
    /// this model. `batch` names the batch type for people.
    #[must_use]
    pub fn model_with<M: FromConfig, D: ?Sized + 'static>(
        mut self,
        name: &str,
        batch: &str,
        run: impl Fn(&RunRequest, &mut M, &mut D) -> anyhow::Result<()> + 'static,
    ) -> Self {
        let class = Class::new::<M, D>(name, batch);
        let (for_build, for_run) = (name.to_owned(), name.to_owned());
        let build = move |request: &RunRequest| {
            let make = || make::<M>("model", &for_build, request);
            let model = match request.verb() {
                _ if request.may_shard_weights() => init::deferred(make),
                // none is left as it is drawn, and a text has its own random numbers
                Verb::Generate if request.takes_all_weights() => init::without_draws(make),
                _ => make(),
            };
            Ok(Box::new(model?) as Box<dyn Any>)
        };
        let run = move |request: &RunRequest, model: Box<dyn Any>, data: Box<dyn Any>| {
            let mut data = data.downcast::<Box<D>>().map_err(|_| {
                anyhow::anyhow!("data for {for_run} is no {}; register both with one type", type_name::<D>())
            })?;
            let mut model =
                model.downcast::<M>().map_err(|_| anyhow::anyhow!("{for_run} is no {}", type_name::<M>()))?;
            run(request, &mut model, &mut data)
        };
        self.models.retain(|model| model.class.name != name);
        self.models.push(Model {
            class,
            build: Box::new(build),
            run: Box::new(run),
            generate: None,
            own_data: None,
        });
        self
    }

    /// Lets the model of this name, registered with data of the type `D`, continue prompts.
    #[must_use]
    pub(super) fn generate_with<M: FromConfig, D: ?Sized + 'static>(
        mut self,
        name: &str,
        generate: impl Fn(&RunRequest, M, &mut D) -> anyhow::Result<()> + 'static,
    ) -> Self {
        if let Some(model) = self.models.iter_mut().find(|model| model.class.name == name) {
            model.generate = Some(Box::new(move |request, model, data| {
                match (model.downcast::<M>(), data.downcast::<Box<D>>()) {
                    (Ok(model), Ok(mut data)) => generate(request, *model, &mut data),
                    _ => anyhow::bail!(
                        "the model or its data are of other types than what they were registered with"
                    ),
                }
            }));
        }
        self
    }

    /// Lets the model of this name run without `data`, which it has itself: `make` gives what stands in for it. With such a
    /// model a single data module is no longer chosen unasked.
    #[must_use]
    pub fn own_data_with<D: ?Sized + 'static>(mut self, name: &str, make: fn() -> Box<D>) -> Self {
        if let Some(model) = self.models.iter_mut().find(|model| model.class.name == name) {
            model.own_data = Some(Box::new(move || Box::new(make()) as Box<dyn Any>));
        }
        self
    }

    /// Adds a data module, boxed as the type that models take.
    #[must_use]
    pub fn data_with<T: FromConfig, D: ?Sized + 'static>(
        mut self,
        name: &str,
        batch: &str,
        boxed: fn(T) -> Box<D>,
    ) -> Self {
        let own_name = name.to_owned();
        let build = move |request: &RunRequest| {
            let data: T = make("data", &own_name, request)?;
            Ok(Box::new(boxed(data)) as Box<dyn Any>)
        };
        self.data.retain(|(class, _)| class.name != name);
        self.data.push((Class::new::<T, D>(name, batch), Box::new(build)));
        self
    }

    pub(super) fn models(&self) -> impl Iterator<Item = &Class> {
        self.models.iter().map(|model| &model.class)
    }

    /// Whether the model can run without `data`.
    pub(super) fn has_own_data(&self, class: &Class) -> bool {
        self.models.iter().any(|model| model.class.name == class.name && model.own_data.is_some())
    }

    pub(super) fn data_modules(&self) -> impl Iterator<Item = &Class> {
        self.data.iter().map(|(class, _)| class)
    }

    /// Names of the data modules whose batches a model takes.
    pub(super) fn data_for(&self, model: &Class) -> Vec<&str> {
        self.data_modules().filter(|data| data.fits(model)).map(|data| data.name.as_str()).collect()
    }

    /// The schema of a whole run.
    pub fn schema(&self) -> Value {
        let mut generator = SchemaGenerator::default();
        let mut properties = Map::new();
        properties.insert(
            "seed_everything".to_owned(),
            json!({
                "description": "Seed of all random numbers; `true` for 0, `false` to leave them unseeded.",
                "anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0}],
                "default": true,
            }),
        );
        let (before, after): (Vec<&Section>, Vec<&Section>) =
            self.sections.iter().partition(|section| section.key == "trainer");
        let add =
            |section: &Section, properties: &mut Map<String, Value>, generator: &mut SchemaGenerator| {
                let mut schema = (section.schema)(generator).to_value();
                if let Some(entries) = schema.as_object_mut() {
                    entries.insert("default".to_owned(), section.default.clone());
                    entries.insert("description".to_owned(), Value::String(section.description.clone()));
                }
                properties.insert(section.key.clone(), schema);
            };
        for section in before {
            add(section, &mut properties, &mut generator);
        }
        let models: Vec<&Class> = self.models().collect();
        let data: Vec<&Class> = self.data_modules().collect();
        properties
            .insert("model".to_owned(), family("The model, by class name.", &models, true, &mut generator));
        let is_needed = self.models.iter().all(|model| model.own_data.is_none());
        properties
            .insert("data".to_owned(), family("The data, by class name.", &data, is_needed, &mut generator));
        for section in after {
            add(section, &mut properties, &mut generator);
        }
        properties.insert(
            "ckpt_path".to_owned(),
            json!({
                "description": "Checkpoint to start from: a path, `last`, `best` or `hpc`.",
                "type": ["string", "null"],
                "default": null,
            }),
        );
        properties.insert("weights".to_owned(), weights());
        let definitions = generator.take_definitions(true);
        json!({
            "type": "object",
            "properties": properties,
            "additionalProperties": false,
            "$defs": definitions,
            "x-no-effect": {"weights_only": "files are read as data, and no code in them runs"},
            "x-refused": {
                "verbose": {"what": "the metrics are what the command prints", "remedy": "remove it", "unless": true},
                "return_predictions": {
                    "what": "the predictions are what the command prints",
                    "remedy": "remove it, or redirect the output",
                    "unless": true,
                },
            },
        })
    }

    /// Checks all sections, makes model and data, and runs them.
    ///
    /// # Errors
    /// All problems of the configuration together: those found already, of the sections, of model and data.
    pub(super) fn execute(&self, request: &RunRequest, mut survey: Survey) -> anyhow::Result<()> {
        for (sections, check) in &self.checks {
            if sections.iter().all(|section| survey.is_usable(section))
                && let Err(mut error) = check(request)
            {
                survey.annotate(&mut error);
                survey.add(error.problems);
            }
        }
        if survey.problems.is_empty()
            && let Some(seed) = request.seed()
        {
            (self.seed)(seed)?;
        }
        // before the model: what its initial values leave in libtorch's own heap does not go back to the system
        if let Err(error) = ffi::install_host_pool() {
            tracing::debug!("{error}"); // the trainer says so
        }
        let chosen = self.chosen(request);
        let (model, data) = match chosen {
            Ok((model, source)) => {
                // data first, since a model may take random numbers
                let data = survey.is_usable("data").then(|| match source {
                    DataSource::Chosen(build) => build(request),
                    DataSource::Own(make) => Ok(make()),
                });
                let model_is_usable = survey.is_usable("model");
                let data = take(data, &mut survey)?;
                let built = take(model_is_usable.then(|| (model.build)(request)), &mut survey)?;
                (built.map(|built| (model, built)), data)
            }
            Err(error) => {
                let is_usable = |problem: &ConfigProblem| survey.is_usable(&problem.key);
                let found = error.problems.into_iter().filter(is_usable).collect();
                survey.add(found);
                (None, None)
            }
        };
        match (model, data) {
            (Some((model, built)), Some(data)) if survey.problems.is_empty() => match &model.generate {
                Some(generate) if request.verb() == Verb::Generate => generate(request, built, data),
                None if request.verb() == Verb::Generate => {
                    let what = format!("{} is no language model", model.class.name);
                    let remedy =
                        "choose one, such as Gpt, or register yours with Registry::language_model".to_owned();
                    Err(request.problem("model", what, remedy).into())
                }
                _ => (model.run)(request, built, data),
            },
            _ => Err(ConfigError { problems: survey.problems }.into()),
        }
    }

    /// The model and the data module that the configuration names, if they fit together.
    fn chosen(&self, request: &RunRequest) -> Result<(&Model, DataSource<'_>), ConfigError> {
        let (model_name, data_name) = (request.class("model"), request.class("data"));
        if let (Ok(name), Err(_)) = (&model_name, &data_name)
            && let Some(model) = self.models.iter().find(|model| model.class.name == *name)
            && let Some(own_data) = &model.own_data
        {
            return Ok((model, DataSource::Own(own_data)));
        }
        if let (Err(first), Err(second)) = (&model_name, &data_name) {
            let problems = first.problems.iter().chain(&second.problems).cloned().collect();
            return Err(ConfigError { problems });
        }
        let (model_name, data_name) = (model_name?, data_name?);
        let unknown = |key: &str, name: &str| {
            let what = format!("`{name}` is not registered");
            request.problem(key, what, "choose a name that `models` lists".to_owned())
        };
        let model = self
            .models
            .iter()
            .find(|model| model.class.name == model_name)
            .ok_or_else(|| unknown("model", model_name))?;
        let (data, build) = self
            .data
            .iter()
            .find(|(class, _)| class.name == data_name)
            .ok_or_else(|| unknown("data", data_name))?;
        if !data.fits(&model.class) {
            let (given, taken) = (data.batches(), model.class.batches());
            let what = format!("{data_name} gives batches of {given}, but {model_name} takes {taken}");
            let fitting = self.data_for(&model.class);
            let remedy = match fitting.as_slice() {
                [] => format!("register data with batches of {taken}"),
                names => format!("choose --data={}", names.join(" or --data=")),
            };
            return Err(request.problem("data", what, remedy));
        }
        Ok((model, DataSource::Chosen(build)))
    }
}

/// Where the data of a run comes from.
enum DataSource<'a> {
    Chosen(&'a Build),
    Own(&'a OwnData),
}

/// What was made, if anything; the problems of its keys go to the others, and hide other failures.
fn take(
    made: Option<anyhow::Result<Box<dyn Any>>>,
    survey: &mut Survey,
) -> anyhow::Result<Option<Box<dyn Any>>> {
    match made {
        None => Ok(None),
        Some(Ok(made)) => Ok(Some(made)),
        Some(Err(error)) => match config_error(&error) {
            Some(config) => {
                survey.add(config.problems.clone());
                Ok(None)
            }
            None if survey.problems.is_empty() => Err(error),
            None => Ok(None),
        },
    }
}

impl Class {
    fn new<T: FromConfig, D: ?Sized + 'static>(name: &str, batch: &str) -> Self {
        let schema = crate::config::schema_of::<T::Config>();
        let summary = schema.get("description").and_then(Value::as_str).unwrap_or_default();
        Self {
            name: name.to_owned(),
            summary: crate::config::first_paragraph(summary),
            batch: batch.to_owned(),
            samples: T::SAMPLES,
            schema: SchemaGenerator::subschema_for::<T::Config>,
            defaults: serde_json::to_value(T::Config::default()).unwrap_or_else(|_| json!({})),
            seam: TypeId::of::<D>(),
        }
    }

    /// The type of a batch with what its samples are.
    pub fn batches(&self) -> String {
        self.samples.map_or_else(|| self.batch.clone(), |samples| format!("{}: {samples}", self.batch))
    }

    /// Whether one of the two is data for the other.
    fn fits(&self, other: &Self) -> bool {
        let are_alike = self.samples.zip(other.samples).is_none_or(|(one, other)| one == other);
        self.seam == other.seam && are_alike
    }
}

/// The schema of one of several classes. A single class that is needed is the default, so that its keys need no class name.
fn family(description: &str, classes: &[&Class], is_needed: bool, generator: &mut SchemaGenerator) -> Value {
    let mut options: Vec<Value> = Vec::new();
    for class in classes {
        let mut arguments = (class.schema)(generator).to_value();
        if let Some(entries) = arguments.as_object_mut() {
            entries.insert("default".to_owned(), class.defaults.clone());
        }
        options.push(json!({
            "type": "object",
            "description": class.summary,
            "properties": {"class_path": {"type": "string", "const": class.name}, "init_args": arguments},
            "required": ["class_path", "init_args"],
            "additionalProperties": false,
        }));
    }
    options.push(json!({"type": "null"}));
    let default = match classes {
        [only] if is_needed => json!({"class_path": only.name, "init_args": only.defaults}),
        _ => Value::Null,
    };
    json!({"description": description, "anyOf": options, "default": default})
}

/// The schema of `weights`.
fn weights() -> Value {
    json!({
        "description": "Weights that the call begins with: a checkpoint or a file of weights, or a path, how strict, and how to rename. ckpt_path comes first.",
        "anyOf": [
            {"type": ["string", "null"]},
            {
                "type": "object",
                "properties": {
                    "path": {
                        "description": "The checkpoint or file of weights.",
                        "type": ["string", "null"],
                        "default": null,
                    },
                    "strict": {
                        "description": "All names must be on both sides.",
                        "type": "boolean",
                        "default": true,
                    },
                    "rename": {
                        "description": "FROM=TO: names that begin with FROM begin with TO instead.",
                        "type": "array",
                        "items": {"type": "string"},
                        "default": [],
                    },
                },
                "additionalProperties": false,
            },
        ],
        "default": null,
    })
}

/// Reads the arguments of a class and makes it.
fn make<T: FromConfig>(key: &str, name: &str, request: &RunRequest) -> anyhow::Result<T> {
    let at = format!("{key}.init_args");
    let config: T::Config = request.section(&at)?;
    T::from_config(config).map_err(|error| {
        match config_error(&error).cloned() {
            Some(mut config) => {
                // The problems of a class have keys relative to it.
                for problem in &mut config.problems {
                    problem.key = format!("{at}.{}", problem.key);
                }
                request.origins().annotate(&mut config);
                anyhow::Error::new(config)
            }
            None => error.context(format!("cannot make {key} {name}")),
        }
    })
}
