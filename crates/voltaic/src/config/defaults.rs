//! Fills in the schema's defaults, and takes them out again for a short print.

use indexmap::IndexMap;
use serde_json::Value;

use super::node::{Data, Node, Origin};
use super::schema::View;

/// The one mapping of `view` that `node` is, with its default; `None` if several could be meant.
pub(super) fn narrow<'s, 'd>(
    node: &Node,
    view: &View<'s>,
    default: Option<&'d Value>,
) -> Option<(View<'s>, Option<&'d Value>)> {
    if view.classes().is_empty() {
        let narrowed = view.narrowed(|key| node.get(key).map(Node::to_value));
        return (narrowed.options.len() == 1).then_some((narrowed, default));
    }
    let default_class = default.and_then(|default| default.get("class_path")).and_then(Value::as_str);
    let name = match node.get("class_path") {
        Some(class) => class.as_str()?,
        None => default_class?,
    };
    let class = view.class(name)?;
    // The default of another class has nothing to say about this one.
    Some((view.of_class(&class), default.filter(|_| default_class == Some(class.name))))
}

/// Adds every key that was left out and has a default; keys get the order of their declaration.
///
/// `default` is the default of the whole node, which outranks the defaults of its keys.
pub(super) fn fill(node: &mut Node, view: &View<'_>, default: Option<&Value>) {
    if let Data::List(items) = &mut node.data {
        for (i, item) in items.iter_mut().enumerate() {
            fill(item, &view.item(i), None);
        }
        return;
    }
    let Some((view, default)) = narrow(node, view, default) else { return };
    let Data::Map(entries) = &mut node.data else { return };
    let mut given = std::mem::take(entries);
    for key in view.keys() {
        let Some(place) = view.child(key) else { continue };
        let default = default.and_then(|default| default.get(key)).or(place.default);
        let child = given.shift_remove(key);
        let child = child.or_else(|| default.map(|value| Node::from_value(value, &Origin::Default)));
        // The user may leave out the arguments of a class, but serde requires the key.
        let child = child.or_else(|| (key == "init_args").then(|| Node::map(Origin::Default)));
        if let Some(mut child) = child {
            fill(&mut child, &place, default);
            entries.insert(key.to_owned(), child);
        }
    }
    let takes_arguments = view.keys().contains(&"init_args");
    let is_empty_arguments =
        |name: &str, node: &Node| name == "init_args" && node.entries().is_some_and(IndexMap::is_empty);
    given.retain(|name, node| takes_arguments || !is_empty_arguments(name, node));
    // An argument that is refused and null was not given: that is how Lightning writes it.
    given.retain(|name, node| !(node.is_null() && view.refusal(name).is_some()));
    entries.extend(given);
}

/// What differs from the defaults; `None` if nothing does.
///
/// A class stays named, since its arguments mean nothing without it.
pub(super) fn prune(node: &Node, view: &View<'_>, default: Option<&Value>) -> Option<Node> {
    if default == Some(&node.to_value()) {
        return None;
    }
    let Data::Map(entries) = &node.data else { return Some(node.clone()) };
    let Some((view, default)) = narrow(node, view, default) else { return Some(node.clone()) };
    let mut kept = IndexMap::new();
    for (key, child) in entries {
        let place = view.child(key).unwrap_or_else(|| View::new(&Value::Bool(true)));
        let default = default.and_then(|default| default.get(key)).or(place.default);
        let pruned = if key == "class_path" { Some(child.clone()) } else { prune(child, &place, default) };
        let is_empty = |node: &Node| node.entries().is_some_and(IndexMap::is_empty);
        if let Some(pruned) = pruned
            && (!is_empty(&pruned) || (is_empty(child) && key != "init_args"))
        {
            kept.insert(key.clone(), pruned);
        }
    }
    Some(Node { origin: node.origin.clone(), data: Data::Map(kept) })
}
