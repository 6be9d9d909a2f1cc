//! Holds a tree against its schema and names every problem, before serde stops at the first.

use serde_json::Value;

use super::defaults::narrow;
use super::node::{Data, Node, Origin, join};
use super::schema::{View, option_types, type_name};
use super::suggest::nearest;
use super::words::{describe_type, expected, quote};
use crate::error::{ConfigProblem, Problem};

/// More unknown keys than this are counted, not named.
const MAX_UNKNOWN: usize = 10;
/// After so many problems the others are counted, not named.
const MAX_PROBLEMS: usize = 50;
/// More keys than this are not listed in an error.
const MAX_LISTED: usize = 16;

/// A problem, and the key of the tree that it is about: `ConfigProblem::key` is as its author would type it.
pub(super) struct Found {
    pub key: String,
    pub problem: ConfigProblem,
}

/// What is wrong with a tree.
#[derive(Default)]
pub(super) struct Checked {
    /// Problems, in the order of the tree: of unknown keys, and of all, only the first.
    pub problems: Vec<Found>,
    /// The other unknown keys.
    pub more_unknown: Vec<String>,
    /// The other keys with problems.
    pub more: Vec<String>,
}

/// Holds a tree against its schema.
pub(super) fn check(node: &Node, view: &View<'_>) -> Checked {
    let mut checker = Checker::new(view.clone());
    checker.visit(node, view, "");
    let Checker { problems, more_unknown, more, .. } = checker;
    Checked { problems, more_unknown, more }
}

struct Checker<'s> {
    root: View<'s>,
    problems: Vec<Found>,
    num_unknown: usize,
    more_unknown: Vec<String>,
    more: Vec<String>,
}

impl<'s> Checker<'s> {
    fn new(root: View<'s>) -> Self {
        Self { root, problems: Vec::new(), num_unknown: 0, more_unknown: Vec::new(), more: Vec::new() }
    }

    fn report(&mut self, key: &str, origin: &Origin, what: String, remedy: String) {
        if self.problems.len() >= MAX_PROBLEMS {
            return self.more.push(key.to_owned());
        }
        let problem = Problem::new(what, remedy);
        let problem = ConfigProblem { key: origin.typed_key(key), origin: origin.label(), problem };
        self.problems.push(Found { key: key.to_owned(), problem });
    }

    fn visit(&mut self, node: &Node, view: &View<'_>, key: &str) {
        if view.is_any() {
            return;
        }
        match &node.data {
            Data::Map(_) if view.allows("object") => self.visit_map(node, view, key),
            Data::List(items) if view.allows("array") => self.visit_list(node, items, view, key),
            Data::Scalar { value, .. } if scalar_fits(value, view) => {}
            _ => self.visit_misfit(node, view, key),
        }
    }

    fn visit_map(&mut self, node: &Node, view: &View<'_>, key: &str) {
        if !view.classes().is_empty() && self.has_no_class(node, view, key) {
            return;
        }
        let Some((view, _)) = narrow(node, view, view.default) else {
            // Several mappings could be meant: report the one with the fewest problems.
            let attempts = view.objects().map(|option| {
                let mut attempt = Checker::new(self.root.clone());
                let alternative = view.with_options(vec![option]);
                attempt.visit_keys(node, &alternative, key);
                attempt
            });
            let num_problems =
                |attempt: &Checker| attempt.problems.len() + attempt.more_unknown.len() + attempt.more.len();
            if let Some(best) = attempts.min_by_key(num_problems) {
                self.num_unknown += best.num_unknown;
                self.problems.extend(best.problems);
                self.more_unknown.extend(best.more_unknown);
                self.more.extend(best.more);
            }
            return;
        };
        self.visit_keys(node, &view, key);
    }

    /// Reports a class that is absent or unknown.
    fn has_no_class(&mut self, node: &Node, view: &View<'_>, key: &str) -> bool {
        let names: Vec<&str> = view.classes().iter().map(|class| class.name).collect();
        let Some(class) = node.get("class_path") else {
            if narrow(node, view, view.default).is_some() {
                return false;
            }
            let remedy = format!("write {key}=NAME with one of {}", names.join(", "));
            self.report(key, &node.origin, "arguments are given but no class".to_owned(), remedy);
            return true;
        };
        if class.as_str().is_some_and(|name| view.class(name).is_some()) {
            return false;
        }
        let last = class.as_str().and_then(|name| name.rsplit('.').next());
        if let Some(Problem { what, remedy }) = last.and_then(|name| view.refusal(name)) {
            self.report(key, &class.origin, what, remedy.into_owned());
            return true;
        }
        let what = format!("{} is not a known class", quote(&class.to_value()));
        let remedy = match class.as_str().and_then(|name| nearest(name, names.iter().copied())) {
            Some(name) => format!("did you mean {name}"),
            None if names.is_empty() => "none is registered".to_owned(),
            None => format!("the classes are {}", names.join(", ")),
        };
        self.report(key, &class.origin, what, remedy);
        true
    }

    fn visit_keys(&mut self, node: &Node, view: &View<'_>, key: &str) {
        for (name, child) in node.entries().into_iter().flatten() {
            match view.child(name) {
                Some(place) => self.visit(child, &place, &join(key, name)),
                None if view.is_open() => {}
                None => self.unknown_key(name, child, view, key),
            }
        }
        let required = view.options.iter().filter_map(|option| option.get("required")?.as_array()).flatten();
        for name in required.filter_map(Value::as_str) {
            if node.get(name).is_none() {
                let full = join(key, name);
                let expected =
                    view.child(name).map_or_else(|| "a value".to_owned(), |place| expected(&place));
                let shown = Origin::CommandLine.typed_key(&full);
                let remedy = format!("give {expected}, in a file or with --{shown}=VALUE");
                self.report(
                    &full,
                    &Origin::Default,
                    "this key is missing and has no default".to_owned(),
                    remedy,
                );
            }
        }
    }

    fn unknown_key(&mut self, name: &str, node: &Node, view: &View<'_>, key: &str) {
        self.num_unknown += 1;
        if self.num_unknown > MAX_UNKNOWN {
            return self.more_unknown.push(join(key, name));
        }
        let known = view.keys();
        let origin = first_origin(node);
        let full = join(key, name);
        if name == "init_args" && known == ["class_path"] {
            let what = "this class takes no arguments".to_owned();
            return self.report(&full, origin, what, "remove them".to_owned());
        }
        if let Some(Problem { what, remedy }) = view.refusal(name) {
            return self.report(&full, origin, what, remedy.into_owned());
        }
        let remedy = if let Some(other) = nearest(name, view.names()) {
            format!("did you mean {}", origin.typed_key(&join(key, other)))
        } else if let Some(elsewhere) = find_key(&self.root, name, "", 0)
            // The same key of another class does not help.
            .filter(|other| Origin::CommandLine.typed_key(other) != Origin::CommandLine.typed_key(&full))
        {
            format!("did you mean {}", Origin::CommandLine.typed_key(&elsewhere))
        } else if known.is_empty() {
            format!("{key} takes no keys")
        } else if known.len() <= MAX_LISTED {
            format!("the keys here are {}", known.join(", "))
        } else {
            "run with --help to see the keys".to_owned()
        };
        self.report(&full, origin, "unknown key".to_owned(), remedy);
    }

    fn visit_list(&mut self, node: &Node, items: &[Node], view: &View<'_>, key: &str) {
        let arrays = || view.options.iter().filter(|option| option_types(option).contains(&"array"));
        let bound = |name: &str| arrays().filter_map(|option| option.get(name)?.as_u64()).next();
        let fits = |low: Option<u64>, high: Option<u64>| {
            low.is_none_or(|low| items.len() as u64 >= low)
                && high.is_none_or(|high| items.len() as u64 <= high)
        };
        if arrays().count() == 1 && !fits(bound("minItems"), bound("maxItems")) {
            let what = format!("{} has {} elements", quote(&node.to_value()), items.len());
            self.report(key, &node.origin, what, format!("give {}", expected(view)));
            return;
        }
        for (i, item) in items.iter().enumerate() {
            self.visit(item, &view.item(i), &join(key, &i.to_string()));
        }
    }

    /// A value of the wrong type, outside its range, or not among the choices.
    fn visit_misfit(&mut self, node: &Node, view: &View<'_>, key: &str) {
        if self.problems.len() >= MAX_PROBLEMS {
            return self.more.push(key.to_owned()); // the text of a problem takes time
        }
        let value = node.to_value();
        let choices: Vec<&str> = view.choices().into_iter().filter_map(Value::as_str).collect();
        let classes = view.classes();
        let names = choices.iter().copied().chain(classes.iter().map(|class| class.name));
        let similar = node.as_str().and_then(|text| nearest(text, names));
        let is_number_as_text = node.as_str().is_some_and(|text| {
            text.parse::<f64>().is_ok() && (view.allows("number") || view.allows("integer"))
        });
        // such as 1e300, which no integer type holds
        let is_huge = value.is_f64() && value.as_f64().is_some_and(|number| number.fract() == 0.0);
        let what = if scalar_type_fits(&value, view) || (is_huge && view.allows("integer")) {
            let reason = if choices.is_empty() { "is outside the range" } else { "is not one of the values" };
            format!("{} {reason}", quote(&value))
        } else {
            format!("{} is {}", quote(&value), describe_type(type_name(&value)))
        };
        let remedy = match similar {
            Some(name) => format!("did you mean `{name}`"),
            None if is_number_as_text => format!("remove the quotes to give {}", expected(view)),
            None => format!("give {}", expected(view)),
        };
        self.report(key, first_origin(node), what, remedy);
    }
}

/// Where a node was set; for a mapping that was made for its keys, where its first leaf was.
fn first_origin(node: &Node) -> &Origin {
    match &node.data {
        Data::Map(entries) if node.origin == Origin::Default => {
            entries.first().map_or(&node.origin, |(_, child)| first_origin(child))
        }
        _ => &node.origin,
    }
}

fn scalar_type_fits(value: &Value, view: &View<'_>) -> bool {
    view.options.iter().any(|option| type_fits(value, option))
}

fn type_fits(value: &Value, option: &Value) -> bool {
    let types = option_types(option);
    let name = type_name(value);
    types.contains(&name) || (name == "integer" && types.contains(&"number"))
}

fn scalar_fits(value: &Value, view: &View<'_>) -> bool {
    view.options.iter().any(|option| {
        let is_choice = match (option.get("const"), option.get("enum").and_then(Value::as_array)) {
            (Some(constant), _) => constant == value,
            (None, Some(values)) => values.contains(value),
            (None, None) => true,
        };
        type_fits(value, option) && is_choice && in_range(value, option)
    })
}

fn in_range(value: &Value, option: &Value) -> bool {
    let Some(number) = value.as_f64() else { return true };
    let bound = |name: &str| option.get(name).and_then(Value::as_f64);
    bound("minimum").is_none_or(|low| number >= low)
        && bound("maximum").is_none_or(|high| number <= high)
        && bound("exclusiveMinimum").is_none_or(|low| number > low)
        && bound("exclusiveMaximum").is_none_or(|high| number < high)
}

/// The dotted key whose last part is `name`, wherever it stands.
fn find_key(view: &View<'_>, name: &str, prefix: &str, depth: usize) -> Option<String> {
    if depth > 3 {
        return None;
    }
    if depth > 0 && view.keys().contains(&name) {
        return Some(join(prefix, name));
    }
    view.keys().into_iter().find_map(|key| find_key(&view.child(key)?, name, &join(prefix, key), depth + 1))
}
