//! Lays one layer of configuration over another, guided by the schema.
//!
//! Mappings merge key by key; lists and scalars replace; `key+` appends. A class family accepts the short forms
//! `optimizer: AdamW` and `optimizer.lr`, which become `{class_path: AdamW, init_args: {lr: ..}}` here, so that no
//! later stage sees them. Choosing another class starts from that class's defaults: arguments of the old class that
//! earlier layers set are dropped, with a note.

use indexmap::IndexMap;
use serde_json::Value;

use super::home::expand_text;
use super::node::{Data, Node, Origin, join};
use super::schema::View;
use crate::error::{ConfigProblem, Problem};

/// A list of classes that has more elements is a mistake, and each takes time.
const MAX_CLASSES: usize = 1000;

/// What merging has to say beside its result.
#[derive(Debug, Clone, Default)]
pub(super) struct Remarks {
    pub problems: Vec<ConfigProblem>,
    pub notes: Vec<String>,
}

/// Lays `incoming` over `target`, which stands at `key`.
pub(super) fn merge(target: &mut Node, incoming: Node, view: &View<'_>, key: &str, remarks: &mut Remarks) {
    note_alias(&incoming, view, key, remarks);
    let incoming = expand(incoming, view);
    match incoming.data {
        Data::Map(_) if view.classes().is_empty() && !view.allows("object") && view.allows("array") => {
            // One element where a list is expected.
            *target = Node { origin: incoming.origin.clone(), data: Data::List(Vec::new()) };
            merge_list(target, vec![incoming], view, key, remarks);
        }
        Data::Map(entries) => merge_map(target, entries, incoming.origin, view, key, remarks),
        Data::List(items) => {
            *target = Node { origin: incoming.origin, data: Data::List(Vec::new()) };
            merge_list(target, items, view, key, remarks);
        }
        // A section whose lines are all commented out says nothing.
        Data::Scalar { value: Value::Null, .. } if !view.allows("null") && view.allows("object") => {
            if target.is_null() {
                *target = Node::map(incoming.origin);
            }
        }
        Data::Scalar { value: Value::String(ref text), .. } => {
            *target = match expand_text(text) {
                Some(path) => Node::scalar(Value::String(path), incoming.origin),
                None => incoming,
            }
        }
        Data::Scalar { .. } => *target = incoming,
    }
}

fn merge_map(
    target: &mut Node,
    entries: IndexMap<String, Node>,
    origin: Origin,
    view: &View<'_>,
    key: &str,
    remarks: &mut Remarks,
) {
    if target.entries().is_none() {
        *target = Node::map(origin);
    }
    let named = entries.get("class_path");
    if let Some(new) = named
        && !view.classes().is_empty()
    {
        change_class(target, new, key, remarks);
    }
    let class = named.or(target.get("class_path")).and_then(Node::as_str).or_else(|| view.default_class());
    let narrowed = match class.and_then(|name| view.class(name)) {
        Some(class) => view.of_class(&class),
        None => view.clone(),
    };
    for (name, child) in entries {
        let (name, appends) = match name.strip_suffix('+') {
            Some(base) if narrowed.child(&name).is_none() => (base.to_owned(), true),
            _ => (name, false),
        };
        let place = match narrowed.child(&name) {
            Some(place) => place,
            None if asks_for_nothing(&name, &child, &narrowed, key, remarks) => continue,
            None => View::new(&Value::Bool(true)),
        };
        let Some(slot) = target.child(&name, &child.origin) else { continue };
        let key = join(key, &name);
        if appends {
            append(slot, child, &place, &key, remarks);
        } else {
            merge(slot, child, &place, &key, remarks);
        }
    }
}

/// Whether a key that is no field may be left out: it has no effect, which is noted, or its value asks for nothing.
fn asks_for_nothing(name: &str, node: &Node, view: &View<'_>, key: &str, remarks: &mut Remarks) -> bool {
    if let Some(why) = view.no_effect(name) {
        if !view.is_idle(&node.to_value()) {
            remarks.notes.push(format!("{} has no effect: {why}", node.origin.typed_key(&join(key, name))));
        }
        return true;
    }
    view.refused(name).is_some_and(|refusal| node.asks_for_nothing(refusal))
}

/// Notes a class that another one stands for.
fn note_alias(node: &Node, view: &View<'_>, key: &str, remarks: &mut Remarks) {
    let given = node.get("class_path").unwrap_or(node).as_str().and_then(|path| path.rsplit('.').next());
    let Some((name, class)) = given.and_then(|name| Some((name, view.class(name)?))) else { return };
    if class.is_called(name) {
        remarks.notes.push(format!("{}: {name} is {} here", node.origin.typed_key(key), class.name));
    }
}

/// Replaces nothing: puts `items` at the end of the list at `target`.
fn merge_list(target: &mut Node, mut items: Vec<Node>, view: &View<'_>, key: &str, remarks: &mut Remarks) {
    if items.len() > MAX_CLASSES && !view.item(0).classes().is_empty() {
        let what = format!("it has {} elements, more than {MAX_CLASSES}", items.len());
        let (key, origin) = (items[0].origin.typed_key(key), items[0].origin.label());
        remarks.problems.push(ConfigProblem {
            key,
            origin,
            problem: Problem::new(what, "give fewer classes"),
        });
        items.truncate(MAX_CLASSES);
    }
    if !matches!(target.data, Data::List(_)) {
        *target = Node { origin: target.origin.clone(), data: Data::List(Vec::new()) };
    }
    let Data::List(list) = &mut target.data else { return };
    for item in items {
        let index = list.len();
        let mut element = Node::scalar(Value::Null, item.origin.clone());
        merge(&mut element, item, &view.item(index), &join(key, &index.to_string()), remarks);
        list.push(element);
    }
}

/// Adds a value, or each value of a list, to the end of the list at `target`.
pub(super) fn append(target: &mut Node, incoming: Node, view: &View<'_>, key: &str, remarks: &mut Remarks) {
    let kept =
        std::mem::replace(target, Node { origin: incoming.origin.clone(), data: Data::List(Vec::new()) });
    match kept.data {
        Data::List(items) => target.data = Data::List(items),
        Data::Scalar { value: Value::Null, .. } => {}
        _ => merge_list(target, vec![kept], view, key, remarks),
    }
    let items = match incoming.data {
        Data::List(items) => items,
        _ => vec![incoming],
    };
    merge_list(target, items, view, key, remarks);
}

/// Turns the short forms of a class, and a number where only text may stand, into the long ones.
fn expand(incoming: Node, view: &View<'_>) -> Node {
    /// A boolean or integer in the words of YAML 1.1, which PyYAML reads, where text cannot stand.
    fn of_yaml_1_1(text: &str, view: &View<'_>) -> Option<Value> {
        if view.allows_free_text() {
            return None;
        }
        match text {
            "on" | "On" | "ON" | "yes" | "Yes" | "YES" if view.allows("boolean") => {
                return Some(Value::Bool(true));
            }
            "off" | "Off" | "OFF" | "no" | "No" | "NO" if view.allows("boolean") => {
                return Some(Value::Bool(false));
            }
            _ => {}
        }
        let is_grouped = text.contains('_') && !text.starts_with('_') && !text.ends_with('_');
        let is_number = view.allows("integer") || view.allows("number");
        text.replace('_', "").parse::<i64>().ok().filter(|_| is_grouped && is_number).map(Value::from)
    }

    let origin = incoming.origin.clone();
    match incoming.data {
        Data::Scalar { value: Value::String(ref name), .. } => {
            let is_choice = view.choices().iter().any(|choice| choice.as_str() == Some(name));
            let names_class = view.class(name).is_some() && is_dotted_name(name);
            if is_choice || (view.allows_free_text() && !names_class) {
                return incoming;
            }
            if !view.classes().is_empty() {
                let name = view.class(name).map_or_else(|| name.clone(), |class| class.name.to_owned());
                let class = Node::scalar(Value::String(name), origin.clone());
                return Node { origin, data: Data::Map(IndexMap::from([("class_path".to_owned(), class)])) };
            }
            if let Some(value) = of_yaml_1_1(name, view) {
                return Node::scalar(value, origin);
            }
            // `callbacks=EarlyStopping` for a list of one.
            if view.allows("array") && !view.item(0).classes().is_empty() {
                return Node { origin, data: Data::List(vec![incoming]) };
            }
            incoming
        }
        Data::Scalar { ref value, text: Some(ref text) }
            if value.is_number()
                && !view.allows(super::schema::type_name(value))
                && !view.allows("number") =>
        {
            let is_choice = view.choices().iter().any(|choice| choice.as_str() == Some(text));
            if view.allows_free_text() || is_choice {
                return Node::scalar(Value::String(text.clone()), origin);
            }
            // such as 1e3
            let whole = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 2f64.powi(53));
            match whole.filter(|_| view.allows("integer")) {
                Some(whole) => Node::scalar(Value::from(whole as i64), origin),
                None => incoming,
            }
        }
        Data::Map(entries) if !view.classes().is_empty() => {
            let own = view.class_keys();
            let (mut data, arguments): (IndexMap<_, _>, IndexMap<_, _>) = entries
                .into_iter()
                .partition(|(name, _)| own.contains(&name.as_str()) || name == "init_args");
            for (name, node) in &mut data {
                if name == "class_path"
                    && let Some(class) = node.as_str().and_then(|text| view.class(text))
                {
                    *node = Node::scalar(Value::String(class.name.to_owned()), node.origin.clone());
                }
            }
            lift_own_keys(&mut data, &own, view);
            if !arguments.is_empty() {
                let arguments = Node { origin: origin.clone(), data: Data::Map(arguments) };
                data.insert("init_args".to_owned(), arguments);
            }
            Node { origin, data: Data::Map(data) }
        }
        data => Node { origin, data },
    }
}

/// Takes what stands beside a class here, such as `monitor`, out of its arguments, where Lightning's classes have it.
fn lift_own_keys(data: &mut IndexMap<String, Node>, own: &[&str], view: &View<'_>) {
    let class = data.get("class_path").and_then(Node::as_str).and_then(|name| view.class(name));
    let arguments = class.and_then(|class| class.init_args);
    let has = |name: &str| arguments.as_ref().is_some_and(|arguments| arguments.child(name).is_some());
    let Some(Node { data: Data::Map(given), .. }) = data.get_mut("init_args") else { return };
    let names = given.keys().filter(|name| own.contains(&name.as_str()) && !has(name)).cloned();
    let names: Vec<String> = names.collect();
    let lifted: Vec<_> = names.iter().filter_map(|name| given.shift_remove_entry(name)).collect();
    data.extend(lifted);
}

/// Whether a text could be a class with the modules before it, and is not a path or a sentence.
fn is_dotted_name(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.'))
}

/// Drops the arguments of the class that `new` replaces, except those of the layer that names the new class.
fn change_class(target: &mut Node, new: &Node, key: &str, remarks: &mut Remarks) {
    let old = target.class_name();
    let (Some(old), Some(name)) = (old.map(str::to_owned), new.as_str()) else { return };
    if old == name {
        return;
    }
    let Data::Map(entries) = &mut target.data else { return };
    let Some(arguments) = entries.get_mut("init_args") else { return };
    let Data::Map(arguments) = &mut arguments.data else { return };
    let mut dropped = Vec::new();
    arguments.retain(|argument, node| {
        let keeps = node.origin.same_layer(&new.origin);
        if !keeps && node.origin != Origin::Default {
            dropped.push(format!("{argument} (from {})", node.origin));
        }
        keeps
    });
    if !dropped.is_empty() {
        let dropped = dropped.join(", ");
        remarks
            .notes
            .push(format!("{key} is now {name}, so these arguments of {old} are dropped: {dropped}"));
    }
}
