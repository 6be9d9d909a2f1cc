//! Values and expectations in words, for errors and help.

use std::collections::HashSet;

use serde_json::Value;

use super::schema::{View, option_types};

/// Longest value an error quotes.
const MAX_QUOTED: usize = 60;

/// A value as an error shows it.
pub(super) fn quote(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    if text.chars().count() <= MAX_QUOTED {
        return format!("`{text}`");
    }
    format!("`{}...`", text.chars().take(MAX_QUOTED).collect::<String>())
}

pub(super) fn describe_type(name: &str) -> &'static str {
    match name {
        "null" => "null",
        "boolean" => "a true-or-false value",
        "integer" => "an integer",
        "number" => "a number with a fraction",
        "string" => "text",
        "array" => "a list",
        _ => "a mapping",
    }
}

/// What may stand at a place, in words: "an integer of at least 0 or null".
pub(super) fn expected(view: &View<'_>) -> String {
    if view.is_any() {
        return "any value".to_owned();
    }
    let mut words: Vec<String> = Vec::new();
    let mut add = |text: String| {
        if !words.contains(&text) {
            words.push(text);
        }
    };
    let mut choices: Vec<String> = view.choices().into_iter().map(quote).collect();
    let mut seen = HashSet::new();
    choices.retain(|choice| seen.insert(choice.clone())); // classes may have a key in common
    match choices.as_slice() {
        [] => {}
        [only] => add(only.clone()),
        several => add(format!("one of {}", several.join(", "))),
    }
    let classes = view.classes();
    if !classes.is_empty() {
        let names: Vec<&str> = classes.iter().map(|class| class.name).collect();
        add(format!("a class ({})", names.join(", ")));
    }
    let has_numbers = view.options.iter().any(|option| option_types(option).contains(&"number"));
    for option in &view.options {
        let is_listed = option.get("const").is_some() || option.get("enum").is_some();
        for name in option_types(option) {
            match name {
                _ if is_listed || name == "null" || (name == "integer" && has_numbers) => {}
                "boolean" => add("true or false".to_owned()),
                "integer" => add(format!("an integer{}", range(option))),
                "number" => add(format!("a number{}", range(option))),
                "string" => add("text".to_owned()),
                "array" => add(list(view, option)),
                _ if !classes.is_empty() => {}
                _ => add("a mapping".to_owned()),
            }
        }
    }
    if view.allows("null") {
        words.push("null".to_owned());
    }
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        Some((last, _)) => last.clone(),
        None => "nothing".to_owned(),
    }
}

fn range(option: &Value) -> String {
    let bound = |name: &str| option.get(name).filter(|bound| bound.is_number());
    let low = bound("minimum").map(|low| format!(" of at least {low}"));
    let low = low.or_else(|| bound("exclusiveMinimum").map(|low| format!(" above {low}")));
    // The upper end of an integer type is nothing to read about.
    let high = bound("maximum").filter(|high| high.as_f64().is_some_and(|high| high < 1e9));
    let high = high.map(|high| format!(" and at most {high}"));
    let high = high.or_else(|| bound("exclusiveMaximum").map(|high| format!(" below {high}")));
    format!("{}{}", low.unwrap_or_default(), high.unwrap_or_default())
}

fn list(view: &View<'_>, option: &Value) -> String {
    let element = view.with_options(vec![option]).item(0);
    let count = |name: &str| option.get(name).and_then(Value::as_u64);
    let size = match (count("minItems"), count("maxItems")) {
        (Some(low), Some(high)) if low == high => format!(" of {low} elements"),
        _ => String::new(),
    };
    if element.is_any() {
        format!("a list{size}")
    } else {
        format!("a list{size}, each {}", expected(&element))
    }
}
