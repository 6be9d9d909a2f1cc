//! Lists every key of a schema with its description and default: for `--help`, snapshots and meta-tests.

use serde_json::Value;

use super::check::check;
use super::defaults::fill;
use super::merge::join;
use super::node::{Node, Origin};
use super::schema::View;
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
    walk(&View::new(schema), "", None, &mut Vec::new(), &mut found);
    found
}

/// What a configuration owes its users: each key has a description, and each default is a valid value.
///
/// Returns one sentence per fault; a test asserts that there are none.
pub fn faults(schema: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for key in keys(schema) {
        let class = key.class.as_ref().map(|class| format!(" of {class}")).unwrap_or_default();
        if key.description.trim().is_empty() {
            faults.push(format!("{}{class} has no description", key.key));
        }
    }
    let view = View::new(schema);
    let mut tree = Node::map(Origin::Default);
    fill(&mut tree, &view, view.default);
    let problems = check(&tree, &view);
    faults.extend(
        problems
            .into_iter()
            .filter(|problem| !problem.what.contains("is missing"))
            .map(|problem| format!("default of {problem}")),
    );
    faults
}

fn walk<'s>(
    view: &View<'s>,
    prefix: &str,
    class: Option<&str>,
    seen: &mut Vec<*const Value>,
    found: &mut Vec<Key>,
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
    if classes.is_empty() {
        for name in view.keys() {
            let Some(place) = view.child(name) else { continue };
            let key = join(prefix, name);
            let default = view.default.and_then(|default| default.get(name)).or(place.default);
            let nested = if place.allows("array") && !place.is_any() { Some(place.item(0)) } else { None };
            let has_keys = !place.is_any() && place.objects().next().is_some() && !place.keys().is_empty();
            let is_section = has_keys && place.classes().is_empty();
            if !is_section || default.is_some_and(Value::is_null) {
                found.push(Key {
                    key: key.clone(),
                    class: class.map(str::to_owned),
                    description: place.description.unwrap_or_default().to_owned(),
                    expected: expected(&place),
                    default: default.cloned(),
                });
            }
            if has_keys {
                walk(&place, &key, class, seen, found);
            }
            if let Some(element) = nested.filter(|element| !element.is_any()) {
                walk(&element, &key, class, seen, found);
            }
        }
    }
    seen.truncate(depth);
}
