//! Single values set by dotted key: options of the command line and environment variables.

use indexmap::IndexMap;
use serde_json::Value;

use super::merge::{Remarks, append, merge};
use super::node::{Data, Node, Origin, join};
use super::schema::{Class, View};
use super::yaml;
use crate::error::{ConfigProblem, Problem, shortened};

/// Keys of more parts are refused: each is a level of the tree.
const MAX_PARTS: usize = 64;

/// One option such as `--trainer.max_epochs=3` or `--trainer.callbacks+=EarlyStopping`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Dotted key without the dashes and without `+`.
    pub key: String,
    /// Whether the value is added to a list.
    pub appends: bool,
    /// The value's text; `None` if the option stands alone, which sets a true-or-false key to true.
    pub value: Option<String>,
}

impl Assignment {
    /// Reads `key=value`, `key+=value` or `key`, without leading dashes.
    pub fn parse(text: &str) -> Self {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (text, None),
        };
        let (key, appends) = match key.strip_suffix('+') {
            Some(base) => (base, true),
            None => (key, false),
        };
        Self { key: key.to_owned(), appends, value }
    }
}

/// Applies one assignment to the tree.
pub(super) fn apply(
    tree: &mut Node,
    assignment: &Assignment,
    origin: &Origin,
    view: &View<'_>,
    remarks: &mut Remarks,
) {
    let problem = |what: String, remedy: String| ConfigProblem {
        key: assignment.key.clone(),
        origin: origin.label(),
        problem: Problem::new(what, remedy),
    };
    let parts: Vec<&str> = assignment.key.split('.').collect();
    if parts.iter().any(|part| part.is_empty()) {
        let what = format!("`{}` is not a key", shortened(&assignment.key, 60));
        remarks
            .problems
            .push(problem(what, "write it as section.key, such as trainer.max_epochs".to_owned()));
        return;
    }
    if parts.len() > MAX_PARTS {
        let what = format!("it has {} parts, no key has more than {MAX_PARTS}", parts.len());
        let key = format!("{}...", parts[..3].join("."));
        remarks.problems.push(ConfigProblem { key, ..problem(what, "shorten it".to_owned()) });
        return;
    }
    let place = place(tree, &parts, view);
    let is_text = !assignment.appends && place.as_ref().is_some_and(View::is_text);
    let value = match &assignment.value {
        Some(text) => yaml::read_value(text, is_text, origin).map_err(|mut problem| {
            problem.key.clone_from(&assignment.key);
            *problem
        }),
        None if place.is_some_and(|place| place.allows("boolean")) => {
            Ok(Node::scalar(Value::Bool(true), origin.clone()))
        }
        None => Err(problem(
            "no value is given".to_owned(),
            format!("write --{}=VALUE", shortened(&assignment.key, 60)),
        )),
    };
    let result = value.and_then(|value| {
        let target = Target { node: tree, view: view.clone(), key: String::new() };
        set(target, &parts, assignment.appends, value, remarks)
            .map_err(|(what, remedy)| problem(what, remedy))
    });
    remarks.problems.extend(result.err());
}

/// A node, what may stand there, and its key.
struct Target<'n, 's> {
    node: &'n mut Node,
    view: View<'s>,
    key: String,
}

/// What is wrong, and what to do about it.
type Refusal = (String, String);

fn set(
    target: Target<'_, '_>,
    parts: &[&str],
    appends: bool,
    value: Node,
    remarks: &mut Remarks,
) -> Result<(), Refusal> {
    let Target { node, view, key } = target;
    let origin = value.origin.clone();
    let Some((part, rest)) = parts.split_first() else {
        if appends {
            append(node, value, &view, &key, remarks);
        } else {
            merge(node, value, &view, &key, remarks);
        }
        return Ok(());
    };
    if is_list(node, &view) {
        // A class begins the list.
        if *part == "class_path"
            && rest.is_empty()
            && !matches!(&node.data, Data::List(items) if !items.is_empty())
        {
            append(node, value, &view, &key, remarks);
            return Ok(());
        }
        let (index, rest) = element(node, &key, part, parts, rest)?;
        let view = view.item(index);
        let Data::List(items) = &mut node.data else { return Ok(()) };
        return set(
            Target { node: &mut items[index], view, key: join(&key, &index.to_string()) },
            rest,
            appends,
            value,
            remarks,
        );
    }
    if view.classes().is_empty() {
        if rest.is_empty() && !appends && view.child(part).is_none() {
            // A key that is no field goes through `merge`, which notes one that has no effect.
            let data = Data::Map(IndexMap::from([((*part).to_owned(), value)]));
            merge(node, Node { origin, data }, &view, &key, remarks);
            return Ok(());
        }
        let view = view.child(part).unwrap_or_else(|| View::new(&Value::Bool(true)));
        let key = join(&key, part);
        let Some(node) = node.child(part, &origin) else { return Ok(()) };
        return set(Target { node, view, key }, rest, appends, value, remarks);
    }
    // Naming a class goes through `merge`, which drops the old class's arguments.
    if *part == "class_path" && rest.is_empty() {
        let data = Data::Map(IndexMap::from([((*part).to_owned(), value)]));
        merge(node, Node { origin, data }, &view, &key, remarks);
        return Ok(());
    }
    let class = node.class_name().or_else(|| view.default_class());
    let class = class.and_then(|name| view.class(name));
    // Among its arguments, too, where Lightning's classes have it.
    let (part, rest) = match rest.split_first() {
        Some((own, after)) if *part == "init_args" && is_beside(own, &view, class.as_ref()) => (own, after),
        _ => (part, rest),
    };
    if *part != "init_args" && view.class_keys().contains(part) {
        // A key beside the class, such as the interval of a schedule.
        let place = class.map_or_else(|| view.clone(), |class| view.of_class(&class)).child(part);
        let view = place.unwrap_or_else(|| View::new(&Value::Bool(true)));
        let Some(node) = node.child(part, &origin) else { return Ok(()) };
        return set(Target { node, view, key: join(&key, part) }, rest, appends, value, remarks);
    }
    let rest = if *part == "init_args" { rest } else { parts };
    let Some(class) = class else {
        if node.get("class_path").is_some() {
            // The class is unknown, which is reported with the names that are known.
            return Ok(());
        }
        let names: Vec<&str> = view.classes().iter().map(|class| class.name).collect();
        let text = node.as_str().map(|text| format!(", which is `{text}`")).unwrap_or_default();
        let what = format!("no class is chosen for {key}{text}");
        return Err((what, format!("write --{key}=NAME before it; the classes are {}", names.join(", "))));
    };
    let view = class.init_args.unwrap_or_else(|| View::new(&Value::Bool(true)));
    let key = join(&key, "init_args");
    let Some(node) = node.child("init_args", &origin) else { return Ok(()) };
    set(Target { node, view, key }, rest, appends, value, remarks)
}

/// Whether a key stands beside the class, such as the `monitor` of a schedule, and is no argument of it.
fn is_beside(name: &str, view: &View<'_>, class: Option<&Class<'_>>) -> bool {
    let arguments = class.and_then(|class| class.init_args.as_ref());
    name != "class_path"
        && view.class_keys().contains(&name)
        && arguments.is_none_or(|arguments| arguments.child(name).is_none())
}

/// Whether the next part of a key is for an element of a list.
fn is_list(node: &Node, view: &View<'_>) -> bool {
    let is_list_only = view.allows("array") && !view.allows("object") && !view.is_any();
    is_list_only || matches!(node.data, Data::List(_))
}

/// The element that `part` means: by number, or the last one for the name of one of its keys.
fn element<'p>(
    node: &Node,
    key: &str,
    part: &str,
    parts: &'p [&'p str],
    rest: &'p [&'p str],
) -> Result<(usize, &'p [&'p str]), Refusal> {
    let count = if let Data::List(items) = &node.data { items.len() } else { 0 };
    if let Ok(index) = part.parse::<usize>() {
        if index < count {
            return Ok((index, rest));
        }
        let what = format!("{key} has no element {index}: it has {count}");
        return Err((what, format!("count from 0, or add one with --{key}+=VALUE")));
    }
    match count.checked_sub(1) {
        Some(last) => Ok((last, parts)),
        None => Err((format!("{key} has no element yet"), format!("write --{key}+=VALUE before it"))),
    }
}

/// What may stand at a dotted key, according to the schema and the classes chosen so far.
fn place<'s>(tree: &Node, parts: &[&str], view: &View<'s>) -> Option<View<'s>> {
    let Some((part, rest)) = parts.split_first() else { return Some(view.clone()) };
    if is_list(tree, view) {
        let (index, rest) = element(tree, "", part, parts, rest).ok()?;
        let Data::List(items) = &tree.data else { return None };
        return place(&items[index], rest, &view.item(index));
    }
    if view.classes().is_empty() || *part == "init_args" || view.class_keys().contains(part) {
        let class = tree.class_name().and_then(|name| view.class(name));
        let view = class.map_or_else(|| view.clone(), |class| view.of_class(&class));
        let absent = Node::scalar(Value::Null, Origin::Default);
        return place(tree.get(part).unwrap_or(&absent), rest, &view.child(part)?);
    }
    let name = tree.class_name().or_else(|| view.default_class())?;
    let absent = Node::scalar(Value::Null, Origin::Default);
    place(tree.get("init_args").unwrap_or(&absent), parts, &view.class(name)?.init_args?)
}
