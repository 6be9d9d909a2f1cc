//! A DeepSpeed file as a tree whose every value knows its line. JSON with what hjson adds that people use: comments, commas
//! at the end, names without quotes.

use std::collections::HashMap;

use jsonc_parser::ast::Value as Json;
use jsonc_parser::common::Ranged;
use jsonc_parser::{CollectOptions, CommentCollectionStrategy, ParseOptions, parse_to_ast};
use serde_json::Value;

use crate::error::{ConfigError, ConfigProblem, Problem};

/// DeepSpeed's files have some kB and some dozens of keys.
const MAX_BYTES: usize = 1 << 20;
const MAX_VALUES: usize = 4096;
const MAX_DEPTH: usize = 16;

/// A value and its line, counted from 1; 0 if it was not read from a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub line: usize,
    pub data: Data,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Data {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List(Vec<Entry>),
    Map(Vec<(String, Entry)>),
}

impl Entry {
    /// The value as an error shows it.
    pub fn shown(&self) -> String {
        match &self.data {
            Data::Null => "null".to_owned(),
            Data::Bool(flag) => flag.to_string(),
            Data::Number(number) => number.to_string(),
            Data::Text(text) => {
                let short: String = text.chars().take(40).collect();
                if short.len() < text.len() { format!("\"{short}..\"") } else { format!("\"{short}\"") }
            }
            Data::List(items) => format!("a list of {}", items.len()),
            Data::Map(entries) => format!("a section of {} keys", entries.len()),
        }
    }

    /// As JSON again; whole numbers as integers, however they were written.
    pub fn to_value(&self) -> Value {
        match &self.data {
            Data::Null => Value::Null,
            Data::Bool(flag) => Value::from(*flag),
            Data::Number(number) if number.fract() == 0.0 && number.abs() < 2f64.powi(53) => {
                Value::from(*number as i64)
            }
            Data::Number(number) => Value::from(*number),
            Data::Text(text) => Value::from(text.as_str()),
            Data::List(items) => items.iter().map(Self::to_value).collect(),
            Data::Map(entries) => {
                Value::Object(entries.iter().map(|(key, entry)| (key.clone(), entry.to_value())).collect())
            }
        }
    }
}

/// Lines of the offsets into a text.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect())
    }

    fn at(&self, offset: usize) -> usize {
        self.0.partition_point(|end| *end < offset) + 1
    }
}

/// What is read so far of one document.
struct Reading<'a> {
    path: &'a str,
    lines: Option<Lines>,
    num_values: usize,
    problems: Vec<ConfigProblem>,
}

fn problem(key: &str, origin: String, what: String, remedy: &'static str) -> ConfigProblem {
    ConfigProblem { key: key.to_owned(), origin, problem: Problem::new(what, remedy) }
}

const TOO_LARGE: &str = "give DeepSpeed's settings only";

/// Reads a file's text. `path` is the file's name in errors.
pub(super) fn parse(path: &str, text: &str) -> Result<Entry, ConfigError> {
    let fail = |origin: String, what: String, remedy| ConfigError {
        problems: vec![problem("DeepSpeed file", origin, what, remedy)],
    };
    if text.len() > MAX_BYTES {
        let what = format!("{} bytes, more than {MAX_BYTES}", text.len());
        return Err(fail(path.to_owned(), what, TOO_LARGE));
    }
    let text = &slashes_for_hashes(text.trim_start_matches('\u{feff}'));
    let lines = Lines::of(text);
    let collect = CollectOptions { comments: CommentCollectionStrategy::Off, tokens: false };
    let options = ParseOptions { allow_missing_commas: false, ..ParseOptions::default() };
    let parsed = parse_to_ast(text, &collect, &options).map_err(|error| {
        let origin = format!("{path}:{}", lines.at(error.range().start));
        fail(origin, error.kind().to_string(), "write it as JSON")
    })?;
    let Some(value) = parsed.value else {
        return Err(fail(path.to_owned(), "it is empty".to_owned(), "write {} for DeepSpeed's defaults"));
    };
    let mut reading = Reading { path, lines: Some(lines), num_values: 0, problems: Vec::new() };
    let entry = reading.of_json("", &value, 0);
    reading.finish(entry)
}

/// Settings that a program or a YAML file gives; `key` is where they are.
pub(super) fn from_value(key: &str, value: &Value) -> Result<Entry, ConfigError> {
    let mut reading = Reading { path: "", lines: None, num_values: 0, problems: Vec::new() };
    let entry = reading.of_value(key, value, 0);
    reading.finish(entry)
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

fn join(key: &str, part: &str) -> String {
    if key.is_empty() { part.to_owned() } else { format!("{key}.{part}") }
}

impl Reading<'_> {
    fn finish(mut self, entry: Entry) -> Result<Entry, ConfigError> {
        if self.num_values > MAX_VALUES {
            let what = format!("more than {MAX_VALUES} values");
            self.problems = vec![problem("DeepSpeed file", self.path.to_owned(), what, TOO_LARGE)];
        }
        if self.problems.is_empty() { Ok(entry) } else { Err(ConfigError { problems: self.problems }) }
    }

    fn origin(&self, line: usize) -> String {
        if line == 0 { String::new() } else { format!("{}:{line}", self.path) }
    }

    fn complain(&mut self, key: &str, line: usize, what: String, remedy: &'static str) {
        let origin = self.origin(line);
        self.problems.push(problem(key, origin, what, remedy));
    }

    /// Whether another value at this depth is not too much.
    fn counts(&mut self, key: &str, line: usize, depth: usize) -> bool {
        self.num_values += 1;
        if depth > MAX_DEPTH {
            self.complain(
                key,
                line,
                format!("sections deeper than {MAX_DEPTH}"),
                "DeepSpeed has no section so deep",
            );
        }
        depth <= MAX_DEPTH && self.num_values <= MAX_VALUES
    }

    fn number(&mut self, key: &str, line: usize, text: &str) -> Data {
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => return Data::Number(number),
            _ => {}
        }
        let hexadecimal = text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        if let Some(number) = hexadecimal {
            return Data::Number(f64::from(number));
        }
        let short: String = text.chars().take(40).collect();
        self.complain(
            key,
            line,
            format!("{short} is not a number that float64 can hold"),
            "give a finite number",
        );
        Data::Null
    }

    fn of_json(&mut self, key: &str, value: &Json<'_>, depth: usize) -> Entry {
        let line = self.lines.as_ref().map_or(0, |lines| lines.at(value.start()));
        if !self.counts(key, line, depth) {
            return Entry { line, data: Data::Null };
        }
        let data = match value {
            Json::NullKeyword(_) => Data::Null,
            Json::BooleanLit(flag) => Data::Bool(flag.value),
            Json::NumberLit(number) => self.number(key, line, number.value),
            Json::StringLit(text) => Data::Text(text.value.to_string()),
            Json::Array(list) => Data::List(
                list.elements
                    .iter()
                    .enumerate()
                    .map(|(index, item)| self.of_json(&join(key, &index.to_string()), item, depth + 1))
                    .collect(),
            ),
            Json::Object(object) => {
                let mut lines_of_keys: HashMap<&str, usize> = HashMap::new();
                let mut entries = Vec::new();
                for property in &object.properties {
                    let name = property.name.as_str();
                    let line = self.lines.as_ref().map_or(0, |lines| lines.at(property.start()));
                    let key = join(key, name);
                    if let Some(first) = lines_of_keys.insert(name, line) {
                        self.complain(
                            &key,
                            line,
                            format!("is given twice, first in line {first}"),
                            "remove one of the two",
                        );
                    }
                    let mut entry = self.of_json(&key, &property.value, depth + 1);
                    entry.line = line;
                    entries.push((name.to_owned(), entry));
                }
                Data::Map(entries)
            }
        };
        Entry { line, data }
    }

    fn of_value(&mut self, key: &str, value: &Value, depth: usize) -> Entry {
        if !self.counts(key, 0, depth) {
            return Entry { line: 0, data: Data::Null };
        }
        let data = match value {
            Value::Null => Data::Null,
            Value::Bool(flag) => Data::Bool(*flag),
            Value::Number(number) => self.number(key, 0, &number.to_string()),
            Value::String(text) => Data::Text(text.clone()),
            Value::Array(list) => Data::List(
                list.iter()
                    .enumerate()
                    .map(|(index, item)| self.of_value(&join(key, &index.to_string()), item, depth + 1))
                    .collect(),
            ),
            Value::Object(entries) => Data::Map(
                entries
                    .iter()
                    .map(|(name, item)| (name.clone(), self.of_value(&join(key, name), item, depth + 1)))
                    .collect(),
            ),
        };
        Entry { line: 0, data }
    }
}
