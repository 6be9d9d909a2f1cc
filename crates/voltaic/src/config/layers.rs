//! The layers of a configuration, from their sources to one typed value.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::assign::{Assignment, apply};
use super::check::{Checked, Found, check};
use super::defaults::{fill, prune};
use super::dropped::{Left, Moved};
use super::emit::{to_commented_yaml, to_yaml};
use super::file::{PipeLimits, read_file_or_pipe};
use super::home::expand_home;
use super::interpolate::interpolate;
use super::merge::{Remarks, merge};
use super::node::{Data, Node, Origin, Origins};
use super::schema::{View, spread};
use super::suggest::nearest;
use super::yaml;
use crate::error::{ConfigError, ConfigProblem, Problem};

/// Prefix of the environment variables that set configuration keys.
const ENV_PREFIX: &str = "VOLTAIC_";

/// A longer file is not a configuration.
const MAX_FILE: u64 = 16 << 20;
/// How long a pipe that a file is named by may have nothing to read: commands such as `ssh` take their time.
const PATIENCE: PipeLimits =
    PipeLimits { no_writer: Duration::from_secs(10), silence: Duration::from_secs(60) };

/// A configuration that grows layer by layer: each call outranks the calls before it.
///
/// Problems are kept until [`Layers::load`] or [`Layers::resolve`] reports them all.
#[derive(Debug, Clone)]
pub struct Layers {
    schema: Arc<Value>,
    tree: Node,
    remarks: Remarks,
    /// Sources that could not be read at all; with them, later checks would complain of what is not there.
    unreadable: Vec<ConfigProblem>,
    /// Files may have sections of these names, of which the first is the one that counts.
    sections: Vec<String>,
    /// Files may have sections named by classes of this list.
    class_list: Vec<&'static str>,
}

/// A typed configuration and where each of its values was set.
#[derive(Debug, Clone)]
pub struct Loaded<T> {
    /// The value.
    pub value: T,
    /// Where each leaf was set.
    pub origins: Origins,
    /// The merged tree with all defaults.
    pub tree: Value,
}

/// A merged and checked configuration that is not yet any Rust type.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where each leaf was set.
    pub origins: Origins,
    /// The merged tree with all defaults.
    pub tree: Value,
    /// Remarks for the user that are not errors, one sentence each.
    pub notes: Vec<String>,
}

/// A configuration with its problems.
#[derive(Debug, Clone)]
pub(crate) struct Survey {
    /// The tree without what is wrong.
    pub settings: Settings,
    /// What is wrong.
    pub problems: Vec<ConfigProblem>,
    /// Keys whose sections cannot be used even so.
    unusable: Vec<String>,
    /// Keys that have their defaults in place of what was set.
    dropped: Vec<String>,
    /// Elements of lists that others were taken out before.
    moved: Moved,
}

impl Survey {
    /// Whether a section, such as `trainer`, can be looked at more closely.
    pub fn is_usable(&self, section: &str) -> bool {
        !self.unusable.iter().any(|key| key.split('.').next() == Some(section))
    }

    /// Names what a closer look has found by the keys that the user has written, with their origins.
    pub fn annotate(&self, error: &mut ConfigError) {
        for problem in &mut error.problems {
            problem.key = self.moved.original(&problem.key);
        }
        self.settings.origins.annotate(error);
    }

    /// Adds what a closer look has found, but for what may come of a default in place of what was set.
    pub fn add(&mut self, found: Vec<ConfigProblem>) {
        let last_part = |key: &'_ String| key.rsplit('.').next().map(str::to_owned);
        let mut dropped: Vec<String> = self.dropped.iter().filter_map(last_part).collect();
        dropped.retain(|part| part.parse::<usize>().is_err()); // nothing stands in the place of an element
        let is_own = |problem: &ConfigProblem| {
            let text = problem.to_string();
            let mut words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            !words.any(|word| dropped.iter().any(|part| part == word))
        };
        self.problems.extend(found.into_iter().filter(is_own));
    }
}

/// How [`Layers::print_config`] writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrintConfig {
    /// Leave out what equals the default.
    pub skip_default: bool,
    /// Write each key's description above it.
    pub comments: bool,
}

impl PrintConfig {
    /// Reads the words after `--print_config=`: `skip_default`, `comments`, or both with a comma between.
    ///
    /// # Errors
    /// [`ConfigError`] for any other word.
    pub fn parse(words: &str) -> Result<Self, ConfigError> {
        let mut print = Self::default();
        for word in words.split(',').filter(|word| !word.is_empty()) {
            match word {
                "skip_default" => print.skip_default = true,
                "comments" => print.comments = true,
                other => {
                    let what = format!("`{other}` is unknown");
                    return Err(ConfigError::new(
                        "print_config",
                        what,
                        "give skip_default, comments or both",
                    ));
                }
            }
        }
        Ok(print)
    }
}

impl Layers {
    /// A configuration of type `T` with nothing but its defaults.
    pub fn of<T: JsonSchema>() -> Self {
        Self::new(schema_of::<T>())
    }

    /// A configuration of this JSON schema with nothing but its defaults.
    pub fn new(schema: Value) -> Self {
        let schema = Arc::new(spread(schema));
        let mut tree = Node::map(Origin::Default);
        let view = View::new(&schema);
        fill(&mut tree, &view, view.default);
        Self {
            schema,
            tree,
            remarks: Remarks::default(),
            unreadable: Vec::new(),
            sections: Vec::new(),
            class_list: Vec::new(),
        }
    }

    /// The JSON schema.
    pub fn schema(&self) -> &Value {
        &self.schema
    }

    /// Of files with a section for each verb (`fit: {trainer: ..}`, as LightningCLI writes them), takes the section `own`, over the keys
    /// beside the sections, and leaves the `others`.
    pub fn with_sections<'a>(mut self, own: &'a str, others: impl IntoIterator<Item = &'a str>) -> Self {
        let names = std::iter::once(own).chain(others.into_iter().filter(|other| *other != own));
        self.sections = names.map(str::to_owned).collect();
        self
    }

    /// Takes sections that are named by a class of the list at `path` as further elements of it, as LightningCLI has callbacks that a
    /// program forces: `ModelCheckpoint: {monitor: val_loss}`, also `model_checkpoint`.
    pub fn with_class_sections(mut self, path: &[&'static str]) -> Self {
        self.class_list = path.to_vec();
        self
    }

    /// Adds a YAML file, or what a pipe gives.
    pub fn file(&mut self, path: impl AsRef<Path>) {
        self.file_of(path, &Origin::Default);
    }

    /// Adds a YAML file that is named at `origin`.
    fn file_of(&mut self, path: impl AsRef<Path>, origin: &Origin) {
        let path = &*expand_home(path);
        if let Some(text) = self.source(path, "config", origin) {
            self.text(&path.display().to_string(), &text);
        }
    }

    /// The text of a file that `key` names at `origin`; `None`, and a problem, if it cannot be read.
    fn source(&mut self, path: &Path, key: &str, origin: &Origin) -> Option<String> {
        let (what, remedy) = match read_file_or_pipe(path, MAX_FILE, PATIENCE).map(String::from_utf8) {
            Ok(Ok(text)) => return Some(text),
            Ok(Err(error)) => {
                let offset = error.utf8_error().valid_up_to();
                let what = format!("{} is not UTF-8 text at byte {offset}", path.display());
                (what, "give a YAML file".to_owned())
            }
            Err(error) => {
                let remedy = match similar_file(path) {
                    _ if error.kind() == ErrorKind::TimedOut => "write to it, or give a file".to_owned(),
                    Some(other) => format!("did you mean {other}"),
                    None => "check the path".to_owned(),
                };
                (format!("cannot read {}: {error}", path.display()), remedy)
            }
        };
        let problem = Problem::new(what, remedy);
        self.unreadable.push(ConfigProblem { key: key.to_owned(), origin: origin.label(), problem });
        None
    }

    /// Adds YAML text; `name` stands for the file in origins.
    pub fn text(&mut self, name: &str, yaml: &str) {
        match yaml::read(yaml, name) {
            Ok(mut node) => {
                let own = self.take_sections(&mut node);
                for mut node in std::iter::once(node).chain(own) {
                    self.class_sections(&mut node);
                    merge(&mut self.tree, node, &View::new(&self.schema), "", &mut self.remarks);
                }
            }
            Err(problem) => self.unreadable.push(*problem),
        }
    }

    /// Adds those of the given environment variables that set keys: `VOLTAIC_TRAINER__MAX_EPOCHS=3`.
    ///
    /// `__` stands for the dot, and capitals for small letters. Variables with the prefix but without `__` that name no top-level key belong to other
    /// parts of the library (`VOLTAIC_HPU_DEVICES`) and are left alone.
    pub fn env(&mut self, variables: impl IntoIterator<Item = (String, String)>) {
        self.env_with(ENV_PREFIX, false, variables);
    }

    /// Adds those of the given variables that LightningCLI has for a verb: `PL_FIT__TRAINER__MAX_EPOCHS=3`, and before them the file that
    /// `PL_FIT__CONFIG` names. There files outrank variables, so this comes before [`Layers::file`].
    pub fn lightning_env(&mut self, verb: &str, variables: impl IntoIterator<Item = (String, String)>) {
        let prefix = format!("PL_{}__", verb.to_uppercase());
        let is_config = |(name, _): &(String, String)| name.strip_prefix(&prefix) == Some("CONFIG");
        let (files, keys): (Vec<_>, Vec<_>) = variables.into_iter().partition(is_config);
        files.into_iter().for_each(|(name, path)| self.file_of(path, &Origin::Env(name)));
        self.env_with(&prefix, true, keys);
    }

    /// Adds the variables with a prefix. Unless `all` are keys, those without `__` that name no top-level key are none.
    fn env_with(&mut self, prefix: &str, all: bool, variables: impl IntoIterator<Item = (String, String)>) {
        let mut variables: Vec<(String, String)> = variables.into_iter().collect();
        variables.sort();
        let schema = Arc::clone(&self.schema);
        let view = View::new(&schema);
        for (name, value) in variables {
            let Some(rest) = name.strip_prefix(prefix) else { continue };
            let parts: Vec<String> = rest.split("__").map(str::to_lowercase).collect();
            let is_key = all || parts.len() > 1 || view.child(&parts[0]).is_some();
            if is_key {
                let assignment = Assignment { key: parts.join("."), appends: false, value: Some(value) };
                apply(&mut self.tree, &assignment, &Origin::Env(name), &view, &mut self.remarks);
            }
        }
    }

    /// Takes the sections of verbs out of a file, and gives the one that counts.
    fn take_sections(&self, node: &mut Node) -> Option<Node> {
        let Data::Map(entries) = &mut node.data else { return None };
        let mut sections = self.sections.iter().map(|name| {
            let is_section = entries.get(name).is_some_and(|section| section.entries().is_some());
            if is_section { entries.shift_remove(name) } else { None }
        });
        let own = sections.next().flatten();
        sections.for_each(drop);
        own
    }

    /// Moves sections that are named by classes to the list of [`Layers::with_class_sections`].
    fn class_sections(&self, node: &mut Node) {
        let view = View::new(&self.schema);
        let list = self.class_list.iter().try_fold(view.clone(), |view, part| view.child(part));
        let (Data::Map(entries), Some(list), Some((last, before))) =
            (&mut node.data, list, self.class_list.split_last())
        else {
            return;
        };
        let class_of =
            |name: &str| list.item(0).class(&name.replace('_', "")).map(|class| class.name.to_owned());
        let names = entries.keys().filter(|name| view.child(name).is_none());
        let names: Vec<(String, String)> =
            names.filter_map(|name| Some((name.clone(), class_of(name)?))).collect();
        let items: Vec<Node> = names
            .iter()
            .filter_map(|(name, class)| {
                let arguments = entries.shift_remove(name)?;
                let origin = arguments.origin.clone();
                let class = Node::scalar(Value::String(class.clone()), origin.clone());
                let entries = [("class_path".to_owned(), class), ("init_args".to_owned(), arguments)];
                Some(Node { origin, data: Data::Map(entries.into_iter().collect()) })
            })
            .collect();
        let Some(first) = items.first() else { return };
        let origin = first.origin.clone();
        let section = before.iter().try_fold(node, |node, part| node.child(part, &origin));
        let Some(Data::Map(section)) = section.map(|section| &mut section.data) else { return };
        match section.get_mut(*last) {
            Some(Node { data: Data::List(list), .. }) => list.extend(items),
            _ => drop(section.insert(format!("{last}+"), Node { origin, data: Data::List(items) })),
        }
    }

    /// Adds one option of the command line. The value of a section may be a YAML file: `--trainer=trainer.yaml`.
    pub fn assign(&mut self, assignment: &Assignment) {
        let path =
            assignment.value.as_deref().filter(|text| text.ends_with(".yaml") || text.ends_with(".yml"));
        let is_section = !assignment.key.contains('.') && !assignment.appends;
        let place = View::new(&self.schema).child(&assignment.key).filter(|_| is_section);
        if let (Some(path), Some(place)) = (path, place)
            && place.allows("object")
        {
            return self.section(&assignment.key, &expand_home(path));
        }
        apply(&mut self.tree, assignment, &Origin::CommandLine, &View::new(&self.schema), &mut self.remarks);
    }

    /// Adds a YAML file with one section.
    fn section(&mut self, key: &str, path: &Path) {
        let Some(text) = self.source(path, key, &Origin::CommandLine) else { return };
        match yaml::read(&text, &path.display().to_string()) {
            Ok(section) => {
                let origin = section.origin.clone();
                let node = Node { origin, data: Data::Map(IndexMap::from([(key.to_owned(), section)])) };
                merge(&mut self.tree, node, &View::new(&self.schema), "", &mut self.remarks);
            }
            Err(problem) => self.unreadable.push(*problem),
        }
    }

    /// The merged tree with all defaults, checked against the schema.
    ///
    /// # Errors
    /// All problems together: unreadable sources, or else unknown keys, wrong types and missing values.
    pub fn resolve(&self) -> Result<Settings, ConfigError> {
        let Survey { settings, problems, .. } = self.survey()?;
        if problems.is_empty() { Ok(settings) } else { Err(ConfigError { problems }) }
    }

    /// As [`Layers::resolve`], but with the problems beside the tree, for callers with further checks: wrong values have
    /// its default in the tree.
    ///
    /// # Errors
    /// Sources that cannot be read, all together.
    pub(crate) fn survey(&self) -> Result<Survey, ConfigError> {
        if !self.unreadable.is_empty() {
            return Err(ConfigError { problems: self.unreadable.clone() });
        }
        let view = View::new(&self.schema);
        let (mut tree, unresolved) = self.filled();
        let mut problems = self.remarks.problems.clone();
        let mut unusable: Vec<String> = problems.iter().map(|problem| problem.key.clone()).collect();
        let mut dropped = Vec::new();
        let origins = tree.origins();
        let Checked { problems: found, more_unknown, more } = check(&tree, &view);
        let is_unresolved: HashSet<String> = unresolved.iter().map(|found| found.key.clone()).collect();
        let found = found.into_iter().filter(|found| !is_unresolved.contains(&found.key));
        for Found { key, problem } in unresolved.into_iter().chain(found) {
            dropped.push(key);
            problems.push(problem);
        }
        if let Some(first) = more_unknown.first() {
            let what = format!("{} more unknown keys, of which this is the first", more_unknown.len());
            problems.push(ConfigProblem::new(first.clone(), what, "remove them"));
        }
        if let Some(first) = more.first() {
            let what = format!("{} more problems, of which this is the first", more.len());
            problems.push(ConfigProblem::new(first.clone(), what, "look at those before them first"));
        }
        dropped.extend(more_unknown);
        dropped.extend(more);
        let mut moved = Moved::default();
        if !dropped.is_empty() {
            let left = Left::of(&tree, &view, &mut dropped);
            (tree, moved) = (left.tree, left.moved);
            unusable.extend(left.wrong);
        }
        let settings = Settings { origins, tree: tree.to_value(), notes: self.remarks.notes.clone() };
        Ok(Survey { settings, problems, unusable, dropped, moved })
    }

    /// The configuration as a `T`.
    ///
    /// # Errors
    /// Those of [`Layers::resolve`], and what `T`'s own deserialization refuses.
    pub fn load<T: DeserializeOwned + JsonSchema>(&self) -> Result<Loaded<T>, ConfigError> {
        let settings = self.resolve()?;
        let value = deserialize_at("", &settings.tree, &settings.origins)?;
        Ok(Loaded { value, origins: settings.origins, tree: settings.tree })
    }

    /// The merged tree as it stands, with defaults, checked or not: for help that depends on the classes chosen.
    pub(crate) fn preview(&self) -> Value {
        self.filled().0.to_value()
    }

    /// The configuration as YAML.
    ///
    /// # Errors
    /// Those of [`Layers::resolve`].
    pub fn print_config(&self, print: PrintConfig) -> Result<String, ConfigError> {
        self.resolve()?;
        let view = View::new(&self.schema);
        let (tree, _) = self.filled();
        let tree = if print.skip_default {
            prune(&tree, &view, view.default).unwrap_or_else(|| Node::map(Origin::Default))
        } else {
            tree
        };
        let value = tree.to_value();
        Ok(if print.comments { to_commented_yaml(&value, &view) } else { to_yaml(&value) })
    }

    /// The tree with defaults and with what its values refer to, and what has no value.
    fn filled(&self) -> (Node, Vec<Found>) {
        let view = View::new(&self.schema);
        let mut tree = self.tree.clone();
        fill(&mut tree, &view, view.default);
        let unresolved = interpolate(&mut tree, &view);
        fill(&mut tree, &view, view.default); // a class may have come
        (tree, unresolved)
    }
}

/// The JSON schema of a type, with its doc comments as descriptions.
pub fn schema_of<T: JsonSchema>() -> Value {
    schemars::SchemaGenerator::default().into_root_schema_for::<T>().to_value()
}

/// Deserializes the part of a configuration at `key` (empty for the whole).
///
/// # Errors
/// A [`ConfigError`] that names the key that `T` refused, its value and its origin.
pub fn deserialize_at<T: DeserializeOwned>(
    key: &str,
    tree: &Value,
    origins: &Origins,
) -> Result<T, ConfigError> {
    let at = if key.is_empty() { String::new() } else { format!("/{}", key.replace('.', "/")) };
    let part = tree.pointer(&at).unwrap_or(&Value::Null);
    serde_path_to_error::deserialize(part).map_err(|error| {
        let inner = error.path().to_string().replace('[', ".").replace(']', "");
        let full = match (key, inner.trim_start_matches('.')) {
            (key, "") => key.to_owned(),
            ("", inner) => inner.to_owned(),
            (key, inner) => format!("{key}.{inner}"),
        };
        let origin = origins.get(&full).cloned().unwrap_or(Origin::Default);
        ConfigError {
            problems: vec![ConfigProblem {
                key: origin.typed_key(&full),
                origin: origin.label(),
                problem: Problem::new(error.inner().to_string(), "give a value that it accepts"),
            }],
        }
    })
}

/// A file beside `path` whose name is like it.
fn similar_file(path: &Path) -> Option<String> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names: Vec<String> = std::fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let name = path.file_name()?.to_str()?;
    let other = nearest(name, names.iter().map(String::as_str)).filter(|other| *other != name)?;
    Some(path.with_file_name(other).display().to_string())
}
