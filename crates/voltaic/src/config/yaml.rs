//! Reads YAML into nodes with line numbers.

use std::collections::HashMap;

use indexmap::IndexMap;
use saphyr::{LoadableYamlNode, MarkedYaml, Scalar, ScanError, YamlData};
use saphyr_parser::{Event, Parser};
use serde_json::{Number, Value};

use super::node::{Data, Node, Origin};
use crate::error::{ConfigProblem, Problem};

/// Deeper nesting is a mistake (or an attack on the stack), not a configuration.
const MAX_DEPTH: usize = 64;

/// Reads one YAML document; an empty one is an empty mapping.
pub(super) fn read(text: &str, file: &str) -> Result<Node, Box<ConfigProblem>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let origin = |line| Origin::File { path: file.to_owned(), line };
    let reader = Reader::new(text, &origin);
    let node = match reader.document()? {
        Some(node) if !node.is_null() => node,
        _ => Node::map(origin(1)),
    };
    if node.entries().is_none() {
        return Err(problem(&node.origin, "the top level is not a mapping", "write `key: value` lines"));
    }
    Ok(node)
}

/// Reads a value given as text outside a file: a YAML scalar, `[..]` or `{..}`.
///
/// Text that is no YAML, such as `a: b: c`, is taken as it stands, unless it starts like a list or mapping. Where `is_text` says
/// that neither may stand, this is text too: `{epoch}-{step}`.
pub(super) fn read_value(text: &str, is_text: bool, origin: &Origin) -> Result<Node, Box<ConfigProblem>> {
    let plain = || Node::scalar(Value::String(text.to_owned()), origin.clone());
    let trimmed = text.trim_start();
    let is_flow = trimmed.starts_with(['[', '{']);
    if is_flow && is_text {
        return Ok(plain());
    }
    if !is_flow && !trimmed.starts_with(['"', '\'']) {
        // Block syntax and comments have no meaning on one line: `a: b` and `x #1` are meant literally.
        if trimmed.is_empty() {
            return Ok(plain());
        }
        return scalar_node(&Scalar::parse_from_cow(text.into()), Some(text), origin.clone());
    }
    let at = |_| origin.clone();
    match Reader::new(text, &at).document() {
        Ok(Some(node)) => Ok(node),
        Ok(None) => Ok(plain()),
        Err(problem) => Err(problem),
    }
}

struct Reader<'a> {
    text: &'a str,
    places: Places,
    origin: &'a dyn Fn(usize) -> Origin,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str, origin: &'a dyn Fn(usize) -> Origin) -> Self {
        Self { text, places: Places::of(text), origin }
    }
}

/// Where each character begins: the loader counts characters.
struct Places(Option<Vec<usize>>);

impl Places {
    fn of(text: &str) -> Self {
        let all = || text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        Self((!text.is_ascii()).then(all))
    }

    fn slice<'t>(&self, text: &'t str, start: usize, end: usize) -> Option<&'t str> {
        let at = |index: usize| self.0.as_ref().map_or(Some(index), |places| places.get(index).copied());
        text.get(at(start)?..at(end)?)
    }
}

/// The line at which a text nests deeper than is allowed, also by what its aliases stand for.
fn too_deep(text: &str) -> Result<Option<usize>, ScanError> {
    /// How deep what begins here is, and the anchor that is its name.
    struct Open {
        depth: usize,
        anchor: usize,
    }
    let mut open: Vec<Open> = Vec::new();
    let mut depths: HashMap<usize, usize> = HashMap::new();
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        let (event, span) = event?;
        let depth = match event {
            Event::SequenceStart(anchor, _) | Event::MappingStart(anchor, _) => {
                open.push(Open { depth: 1, anchor });
                0
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { depth, anchor }) = open.pop() else { continue };
                depths.insert(anchor, depth);
                depth
            }
            Event::Alias(anchor) => depths.get(&anchor).copied().unwrap_or(0),
            _ => 0,
        };
        if let Some(parent) = open.last_mut() {
            parent.depth = parent.depth.max(depth + 1);
        }
        if open.len() + depth > MAX_DEPTH {
            return Ok(Some(span.start.line()));
        }
    }
    Ok(None)
}

impl Reader<'_> {
    fn document(&self) -> Result<Option<Node>, Box<ConfigProblem>> {
        let fail = |error: ScanError| {
            let (line, column) = (error.marker().line(), error.marker().col() + 1);
            let at = match (self.origin)(line) {
                Origin::File { path, line } => format!("{path}:{line}:{column}"),
                other => format!("{other}, column {column}"),
            };
            Box::new(ConfigProblem {
                key: "YAML".to_owned(),
                origin: at,
                problem: Problem::new(error.info(), "fix the YAML there"),
            })
        };
        // the loader and what it makes nest on the stack as deep as the text does
        if let Some(line) = too_deep(self.text).map_err(fail)? {
            let what = format!("nested deeper than {MAX_DEPTH}");
            return Err(problem(&(self.origin)(line), &what, "nest less"));
        }
        let documents = MarkedYaml::load_from_str(self.text).map_err(fail)?;
        let mut documents = documents.iter();
        let first = documents.next();
        if let Some(second) = documents.next() {
            let origin = (self.origin)(second.span.start.line());
            return Err(problem(&origin, "a second document begins", "keep one document per file"));
        }
        first.map(|node| self.convert(node, 0)).transpose()
    }

    fn convert(&self, node: &MarkedYaml<'_>, depth: usize) -> Result<Node, Box<ConfigProblem>> {
        let origin = (self.origin)(node.span.start.line());
        let data = match &node.data {
            YamlData::Value(scalar) => return scalar_node(scalar, self.raw(node).as_deref(), origin),
            YamlData::Sequence(items) => {
                Data::List(items.iter().map(|item| self.convert(item, depth + 1)).collect::<Result<_, _>>()?)
            }
            YamlData::Mapping(entries) => {
                let mut map = IndexMap::with_capacity(entries.len());
                for (key, value) in entries {
                    let name = self.key(key)?;
                    if map.contains_key(&name) {
                        let at = (self.origin)(key.span.start.line());
                        return Err(problem(&at, &format!("`{name}` is given twice"), "keep one of them"));
                    }
                    let mut child = self.convert(value, depth + 1)?;
                    if child.is_null() {
                        // An absent value has the position of whatever follows it.
                        child.origin = (self.origin)(key.span.start.line());
                    }
                    map.insert(name, child);
                }
                Data::Map(map)
            }
            YamlData::Tagged(tag, _) => {
                let what = format!("tag `!{}` has no meaning here", tag.suffix);
                return Err(problem(&origin, &what, "remove it; a class is written as `class_path: NAME`"));
            }
            // An empty document.
            YamlData::BadValue if depth == 0 => Data::Scalar { value: Value::Null, text: None },
            _ => return Err(problem(&origin, "this value cannot be read", "check its tag or alias")),
        };
        Ok(Node { origin, data })
    }

    fn key(&self, key: &MarkedYaml<'_>) -> Result<String, Box<ConfigProblem>> {
        let origin = (self.origin)(key.span.start.line());
        match &key.data {
            YamlData::Value(Scalar::String(text)) if text == "<<" && self.raw(key).is_some() => Err(problem(
                &origin,
                "`<<` merges are not part of YAML 1.2",
                "pass several --config files instead",
            )),
            YamlData::Value(Scalar::String(text)) => Ok(text.to_string()),
            YamlData::Value(_) => {
                self.raw(key).ok_or_else(|| problem(&origin, "this key cannot be read", "put it in quotes"))
            }
            _ => Err(problem(&origin, "a key is a list or a mapping", "use text as a key")),
        }
    }

    /// The source text of a scalar without quotes; nothing for an alias, whose text is elsewhere.
    fn raw(&self, node: &MarkedYaml<'_>) -> Option<String> {
        let (start, end) = (node.span.start.index(), node.span.end.index());
        let raw = self.places.slice(self.text, start, end)?;
        let YamlData::Value(scalar) = &node.data else { return None };
        (Scalar::parse_from_cow(raw.trim().into()) == *scalar).then(|| raw.trim().to_owned())
    }
}

fn scalar_node(scalar: &Scalar<'_>, raw: Option<&str>, origin: Origin) -> Result<Node, Box<ConfigProblem>> {
    let value = match scalar {
        Scalar::Null => Value::Null,
        Scalar::Boolean(flag) => Value::Bool(*flag),
        Scalar::Integer(integer) => Value::from(*integer),
        Scalar::String(text) => Value::String(text.to_string()),
        Scalar::FloatingPoint(float) => {
            // The reader's integers are signed; seeds may use all 64 bits.
            if let Some(unsigned) = raw.and_then(|raw| raw.trim().parse::<u64>().ok()) {
                Value::from(unsigned)
            } else if let Some(number) = Number::from_f64(float.0) {
                Value::Number(number)
            } else {
                let what = format!("`{}` is not a finite number", raw.unwrap_or_default());
                return Err(problem(&origin, &what, "give a finite number, or null for no limit"));
            }
        }
    };
    let text = if value.is_number() { raw.map(|raw| raw.trim().to_owned()) } else { None };
    Ok(Node { origin, data: Data::Scalar { value, text } })
}

fn problem(origin: &Origin, what: &str, remedy: &'static str) -> Box<ConfigProblem> {
    Box::new(ConfigProblem {
        key: "YAML".to_owned(),
        origin: origin.label(),
        problem: Problem::new(what, remedy),
    })
}
