//! A configuration tree in which every node has its origin: file and line, variable, or argument.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use indexmap::IndexMap;
use serde_json::{Map, Value};

use crate::error::ConfigError;

/// Where a value was set.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// Not set by the user.
    Default,
    /// A line of a file, counted from 1.
    File {
        /// The file's path as the user gave it.
        path: String,
        /// The line of the value.
        line: usize,
    },
    /// The environment variable of this name.
    Env(String),
    /// An option of the command line.
    CommandLine,
}

impl Origin {
    /// Whether both were set by the same file, by the environment, or by the command line.
    pub(super) fn same_layer(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File { path: a, .. }, Self::File { path: b, .. }) => a == b,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// A key as its author would type it: outside files, arguments of a class follow the class directly.
    pub(super) fn typed_key(&self, key: &str) -> String {
        match self {
            Self::CommandLine | Self::Env(_) => {
                key.split('.').filter(|part| *part != "init_args").collect::<Vec<_>>().join(".")
            }
            _ => key.to_owned(),
        }
    }

    /// The origin as an error names it: empty for a default.
    pub(super) fn label(&self) -> String {
        if *self == Self::Default { String::new() } else { self.to_string() }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Env(name) => f.write_str(name),
            Self::CommandLine => f.write_str("command line"),
        }
    }
}

/// Where each leaf of a configuration was set, by dotted key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins(BTreeMap<String, Origin>);

impl Origins {
    /// Where `key` was set; a section such as `trainer` has no origin of its own.
    pub fn get(&self, key: &str) -> Option<&Origin> {
        self.0.get(key)
    }

    /// All leaves with their origins, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Origin)> {
        self.0.iter().map(|(key, origin)| (key.as_str(), origin))
    }

    /// Adds the origin to each problem whose key was set by the user and that names none yet.
    pub fn annotate(&self, error: &mut ConfigError) {
        for problem in &mut error.problems {
            if !problem.origin.is_empty() {
                continue;
            }
            if let Some((key, origin)) = self.find(&problem.key) {
                problem.origin = origin.label();
                problem.key = origin.typed_key(key);
            }
        }
    }

    /// The key in the tree and its origin. A class has its arguments without the `init_args` above them.
    fn find(&self, key: &str) -> Option<(&str, &Origin)> {
        let with_arguments =
            key.match_indices('.').map(|(at, _)| format!("{}.init_args{}", &key[..at], &key[at..]));
        let (key, origin) = std::iter::once(key.to_owned())
            .chain(with_arguments)
            .find_map(|key| self.0.get_key_value(&key))?;
        Some((key, origin))
    }
}

/// One node of the tree.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub origin: Origin,
    pub data: Data,
}

/// What a node holds. Scalars keep the text of a number, so that `1.10` can still become text.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Data {
    Scalar { value: Value, text: Option<String> },
    List(Vec<Node>),
    Map(IndexMap<String, Node>),
}

impl Node {
    pub fn scalar(value: Value, origin: Origin) -> Self {
        Self { origin, data: Data::Scalar { value, text: None } }
    }

    pub fn map(origin: Origin) -> Self {
        Self { origin, data: Data::Map(IndexMap::new()) }
    }

    pub fn from_value(value: &Value, origin: &Origin) -> Self {
        let data = match value {
            Value::Array(items) => {
                Data::List(items.iter().map(|item| Self::from_value(item, origin)).collect())
            }
            Value::Object(entries) => {
                Data::Map(entries.iter().map(|(k, v)| (k.clone(), Self::from_value(v, origin))).collect())
            }
            scalar => Data::Scalar { value: scalar.clone(), text: None },
        };
        Self { origin: origin.clone(), data }
    }

    pub fn to_value(&self) -> Value {
        match &self.data {
            Data::Scalar { value, .. } => value.clone(),
            Data::List(items) => Value::Array(items.iter().map(Self::to_value).collect()),
            Data::Map(entries) => {
                Value::Object(entries.iter().map(|(k, v)| (k.clone(), v.to_value())).collect::<Map<_, _>>())
            }
        }
    }

    /// Whether the value of a key that is refused asks for nothing: it is what stands at `unless`, is off where `unless_off` stands,
    /// or is what stands there in place of true.
    pub fn asks_for_nothing(&self, refusal: &Value) -> bool {
        let is_default = refusal.get("unless").is_some_and(|default| self.to_value() == *default);
        let is_off = |off: &Value| self.is_off() || (*off != true && self.to_value() == *off);
        is_default || refusal.get("unless_off").is_some_and(is_off)
    }

    /// Whether the value switches its key off: false, 0, or a section that is not enabled.
    fn is_off(&self) -> bool {
        let is_off = |value: &Value| *value == Value::Bool(false) || value.as_f64() == Some(0.0);
        match &self.data {
            Data::Scalar { value, .. } => is_off(value),
            Data::List(_) => false,
            Data::Map(entries) => entries.get("enabled").is_some_and(|flag| is_off(&flag.to_value())),
        }
    }

    pub fn is_null(&self) -> bool {
        matches!(&self.data, Data::Scalar { value: Value::Null, .. })
    }

    pub fn as_str(&self) -> Option<&str> {
        match &self.data {
            Data::Scalar { value: Value::String(text), .. } => Some(text),
            _ => None,
        }
    }

    pub fn entries(&self) -> Option<&IndexMap<String, Node>> {
        match &self.data {
            Data::Map(entries) => Some(entries),
            _ => None,
        }
    }

    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entries()?.get(key)
    }

    /// The class that it names, in its `class_path`.
    pub fn class_name(&self) -> Option<&str> {
        self.get("class_path")?.as_str()
    }

    /// Takes out what is at these dotted keys; an element of a list leaves null, so that the others keep their numbers. Goes
    /// through the tree once.
    pub fn remove(&mut self, gone: &HashSet<&str>) {
        self.remove_below("", gone);
    }

    fn remove_below(&mut self, key: &str, gone: &HashSet<&str>) {
        match &mut self.data {
            Data::Map(entries) => entries.retain(|name, child| {
                let key = join(key, name);
                let stays = !gone.contains(key.as_str());
                if stays {
                    child.remove_below(&key, gone);
                }
                stays
            }),
            Data::List(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    let key = join(key, &index.to_string());
                    match gone.contains(key.as_str()) {
                        true => *item = Self::scalar(Value::Null, item.origin.clone()),
                        false => item.remove_below(&key, gone),
                    }
                }
            }
            Data::Scalar { .. } => {}
        }
    }

    /// The child `key`, made as null if absent; a node that is not a mapping becomes an empty one.
    pub fn child(&mut self, key: &str, origin: &Origin) -> Option<&mut Node> {
        if !matches!(self.data, Data::Map(_)) {
            *self = Self::map(origin.clone());
        }
        let Data::Map(entries) = &mut self.data else { return None };
        // looked up first, since a key of its own is only needed for a new entry
        if !entries.contains_key(key) {
            entries.insert(key.to_owned(), Self::scalar(Value::Null, origin.clone()));
        }
        entries.get_mut(key)
    }

    pub fn origins(&self) -> Origins {
        let mut origins = Origins::default();
        self.collect_origins(String::new(), &mut origins);
        origins
    }

    fn collect_origins(&self, key: String, origins: &mut Origins) {
        match &self.data {
            Data::List(items) if !items.is_empty() => {
                for (i, item) in items.iter().enumerate() {
                    item.collect_origins(join(&key, &i.to_string()), origins);
                }
            }
            Data::Map(entries) if !entries.is_empty() => {
                for (name, child) in entries {
                    child.collect_origins(join(&key, name), origins);
                }
            }
            _ => {
                origins.0.insert(key, self.origin.clone());
            }
        }
    }
}

/// `key` with one more part.
pub(super) fn join(key: &str, part: &str) -> String {
    if key.is_empty() { part.to_owned() } else { format!("{key}.{part}") }
}
