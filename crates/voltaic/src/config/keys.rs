//! Lists every key of a schema with its description and default: for `--help`, snapshots and meta-tests.

use serde_json::Value;

use super::check::{Found, check};
use super::defaults::fill;
use super::node::join;
use super::node::{Node, Origin};
use super::schema::{View, spread};
use super::words::expected;

/// One key of a configuration.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Key {
    /// Dotted key as typed on the command line, such as `optimizer.lr`.
    pub key: String,
    /// For an argument of a class, that class.
    pub class: Option<String>,
    /// The field's doc comment; empty if there is none.
    pub description: String,
    /// What may be given, in words.
    pub expected: String,
    /// The value if none is given; `None` if the key must be given.
    pub default: Option<Value>,
}

/// Every key of a schema, sections first, in the order of their declaration.
///
/// Lists of classes appear as their classes' arguments: `trainer.callbacks.monitor` of class `EarlyStopping`.
pub fn keys(schema: &Value) -> Vec<Key> {
    let mut found = Vec::new();
    let schema = spread(schema.clone());
    walk(&View::new(&schema), "", None, &mut Vec::new(), &mut |key, _| found.push(key));
    found
}

/// What a configuration owes its users: each key has a description, and each default is a valid value.
///
/// Returns one sentence per fault; a test asserts that there are none.
pub fn faults(schema: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    let schema = spread(schema.clone());
    walk(&View::new(&schema), "", None, &mut Vec::new(), &mut |key, place| {
        let name = match &key.class {
            Some(class) => format!("{} of {class}", key.key),
            None => key.key.clone(),
        };
        if key.description.trim().is_empty() {
            faults.push(format!("{name} has no description"));
        }
        if let Some(default) = &key.default {
            let mut node = Node::from_value(default, &Origin::Default);
            fill(&mut node, place, None);
            for Found { problem, .. } in check(&node, place).problems {
                faults.push(format!("default of {name}: {}", problem.problem));
            }
        }
    });
    faults
}

/// Hands each key and its place to `found`.
fn walk<'s>(
    view: &View<'s>,
    prefix: &str,
    class: Option<&str>,
    seen: &mut Vec<*const Value>,
    found: &mut impl FnMut(Key, &View<'s>),
) {
    // A class may hold classes of its own kind (a logger of loggers): once is enough.
    let identity: Vec<*const Value> = view.options.iter().map(|option| std::ptr::from_ref(*option)).collect();
    if identity.iter().any(|option| seen.contains(option)) {
        return;
    }
    let depth = seen.len();
    seen.extend(identity);
    let classes = view.classes();
    for member in &classes {
        if let Some(arguments) = &member.init_args {
            walk(arguments, prefix, Some(member.name), seen, found);
        }
    }
    let beside_class = |name: &str| !matches!(name, "class_path" | "init_args");
    for name in view.keys().into_iter().filter(|name| classes.is_empty() || beside_class(name)) {
        let Some(place) = view.child(name) else { continue };
        let key = join(prefix, name);
        let default = view.default.and_then(|default| default.get(name)).or(place.default);
        let element = if place.allows("array") && !place.is_any() { Some(place.item(0)) } else { None };
        let has_keys = !place.is_any() && !place.keys().is_empty();
        let is_section = has_keys && place.classes().is_empty();
        if !is_section || default.is_some_and(Value::is_null) {
            let key = Key {
                key: key.clone(),
                class: class.map(str::to_owned),
                description: place.description.unwrap_or_default().to_owned(),
                expected: expected(&place),
                default: default.cloned(),
            };
            found(key, &place);
        }
        if has_keys {
            walk(&place, &key, class, seen, found);
        }
        if let Some(element) = element.filter(|element| !element.is_any()) {
            walk(&element, &key, class, seen, found);
        }
    }
    seen.truncate(depth);
}
