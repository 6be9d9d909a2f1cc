//! A reader's view of a JSON schema made by schemars: references resolved, alternatives laid side by side.

use serde_json::{Map, Value};

use crate::error::Problem;

/// The keyword of a schema for keys that a mapping does not have: an object with what is wrong and the remedy for each.
pub(super) const REFUSED: &str = "x-refused";
/// Keys that have no effect, and why: `{key: reason}`. Those that are fields are checked all the same.
pub(super) const NO_EFFECT: &str = "x-no-effect";
/// That all values of the keys of [`NO_EFFECT`] are worth a note: `false` asks for something, too.
const NO_EFFECT_ALWAYS: &str = "x-no-effect-always";
/// Other names of a class, whose arguments it takes: a list.
const ALIASES: &str = "x-aliases";
/// Older names of keys: `{old: new}`.
pub(super) const OLD_NAMES: &str = "x-old-names";

/// What may stand at one place of a configuration.
///
/// `options` are the alternatives of `anyOf`, `oneOf` and of several types; each is an object, or `true` for anything.
#[derive(Debug, Clone)]
pub(super) struct View<'s> {
    root: &'s Value,
    pub options: Vec<&'s Value>,
    pub default: Option<&'s Value>,
    pub description: Option<&'s str>,
}

/// One member of a family of classes, written `{class_path: NAME, init_args: {..}}`.
#[derive(Debug, Clone)]
pub(super) struct Class<'s> {
    pub name: &'s str,
    /// `None` if the class takes no arguments.
    pub init_args: Option<View<'s>>,
    option: &'s Value,
}

impl Class<'_> {
    /// Whether a name is another one of this class.
    pub fn is_called(&self, name: &str) -> bool {
        let names = self.option.get(ALIASES).and_then(Value::as_array);
        names.is_some_and(|names| names.iter().any(|own| own == name))
    }
}

impl<'s> View<'s> {
    pub fn new(root: &'s Value) -> Self {
        Self::at(root, root)
    }

    fn at(root: &'s Value, schema: &'s Value) -> Self {
        let mut view = Self { root, options: Vec::new(), default: None, description: None };
        view.add(schema, true, 0);
        view
    }

    /// Only these alternatives.
    pub fn with_options(&self, options: Vec<&'s Value>) -> Self {
        Self { options, ..self.clone() }
    }

    /// Adds the alternatives of `schema`. Only the place itself, or what it refers to, has a default and a
    /// description: those of an alternative are the alternative's own.
    fn add(&mut self, schema: &'s Value, is_place: bool, depth: usize) {
        if is_place {
            self.default = self.default.or_else(|| schema.get("default"));
            self.description = self.description.or_else(|| schema.get("description")?.as_str());
        }
        // schemars makes no schema that refers to itself without an object in between.
        if depth > 16 {
            return;
        }
        if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
            if let Some(target) = self.root.pointer(target.trim_start_matches('#')) {
                self.add(target, is_place, depth + 1);
            }
            return;
        }
        let nested =
            ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema.get(key)?.as_array()).flatten();
        let mut is_leaf = true;
        for schema in nested {
            self.add(schema, false, depth + 1);
            is_leaf = false;
        }
        if is_leaf || schema.get("properties").is_some() {
            self.options.push(schema);
        }
    }

    /// Whether anything may stand here.
    pub fn is_any(&self) -> bool {
        self.options.iter().any(|option| {
            option.as_bool() == Some(true)
                || option.as_object().is_some_and(|keys| {
                    !["type", "enum", "const", "properties"].iter().any(|k| keys.contains_key(*k))
                })
        })
    }

    /// Whether a value of this JSON type may stand here.
    pub fn allows(&self, type_name: &str) -> bool {
        self.is_any() || self.options.iter().any(|option| option_types(option).contains(&type_name))
    }

    /// The alternatives that are mappings.
    pub fn objects(&self) -> impl Iterator<Item = &'s Value> {
        self.options.iter().copied().filter(|option| option_types(option).contains(&"object"))
    }

    /// The place below `key`; `None` if no alternative has such a key.
    pub fn child(&self, key: &str) -> Option<View<'s>> {
        let mut children: Vec<View<'s>> = self
            .objects()
            .filter_map(|option| properties(option).and_then(|known| known.get(key)))
            .map(|schema| Self::at(self.root, schema))
            .collect();
        if children.is_empty() {
            children = self
                .objects()
                .filter_map(|option| option.get("additionalProperties"))
                .filter(|schema| schema.as_bool() != Some(false))
                .map(|schema| Self::at(self.root, schema))
                .collect();
        }
        let mut children = children.into_iter();
        let mut first = children.next()?;
        for other in children {
            first.options.extend(other.options);
            first.default = first.default.filter(|default| other.default == Some(default));
        }
        Some(first)
    }

    /// The place of element `index` of a list.
    pub fn item(&self, index: usize) -> View<'s> {
        let options = self.options.iter().filter_map(|option| {
            option
                .get("prefixItems")
                .and_then(|items| items.get(index))
                .or_else(|| option.get("items"))
                .filter(|item| item.as_bool() != Some(false))
        });
        let mut item = self.with_options(Vec::new());
        (item.default, item.description) = (None, None);
        for schema in options {
            let place = Self::at(self.root, schema);
            item.description = item.description.or(place.description);
            item.options.extend(place.options);
        }
        if item.options.is_empty() {
            item.options.push(&Value::Bool(true));
        }
        item
    }

    /// All keys of all alternatives, in the order of their declaration.
    pub fn keys(&self) -> Vec<&'s str> {
        let mut keys: Vec<&str> = Vec::new();
        for known in self.objects().filter_map(properties) {
            keys.extend(
                known.keys().map(String::as_str).filter(|key| !keys.contains(key)).collect::<Vec<_>>(),
            );
        }
        keys
    }

    /// [`Self::keys`], and those that have another name or no effect: what a misspelt key may mean.
    pub fn names(&self) -> Vec<&'s str> {
        let mut names = self.keys();
        for table in [NO_EFFECT, OLD_NAMES] {
            let tables = self.objects().filter_map(|option| option.get(table)?.as_object());
            names.extend(tables.flat_map(Map::keys).map(String::as_str));
        }
        names
    }

    /// Whether keys other than [`Self::keys`] are allowed.
    ///
    /// A schema that says nothing is closed: serde would drop the key silently, which is how a misspelt one gets lost.
    pub fn is_open(&self) -> bool {
        self.is_any()
            || self
                .objects()
                .filter_map(|option| option.get("additionalProperties"))
                .any(|schema| schema.as_bool() != Some(false))
    }

    /// The classes that may stand here; empty if this is not a place for a class.
    pub fn classes(&self) -> Vec<Class<'s>> {
        self.objects()
            .filter_map(|option| {
                let known = properties(option)?;
                let name = known.get("class_path")?.get("const")?.as_str()?;
                Some(Class {
                    name,
                    init_args: known.get("init_args").map(|schema| Self::at(self.root, schema)),
                    option,
                })
            })
            .collect()
    }

    /// The entry of [`REFUSED`] for a key, if the schema has one.
    pub fn refused(&self, key: &str) -> Option<&'s Value> {
        self.objects().find_map(|option| option.get(REFUSED)?.get(key))
    }

    /// Why a key has no effect, if the schema says so.
    pub fn no_effect(&self, key: &str) -> Option<&'s str> {
        self.objects().find_map(|option| option.get(NO_EFFECT)?.get(key)?.as_str())
    }

    /// Whether a value asks for nothing of a key that has no effect.
    pub fn is_idle(&self, value: &Value) -> bool {
        let asks = self.objects().any(|option| option.get(NO_EFFECT_ALWAYS).is_some());
        value.is_null() || (*value == Value::Bool(false) && !asks)
    }

    /// Why there is no key of this name, though users of Lightning may look for it. [`REFUSED`] of the schema holds
    /// what is wrong and how to fix it.
    pub fn refusal(&self, key: &str) -> Option<Problem> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let refused = self.refused(key)?;
        Some(Problem::new(text(refused.get("what")?)?, text(refused.get("remedy")?)?))
    }

    /// Keys of a class object itself: `class_path`, `init_args`, and what stands beside them in a struct that flattens
    /// the class. All other keys are arguments. Empty if this is not a place for a class.
    pub fn class_keys(&self) -> Vec<&'s str> {
        self.with_options(self.classes().iter().map(|class| class.option).collect()).keys()
    }

    /// The class of this name. A dotted Python path counts by its last part, and case is forgiven (`sgd` for `SGD`).
    pub fn class(&self, name: &str) -> Option<Class<'s>> {
        let classes = self.classes();
        let last = name.rsplit('.').next().unwrap_or(name);
        let is_exact = |class: &&Class<'s>| class.name == name || class.name == last;
        let is_similar = |class: &&Class<'s>| class.name.eq_ignore_ascii_case(last);
        let found = classes.iter().find(is_exact).or_else(|| classes.iter().find(is_similar));
        found.or_else(|| classes.iter().find(|class| class.is_called(last))).cloned()
    }

    /// The class that stands here if the user names none.
    pub fn default_class(&self) -> Option<&'s str> {
        self.default?.get("class_path")?.as_str()
    }

    /// Only the mapping of that class.
    pub fn of_class(&self, class: &Class<'s>) -> View<'s> {
        self.with_options(vec![class.option])
    }

    /// The one mapping that fits the tags of `map`, or all mappings if the tags do not decide.
    pub fn narrowed(&self, tag_of: impl Fn(&str) -> Option<Value>) -> View<'s> {
        let fitting: Vec<&Value> = self
            .objects()
            .filter(|option| {
                properties(option).into_iter().flatten().all(|(key, schema)| {
                    schema.get("const").is_none_or(|tag| tag_of(key).is_some_and(|value| value == *tag))
                })
            })
            .collect();
        self.with_options(if fitting.is_empty() { self.objects().collect() } else { fitting })
    }

    /// Each value of an enumeration that may stand here.
    pub fn choices(&self) -> Vec<&'s Value> {
        let mut choices = Vec::new();
        for option in &self.options {
            choices.extend(option.get("const"));
            choices.extend(option.get("enum").and_then(Value::as_array).into_iter().flatten());
        }
        choices
    }

    /// Whether any text may stand here, not only one of the [`Self::choices`].
    pub fn allows_free_text(&self) -> bool {
        self.is_any()
            || self.options.iter().any(|option| {
                option_types(option).contains(&"string")
                    && option.get("const").is_none()
                    && option.get("enum").is_none()
            })
    }

    /// Whether text may stand here, and no list or mapping.
    pub fn is_text(&self) -> bool {
        self.allows_free_text() && !self.allows("array") && !self.allows("object")
    }
}

/// The schema with each struct that flattens an enum rewritten: the struct's own keys go into every alternative.
pub(super) fn spread(mut schema: Value) -> Value {
    spread_in(&mut schema);
    schema
}

fn spread_in(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(spread_in),
        Value::Object(entries) => {
            entries.values_mut().for_each(spread_in);
            let own = entries.get("properties").and_then(Value::as_object).cloned();
            let required = entries.get("required").and_then(Value::as_array).cloned();
            let is_flat = |options: &Vec<Value>| options.iter().all(|option| properties(option).is_some());
            let nested = ["oneOf", "anyOf"]
                .into_iter()
                .find(|key| entries.get(*key).and_then(Value::as_array).is_some_and(is_flat));
            let (Some(own), Some(nested)) = (own, nested) else { return };
            for option in entries.get_mut(nested).and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(keys) = option.get_mut("properties").and_then(Value::as_object_mut) {
                    keys.extend(own.clone());
                }
                let Some(option) = option.as_object_mut() else { continue };
                let inner = option.entry("required").or_insert_with(|| Value::Array(Vec::new()));
                if let (Some(inner), Some(required)) = (inner.as_array_mut(), &required) {
                    inner.extend(required.iter().cloned());
                }
            }
            for key in ["properties", "required", "type", "additionalProperties", "unevaluatedProperties"] {
                entries.remove(key);
            }
        }
        _ => {}
    }
}

fn properties(option: &Value) -> Option<&Map<String, Value>> {
    option.get("properties").and_then(Value::as_object)
}

/// The JSON types of one alternative; those of its constants if it names none.
pub(super) fn option_types(option: &Value) -> Vec<&str> {
    match option.get("type") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ if option.get("properties").is_some() => vec!["object"],
        _ => {
            let constants = option
                .get("const")
                .into_iter()
                .chain(option.get("enum").and_then(Value::as_array).into_iter().flatten());
            constants.map(type_name).collect()
        }
    }
}

/// The JSON type of a value.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
