//! Reads JSON into nodes with line numbers. Accepts the parts of hjson that are in use: comments, trailing commas, names without
//! quotes.

use indexmap::IndexMap;
use jsonc_parser::ast::Value as Json;
use jsonc_parser::common::Ranged;
use jsonc_parser::errors::ParseErrorKind;
use jsonc_parser::{CollectOptions, CommentCollectionStrategy, ParseOptions, parse_to_ast};
use serde_json::Value;

use super::node::{Data, Node, Origin, join};
use crate::error::{ConfigError, ConfigProblem, Problem, shortened};

/// Settings of a program have some kB and some dozens of keys.
const MAX_BYTES: usize = 1 << 20;
const MAX_VALUES: usize = 4096;
const MAX_DEPTH: usize = 16;
const TOO_LARGE: &str = "give settings only";
const NEST_LESS: &str = "nest less";

fn too_deep() -> String {
    format!("sections deeper than {MAX_DEPTH}")
}

/// Reads the text of a file. `title` stands for the key in errors that are about the whole file, `path` is its name there.
///
/// # Errors
/// A text that is not JSON; or all numbers that are not finite, names that are given twice, and limits exceeded.
pub(super) fn read(title: &str, path: &str, text: &str) -> Result<Node, ConfigError> {
    let fail = |origin: String, what: String, remedy: &'static str| ConfigError {
        problems: vec![ConfigProblem { key: title.to_owned(), origin, problem: Problem::new(what, remedy) }],
    };
    if text.len() > MAX_BYTES {
        let what = format!("{} bytes, more than {MAX_BYTES}", text.len());
        return Err(fail(path.to_owned(), what, TOO_LARGE));
    }
    let text = &slashes_for_hashes(text.trim_start_matches('\u{feff}'));
    let mut reader = Reader {
        path,
        line_ends: text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect(),
        num_values: 0,
        problems: Vec::new(),
    };
    let collect = CollectOptions { comments: CommentCollectionStrategy::Off, tokens: false };
    let options = ParseOptions { allow_missing_commas: false, ..ParseOptions::default() };
    let parsed = parse_to_ast(text, &collect, &options).map_err(|error| {
        let (what, remedy) = match error.kind() {
            ParseErrorKind::NestingDepthExceeded => (too_deep(), NEST_LESS),
            kind => (kind.to_string(), "write it as JSON"),
        };
        fail(reader.origin(error.range().start).label(), what, remedy)
    })?;
    let Some(value) = parsed.value else {
        return Err(fail(path.to_owned(), "it is empty".to_owned(), "write {} for the defaults"));
    };
    let node = reader.node("", &value, reader.origin(value.start()), 0);
    if reader.num_values > MAX_VALUES {
        return Err(fail(path.to_owned(), format!("more than {MAX_VALUES} values"), TOO_LARGE));
    }
    if reader.problems.is_empty() { Ok(node) } else { Err(ConfigError { problems: reader.problems }) }
}

/// `#` begins a comment in hjson; here it is written as `//`.
fn slashes_for_hashes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut quote, mut comment, mut escaped) = (None, None, false);
    let mut previous = ' ';
    for letter in text.chars() {
        match (quote, comment) {
            (Some(end), _) => {
                if !escaped && letter == end {
                    quote = None;
                }
                escaped = !escaped && letter == '\\';
            }
            (None, Some('\n')) if letter == '\n' => comment = None,
            (None, Some('*')) if previous == '*' && letter == '/' => comment = None,
            (None, Some(_)) => {}
            (None, None) => match letter {
                '"' | '\'' => (quote, escaped) = (Some(letter), false),
                '/' if previous == '/' => comment = Some('\n'),
                '*' if previous == '/' => {
                    comment = Some('*');
                    out.push(letter);
                    previous = ' '; // `/*/` does not end it
                    continue;
                }
                '#' => {
                    comment = Some('\n');
                    out.push('/');
                    out.push('/');
                    continue;
                }
                _ => {}
            },
        }
        out.push(letter);
        previous = letter;
    }
    out
}

struct Reader<'a> {
    path: &'a str,
    /// Offsets of the ends of lines.
    line_ends: Vec<usize>,
    num_values: usize,
    problems: Vec<ConfigProblem>,
}

impl Reader<'_> {
    fn line(&self, offset: usize) -> usize {
        self.line_ends.partition_point(|end| *end < offset) + 1
    }

    fn origin(&self, offset: usize) -> Origin {
        Origin::File { path: self.path.to_owned(), line: self.line(offset) }
    }

    fn report(&mut self, key: &str, origin: &Origin, what: String, remedy: &'static str) {
        let problem = Problem::new(what, remedy);
        self.problems.push(ConfigProblem { key: key.to_owned(), origin: origin.label(), problem });
    }

    /// The node of a value, which has the origin of its name if it has one.
    fn node(&mut self, key: &str, value: &Json<'_>, origin: Origin, depth: usize) -> Node {
        self.num_values += 1;
        if depth > MAX_DEPTH {
            self.report(key, &origin, too_deep(), NEST_LESS);
        }
        if depth > MAX_DEPTH || self.num_values > MAX_VALUES {
            return Node::scalar(Value::Null, origin);
        }
        let scalar = match value {
            Json::NullKeyword(_) => Value::Null,
            Json::BooleanLit(flag) => Value::Bool(flag.value),
            Json::NumberLit(number) => self.number(key, &origin, number.value),
            Json::StringLit(text) => Value::from(&*text.value),
            Json::Array(list) => {
                let mut items = Vec::with_capacity(list.elements.len());
                for (index, item) in list.elements.iter().enumerate() {
                    let origin = self.origin(item.start());
                    items.push(self.node(&join(key, &index.to_string()), item, origin, depth + 1));
                }
                return Node { origin, data: Data::List(items) };
            }
            Json::Object(object) => {
                let mut entries: IndexMap<String, Node> = IndexMap::new();
                for property in &object.properties {
                    let name = property.name.as_str();
                    let (key, origin) = (join(key, name), self.origin(property.start()));
                    if let Some(Origin::File { line, .. }) = entries.get(name).map(|first| &first.origin) {
                        let what = format!("is given twice, first in line {line}");
                        self.report(&key, &origin, what, "remove one of the two");
                        continue;
                    }
                    let child = self.node(&key, &property.value, origin, depth + 1);
                    entries.insert(name.to_owned(), child);
                }
                return Node { origin, data: Data::Map(entries) };
            }
        };
        Node::scalar(scalar, origin)
    }

    fn number(&mut self, key: &str, origin: &Origin, text: &str) -> Value {
        if let Some(number) = text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok())
        {
            return Value::from(number);
        }
        if let Ok(number) = text.parse::<u64>() {
            return Value::from(number);
        }
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Value::from(number),
            _ => {
                let what = format!("{} is not a number that float64 can hold", shortened(text, 40));
                self.report(key, origin, what, "give a finite number");
                Value::Null
            }
        }
    }
}
