//! Settings in the words of another program, such as DeepSpeed's file, checked against the schema of a struct.
//!
//! A key is one line in one of four places: a field, or an entry of [`REFUSED`](super::schema::REFUSED) (which may have
//! `"unless_off": true`), of `x-no-effect` or of [`OLD_NAMES`].

use std::borrow::Cow;
use std::collections::HashSet;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::check::{Checked, check};
use super::json;
use super::layers::{deserialize_at, schema_of};
use super::node::{Data, Node, Origin, join};
use super::schema::{OLD_NAMES, View};
use super::suggest::nearest;
use crate::error::{ConfigError, ConfigProblem, Problem};

/// The name of a program that ignores unknown keys: they become notes, not errors.
const IGNORES_UNKNOWN: &str = "x-ignores-unknown";
/// Word that leaves a key to its default, as null does.
const AUTO: &str = "auto";
/// More unknown keys of a section are counted, not named.
const MAX_UNKNOWN: usize = 8;

/// Settings, and what is found about them.
#[derive(Debug)]
pub(crate) struct Document {
    /// What stands before each key in messages.
    prefix: String,
    /// What was given, without `auto` and null, under the newer names.
    tree: Node,
    /// Keys that were given under an older name: the new one and the one given.
    renamed: Vec<(String, String)>,
    /// Keys whose values are wrong, which are not in the tree.
    wrong: HashSet<String>,
    /// What is wrong.
    problems: Vec<ConfigProblem>,
    /// Keys that have no effect, a sentence each.
    notes: Vec<String>,
    /// Those of them that the schema lacks, as mistakes beside others.
    unknown: Vec<ConfigProblem>,
}

impl Document {
    /// The top-level keys with their values, in order.
    pub fn entries(&self) -> impl Iterator<Item = (String, Value)> {
        let entries = self.tree.entries().into_iter().flatten();
        entries.map(|(key, node)| (key.clone(), node.to_value())).collect::<Vec<_>>().into_iter()
    }

    /// Adds a top-level key.
    pub fn insert(&mut self, key: &str, value: &Value) {
        if let Data::Map(entries) = &mut self.tree.data {
            entries.insert(key.to_owned(), Node::from_value(value, &Origin::Default));
        }
    }

    /// Takes a top-level key out.
    pub fn remove(&mut self, key: &str) {
        if let Data::Map(entries) = &mut self.tree.data {
            entries.shift_remove(key);
        }
    }

    /// Reads JSON text; `path` is the file's name, and `title` stands for the key in errors about the whole file.
    ///
    /// # Errors
    /// Text that is not JSON, and values that are not a section.
    pub fn of_json(title: &str, path: &str, text: &str) -> Result<Self, ConfigError> {
        Self::new(title, "", json::read(title, path, text)?)
    }

    /// Takes a value that stands at `key`.
    ///
    /// # Errors
    /// A value that is not a section.
    pub fn of_value(title: &str, key: &str, value: &Value) -> Result<Self, ConfigError> {
        Self::new(if key.is_empty() { title } else { key }, key, Node::from_value(value, &Origin::Default))
    }

    fn new(title: &str, prefix: &str, tree: Node) -> Result<Self, ConfigError> {
        if tree.entries().is_none() {
            let what = match &tree.data {
                Data::List(items) => format!("a list of {} is not a section", items.len()),
                _ => format!("{} is not a section", super::words::quote(&tree.to_value())),
            };
            return Err(ConfigError::new(title, what, "write the settings in braces"));
        }
        let prefix = prefix.to_owned();
        Ok(Self {
            prefix,
            tree,
            renamed: Vec::new(),
            wrong: HashSet::new(),
            problems: Vec::new(),
            notes: Vec::new(),
            unknown: Vec::new(),
        })
    }

    /// Replaces a top-level value by what `rewrite` makes of it, if anything.
    pub fn rewrite(&mut self, key: &str, rewrite: impl FnOnce(&Value) -> Option<Value>) {
        if let Data::Map(entries) = &mut self.tree.data
            && let Some(node) = entries.get_mut(key)
            && let Some(value) = rewrite(&node.to_value())
        {
            *node = Node::from_value(&value, &node.origin);
        }
    }

    /// The settings without what is wrong, so that the rest can be looked at more closely.
    pub fn read<T: DeserializeOwned + JsonSchema + Default>(&mut self) -> T {
        let schema = schema_of::<T>();
        let view = View::new(&schema);
        let mut tree = std::mem::replace(&mut self.tree, Node::map(Origin::Default));
        self.tidy(&mut tree, &view, "");
        let Checked { problems, more_unknown, more } = check(&tree, &view);
        for found in problems {
            self.wrong.insert(found.key);
            self.add(found.problem);
        }
        for (keys, what) in [(more_unknown, "unknown keys"), (more, "problems")] {
            if let Some(first) = keys.first() {
                let what = format!("{} more {what}, of which this is the first", keys.len());
                self.add(ConfigProblem::new(first.clone(), what, "look at those before them first"));
            }
            self.wrong.extend(keys);
        }
        tree.remove(&self.wrong.iter().map(String::as_str).collect::<HashSet<_>>());
        self.tree = tree;
        deserialize_at("", &self.tree.to_value(), &self.tree.origins()).unwrap_or_else(|error| {
            error.problems.into_iter().for_each(|problem| self.add(problem));
            T::default()
        })
    }

    /// The notes, and unknown keys as problems, which the caller may report together with problems of its own.
    ///
    /// # Errors
    /// All problems, unknown keys too.
    pub fn finish(self) -> Result<(Vec<String>, Vec<ConfigProblem>), ConfigError> {
        let Self { mut problems, notes, unknown, .. } = self;
        if problems.is_empty() {
            return Ok((notes, unknown));
        }
        problems.extend(unknown);
        Err(ConfigError { problems })
    }

    /// Whether a key is given, with a value that can be read.
    pub fn has(&self, key: &str) -> bool {
        self.node(key).is_some()
    }

    fn node(&self, key: &str) -> Option<&Node> {
        key.split('.').try_fold(&self.tree, |node, part| node.get(part))
    }

    /// Adds a problem of a key, unless its value is wrong by itself. It has the origin of the nearest section that is given.
    pub fn refuse(&mut self, key: &str, what: String, remedy: impl Into<Cow<'static, str>>) {
        if self.wrong.contains(key) {
            return;
        }
        let mut given = key.split('[').next().unwrap_or(key);
        while self.node(given).is_none()
            && let Some((section, _)) = given.rsplit_once('.')
        {
            given = section;
        }
        let origin = self.node(given).map(|node| node.origin.label()).unwrap_or_default();
        let problem = Problem::new(what, remedy);
        self.add(ConfigProblem { key: key.to_owned(), origin, problem });
    }

    /// Says that a key has no effect.
    pub fn note(&mut self, key: &str, why: &str) {
        let key = self.written(key);
        self.notes.push(format!("{key} has no effect: {why}"));
    }

    fn add(&mut self, mut problem: ConfigProblem) {
        problem.key = self.written(&problem.key);
        self.problems.push(problem);
    }

    /// A key as it was written.
    fn written(&self, key: &str) -> String {
        let old = self.renamed.iter().find_map(|(new, old)| {
            let rest = key.strip_prefix(new.as_str())?;
            (rest.is_empty() || rest.starts_with(['.', '['])).then(|| format!("{old}{rest}"))
        });
        join(&self.prefix, &old.unwrap_or_else(|| key.to_owned()))
    }

    /// Takes out what says nothing and what has no effect, and gives keys and words the names of the schema.
    fn tidy(&mut self, node: &mut Node, view: &View<'_>, key: &str) {
        match &mut node.data {
            Data::Scalar { value, .. } => {
                if let Some(number) = value.as_f64().filter(|n| value.is_f64() && is_whole(*n)) {
                    *value = Value::from(number as i64);
                }
                let is_same = |choice: &&&Value| {
                    choice.as_str().zip(value.as_str()).is_some_and(|(a, b)| a.eq_ignore_ascii_case(b))
                };
                if let Some(choice) = view.choices().iter().find(is_same) {
                    *value = (*choice).clone();
                }
            }
            Data::List(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.tidy(item, &view.item(index), &join(key, &index.to_string()));
                }
            }
            Data::Map(entries) => {
                let given = self.renamed(std::mem::take(entries), view, key);
                let mut num_unknown = 0;
                for (name, mut child) in given {
                    if self.stays(&name, &child, view, key, &mut num_unknown) {
                        let any = View::new(&Value::Bool(true));
                        self.tidy(&mut child, &view.child(&name).unwrap_or(any), &join(key, &name));
                        entries.insert(name, child);
                    }
                }
                if let Some(more) = num_unknown.checked_sub(MAX_UNKNOWN + 1) {
                    let program = keyword(view, IGNORES_UNKNOWN).and_then(Value::as_str).unwrap_or_default();
                    let more = more + 1;
                    self.notes.push(format!("{more} more keys have no effect: {program} has no such keys"));
                }
            }
        }
    }

    /// The entries of a section under their newer names.
    fn renamed(
        &mut self,
        given: IndexMap<String, Node>,
        view: &View<'_>,
        key: &str,
    ) -> IndexMap<String, Node> {
        let new_name = |name: &str| keyword(view, OLD_NAMES)?.get(name)?.as_str();
        let mut entries: IndexMap<String, Node> = IndexMap::new();
        let (old, new): (Vec<_>, Vec<_>) = given.into_iter().partition(|(name, _)| new_name(name).is_some());
        entries.extend(new);
        for (name, node) in old {
            let Some(new) = new_name(&name).filter(|_| !is_open(&node)) else { continue };
            let written = join(key, &name);
            if entries.get(new).is_some_and(|other| !is_open(other)) {
                let (origin, what) =
                    (node.origin.label(), format!("is given beside {new}, which is the same"));
                let problem = Problem::new(what, "remove one of the two");
                self.add(ConfigProblem { key: written, origin, problem });
                continue;
            }
            self.renamed.push((join(key, new), written));
            entries.insert(new.to_owned(), node);
        }
        entries
    }

    /// Whether a key of a section stays in the tree; notes it if it has no effect.
    fn stays(
        &mut self,
        name: &str,
        node: &Node,
        view: &View<'_>,
        key: &str,
        num_unknown: &mut usize,
    ) -> bool {
        let full = join(key, name);
        let (why, refusal) = (view.no_effect(name), view.refused(name));
        let is_field = view.child(name).is_some();
        if (is_field || why.is_some() || refusal.is_some()) && is_open(node) {
            return false;
        }
        if let Some(why) = why {
            self.note(&full, why);
            return is_field;
        }
        if let Some(refusal) = refusal {
            return !node.asks_for_nothing(refusal);
        }
        let Some(program) = keyword(view, IGNORES_UNKNOWN).and_then(Value::as_str).filter(|_| !is_field)
        else {
            return true;
        };
        *num_unknown += 1;
        if *num_unknown <= MAX_UNKNOWN {
            let near = nearest(name, view.names());
            let hint = near.map(|near| format!("; did you mean {near}")).unwrap_or_default();
            self.note(&full, &format!("{program} has no such key{hint}"));
            let remedy = near.map_or_else(|| "remove it".to_owned(), |near| format!("did you mean {near}"));
            let problem = Problem::new(format!("{program} has no such key"), remedy);
            self.unknown.push(ConfigProblem {
                key: self.written(&full),
                origin: node.origin.label(),
                problem,
            });
        }
        false
    }
}

fn keyword<'s>(view: &View<'s>, name: &str) -> Option<&'s Value> {
    view.objects().find_map(|option| option.get(name))
}

/// Whether a value leaves its key to the default.
fn is_open(node: &Node) -> bool {
    node.is_null() || node.as_str() == Some(AUTO)
}

/// Whether a number is a whole one, however it was written, such as `5e8`.
fn is_whole(number: f64) -> bool {
    number.fract() == 0.0 && number.abs() < 2f64.powi(63)
}
