//! Writes a configuration as YAML that reads back as the same values, with this crate's reader and with YAML 1.1 readers.

use saphyr::Scalar;
use serde_json::{Number, Value};

use super::schema::View;

/// A list of scalars that fits in this many columns stays on one line.
const MAX_FLOW_WIDTH: usize = 80;
/// Comments are broken at this column.
const MAX_COMMENT_WIDTH: usize = 100;

/// A value as a YAML document.
///
/// Strings that another type's spelling would claim (`"1e-3"`, `"null"`, `"on"`) are quoted.
pub fn to_yaml(value: &Value) -> String {
    let mut emitter = Emitter { out: String::new(), root: None };
    emitter.document(value);
    emitter.out
}

/// Like [`to_yaml`], with each key's description as a comment above it.
pub(super) fn to_commented_yaml(value: &Value, view: &View<'_>) -> String {
    let mut emitter = Emitter { out: String::new(), root: Some(view) };
    emitter.document(value);
    emitter.out
}

struct Emitter<'v, 's> {
    out: String,
    root: Option<&'v View<'s>>,
}

impl<'s> Emitter<'_, 's> {
    fn document(&mut self, value: &Value) {
        let view = self.root.cloned();
        match value {
            Value::Object(_) | Value::Array(_) if inline(value).is_none() => {
                self.block(value, 0, false, view.as_ref())
            }
            other => {
                self.out.push_str(&inline(other).unwrap_or_default());
                self.out.push('\n');
            }
        }
    }

    /// Writes the lines of a mapping or list; with `continues`, the first stands behind a list's dash.
    fn block(&mut self, value: &Value, indent: usize, continues: bool, view: Option<&View<'s>>) {
        let mut is_first = continues;
        match value {
            Value::Object(entries) => {
                let view = view.map(|view| of_class(view, value));
                for (key, child) in entries {
                    let place = view.as_ref().and_then(|view| view.child(key));
                    self.comment(place.as_ref().and_then(|place| place.description), indent, is_first);
                    self.start(indent, &mut is_first);
                    self.out.push_str(&text(key));
                    self.out.push(':');
                    self.child(child, indent + 2, place.as_ref());
                }
            }
            Value::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    let place = view.map(|view| view.item(i));
                    self.start(indent, &mut is_first);
                    self.out.push('-');
                    if inline(item).is_some() {
                        self.child(item, indent + 2, place.as_ref());
                    } else {
                        self.out.push(' ');
                        self.block(item, indent + 2, true, place.as_ref());
                    }
                }
            }
            _ => {}
        }
    }

    fn start(&mut self, indent: usize, is_first: &mut bool) {
        if !std::mem::take(is_first) {
            self.out.push_str(&" ".repeat(indent));
        }
    }

    fn child(&mut self, value: &Value, indent: usize, view: Option<&View<'s>>) {
        match inline(value) {
            Some(text) => {
                self.out.push(' ');
                self.out.push_str(&text);
                self.out.push('\n');
            }
            None => {
                self.out.push('\n');
                self.block(value, indent, false, view);
            }
        }
    }

    fn comment(&mut self, description: Option<&str>, indent: usize, is_first: bool) {
        // Behind a dash there is no line above.
        let Some(description) = description.filter(|_| !is_first) else { return };
        for line in wrap(&first_paragraph(description), MAX_COMMENT_WIDTH.saturating_sub(indent + 2)) {
            self.out.push_str(&format!("{}# {line}\n", " ".repeat(indent)));
        }
    }
}

fn of_class<'s>(view: &View<'s>, value: &Value) -> View<'s> {
    let class = value.get("class_path").and_then(Value::as_str).and_then(|name| view.class(name));
    class.map_or_else(|| view.clone(), |class| view.of_class(&class))
}

/// The first paragraph of a doc comment as one line, its links as plain names.
pub(crate) fn first_paragraph(text: &str) -> String {
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    line.replace("[`", "`").replace("`]", "`")
}

/// Breaks a line between words.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The value on one line, if it is a scalar, empty, or a short list of scalars.
pub(crate) fn inline(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("null".to_owned()),
        Value::Bool(flag) => Some(flag.to_string()),
        Value::Number(number) => Some(numeral(number)),
        Value::String(string) => Some(text(string)),
        Value::Object(entries) => entries.is_empty().then(|| "{}".to_owned()),
        Value::Array(items) => {
            let parts: Vec<String> = items
                .iter()
                .map(|item| if item.is_object() { None } else { inline(item) })
                .collect::<Option<_>>()?;
            let line = format!("[{}]", parts.join(", "));
            (line.len() <= MAX_FLOW_WIDTH).then_some(line)
        }
    }
}

/// `1e-8` as `1.0e-8`: YAML 1.1 readers take a number without a point or with an unsigned exponent for text.
fn numeral(number: &Number) -> String {
    let plain = number.to_string();
    let Some((mantissa, exponent)) = plain.split_once('e') else { return plain };
    let point = if mantissa.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with(['-', '+']) { "" } else { "+" };
    format!("{mantissa}{point}e{sign}{exponent}")
}

fn text(string: &str) -> String {
    if is_plain(string) {
        return string.to_owned();
    }
    // JSON's escapes are a part of YAML's double-quoted style.
    Value::String(string.to_owned()).to_string()
}

/// Whether a string may stand without quotes: only where no reader could see anything else in it.
fn is_plain(string: &str) -> bool {
    let mut letters = string.chars();
    let starts_well =
        letters.next().is_some_and(|c| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '.'));
    let is_safe = |c: char| {
        c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '.' | '-' | '+' | '=' | ' ' | '(' | ')')
    };
    let is_word_of_yaml_1_1 =
        matches!(string.to_ascii_lowercase().as_str(), "yes" | "no" | "on" | "off" | "y" | "n");
    let is_number_of_yaml_1_1 = string.replace('_', "").parse::<f64>().is_ok()
        || string.starts_with("0b")
        || string.starts_with("0x");
    // A date of YAML 1.1, such as 2001-01-01.
    let is_date = string.len() >= 8
        && string.starts_with(|c: char| c.is_ascii_digit())
        && string.split('-').take(3).all(|part| part.starts_with(|c: char| c.is_ascii_digit()))
        && string.contains('-');
    starts_well
        && !is_date
        && string.chars().all(is_safe)
        && !string.ends_with(' ')
        && !is_word_of_yaml_1_1
        && !is_number_of_yaml_1_1
        && matches!(Scalar::parse_from_cow(string.into()), Scalar::String(_))
}
