//! Puts values in the place of `${oc.env:NAME,default}` and `${trainer.max_epochs}`, as OmegaConf reads them in the files of Lightning's
//! users, and refuses `???`, which stands there for a value to come.

use std::env;

use serde_json::Value;

use super::check::Found;
use super::defaults::narrow;
use super::merge::{Remarks, merge};
use super::node::{Data, Node, Origin, join};
use super::schema::View;
use super::yaml::read_value;
use crate::error::{ConfigProblem, Problem};

/// A longer text is a mistake.
const MAX_TEXT: usize = 1 << 16;
/// More values in one configuration are a mistake, or made to take time.
const MAX_VALUES: usize = 10_000;
/// Values may refer to each other so often.
const MAX_DEPTH: usize = 32;

/// A problem and its remedy.
type Fault = (String, &'static str);

/// Resolves a tree with defaults. Keys with a problem keep their text.
pub(super) fn interpolate(tree: &mut Node, view: &View<'_>) -> Vec<Found> {
    if !has_some(tree) {
        return Vec::new();
    }
    let source = tree.clone();
    let mut pass = Pass { source: &source, left: MAX_VALUES, problems: Vec::new() };
    pass.visit(tree, view, "");
    pass.problems
}

/// Whether text asks for a value.
fn asks(text: &str) -> bool {
    text.contains("${") || text == "???"
}

fn has_some(node: &Node) -> bool {
    match &node.data {
        Data::Scalar { value, .. } => value.as_str().is_some_and(asks),
        Data::List(items) => items.iter().any(has_some),
        Data::Map(entries) => entries.values().any(has_some),
    }
}

struct Pass<'t> {
    source: &'t Node,
    left: usize,
    problems: Vec<Found>,
}

impl Pass<'_> {
    fn visit(&mut self, node: &mut Node, view: &View<'_>, key: &str) {
        let narrowed = narrow(node, view, view.default).map(|(narrowed, _)| narrowed);
        match &mut node.data {
            Data::List(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.visit(item, &view.item(index), &join(key, &index.to_string()));
                }
            }
            Data::Map(entries) => {
                for (name, child) in entries {
                    let place = narrowed.as_ref().and_then(|narrowed| narrowed.child(name));
                    let place = place.unwrap_or_else(|| View::new(&Value::Bool(true)));
                    self.visit(child, &place, &join(key, name));
                }
            }
            Data::Scalar { value: Value::String(text), .. } if asks(text) => {
                let text = std::mem::take(text);
                self.place(node, text, view, key);
            }
            Data::Scalar { .. } => {}
        }
    }

    /// Puts what `text` stands for in the place of `node`.
    fn place(&mut self, node: &mut Node, text: String, view: &View<'_>, key: &str) {
        let origin = node.origin.clone();
        let is_text = !view.allows("object") && !view.allows("array");
        let resolved = self.resolve(&text, is_text, &origin);
        let (what, remedy) = match resolved {
            Ok(resolved) => {
                let mut remarks = Remarks::default();
                *node = Node::scalar(Value::Null, origin);
                merge(node, resolved, view, key, &mut remarks);
                let found = remarks.problems.into_iter();
                return self.problems.extend(found.map(|problem| Found { key: key.to_owned(), problem }));
            }
            Err(fault) => fault,
        };
        let problem = Problem::new(what, remedy);
        let problem = ConfigProblem { key: origin.typed_key(key), origin: origin.label(), problem };
        self.problems.push(Found { key: key.to_owned(), problem });
        *node = Node::scalar(Value::String(text), origin);
    }

    /// What `text` stands for: a value of its own type if it is one `${..}` alone.
    fn resolve(&mut self, text: &str, is_text: bool, origin: &Origin) -> Result<Node, Fault> {
        let trimmed = text.trim();
        if trimmed == "???" {
            return Err(("`???` stands for a value that is still to come".to_owned(), "give a value"));
        }
        let alone = trimmed.strip_prefix("${").filter(|rest| closing(rest) == Some(rest.len() - 1));
        let Some(inner) = alone else {
            let text = self.text(text, &mut Vec::new())?;
            return Ok(Node::scalar(Value::String(text), origin.clone()));
        };
        let found = self.value(&inner[..inner.len() - 1], &mut Vec::new())?;
        match found.as_str() {
            Some(text) => read_value(text, is_text, origin).map_err(|problem| {
                let what = format!("`{text}` cannot be read: {}", problem.problem.what);
                (what, "give a value")
            }),
            None => Ok(Node { origin: origin.clone(), ..found }),
        }
    }

    /// The text with values in it. `open` has the keys that ask for it.
    fn text(&mut self, text: &str, open: &mut Vec<String>) -> Result<String, Fault> {
        let (mut out, mut rest) = (String::new(), text);
        while let Some(at) = rest.find("${") {
            let inner = &rest[at + 2..];
            if let Some(before) = rest[..at].strip_suffix('\\') {
                out.extend([before, "${"]);
                rest = inner;
                continue;
            }
            let Some(end) = closing(inner) else {
                return Err((format!("`{text}` has `${{` without `}}`"), "close it, or write \\${ for text"));
            };
            out.push_str(&rest[..at]);
            let value = self.value(&inner[..end], open)?;
            match &value.data {
                Data::Scalar { value: Value::String(text), .. } => out.push_str(text),
                Data::Scalar { text: Some(text), .. } => out.push_str(text),
                _ => out.push_str(&value.to_value().to_string()),
            }
            if out.len() > MAX_TEXT {
                return Err((
                    format!("it becomes a text of more than {MAX_TEXT} bytes"),
                    "give a shorter one",
                ));
            }
            rest = &inner[end + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    /// The value of what stands between `${` and `}`.
    fn value(&mut self, inner: &str, open: &mut Vec<String>) -> Result<Node, Fault> {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 || open.len() > MAX_DEPTH {
            let what = format!("more than {MAX_VALUES} values, or {MAX_DEPTH} that refer to each other");
            return Err((what, "write the values themselves"));
        }
        let inner = self.text(inner, open)?;
        let inner = inner.trim();
        let of_text = |text: &str| Node::scalar(Value::String(text.to_owned()), Origin::Default);
        if let Some(rest) = inner.strip_prefix("oc.env:") {
            let (name, default) =
                rest.split_once(',').map_or((rest, None), |(name, rest)| (name, Some(rest)));
            let default = default.map(|text| unquoted(text.trim()).to_owned());
            return match env::var(name.trim()).ok().or(default) {
                Some(text) => Ok(of_text(&text)),
                None => Err((
                    format!("`${{{inner}}}`: the environment variable `{}` is not set", name.trim()),
                    "set it, or give a default: ${oc.env:NAME,default}",
                )),
            };
        }
        if inner.contains(':') || inner.starts_with('.') || inner.is_empty() {
            let remedy =
                "write ${oc.env:NAME,default}, ${trainer.max_epochs} with the whole key, or the value itself";
            return Err((format!("`${{{inner}}}` has no meaning here"), remedy));
        }
        let found = inner.split('.').try_fold(self.source, |node, part| match &node.data {
            Data::List(items) => items.get(part.parse::<usize>().ok()?),
            _ => node.get(part),
        });
        let Some(found) = found else {
            return Err((format!("`${{{inner}}}`: there is no key `{inner}`"), "check the whole key"));
        };
        if open.iter().any(|key| key == inner) {
            return Err((format!("`${{{inner}}}` refers to itself"), "give one of the keys a value"));
        }
        match &found.data {
            Data::Scalar { value: Value::String(text), .. } if text == "???" => {
                Err((format!("`{inner}` is `???`, a value that is still to come"), "give it a value"))
            }
            Data::Scalar { value: Value::String(text), .. } => {
                open.push(inner.to_owned());
                let text = self.text(text, open)?;
                open.pop();
                Ok(of_text(&text))
            }
            Data::Scalar { .. } => Ok(found.clone()),
            _ => Err((format!("`{inner}` is not one value"), "name one of the values below it")),
        }
    }
}

/// Where the `}` is that ends a `${` before the text.
fn closing(text: &str) -> Option<usize> {
    let mut open = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' if text[..at].ends_with('$') => open += 1,
            b'}' if open == 0 => return Some(at),
            b'}' => open -= 1,
            _ => {}
        }
    }
    None
}

fn unquoted(text: &str) -> &str {
    let within = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    within('"').or_else(|| within('\'')).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};

    use crate::config::Layers;

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    struct Run {
        epochs: u64,
        root: String,
        name: Option<String>,
        logs: Vec<String>,
        fast: bool,
    }

    fn load(text: &str) -> Result<Run, String> {
        let mut layers = Layers::of::<Run>();
        layers.text("run.yaml", text);
        layers.load::<Run>().map(|loaded| loaded.value).map_err(|error| error.to_string())
    }

    #[test]
    fn values_stand_in_the_place_of_what_refers_to_them() {
        let home = std::env::var("HOME").unwrap();
        let run = load(
            "epochs: ${oc.env:VOLTAIC_NO_SUCH,3}\n\
             root: ${oc.env:HOME}/runs\n\
             name: ${oc.env:VOLTAIC_NO_SUCH,${oc.env:VOLTAIC_NONE,'1.10'}}\n\
             logs: ['${root}/logs', 'e${epochs}', '\\${root}', 'a}b']\n\
             fast: ${oc.env:VOLTAIC_NO_SUCH,true}\n",
        )
        .unwrap();
        let logs = [format!("{home}/runs/logs"), "e3".to_owned(), "${root}".to_owned(), "a}b".to_owned()];
        let expected = Run {
            epochs: 3,
            root: format!("{home}/runs"),
            name: Some("1.10".to_owned()),
            logs: logs.into(),
            fast: true,
        };
        assert_eq!(run, expected);
        assert_eq!(load("name: ${oc.env:VOLTAIC_NO_SUCH,null}").unwrap().name, None);
        assert_eq!(load("epochs: 7\nname: ${epochs}").unwrap().name.as_deref(), Some("7"));
    }

    #[test]
    fn what_has_no_value_is_named_once_with_its_line() {
        for (text, expected) in [
            (
                "\nepochs: ???",
                "epochs (from run.yaml:2): `???` stands for a value that is still to come; give a value",
            ),
            ("epochs: ${oc.env:VOLTAIC_NO_SUCH}", "the environment variable `VOLTAIC_NO_SUCH` is not set"),
            ("root: ${epoch}/x", "there is no key `epoch`"),
            ("root: ${now:%Y}", "`${now:%Y}` has no meaning here"),
            ("root: ${logs}", "`logs` is not one value"),
            ("root: ${name}\nname: ${root}", "refers to itself"),
            ("root: ${name", "has `${` without `}`"),
            ("root: ${name}\nname: ???", "`name` is `???`"),
            ("epochs: ${oc.env:VOLTAIC_NO_SUCH,many}", "epochs (from run.yaml:1): `many` is text"),
        ] {
            let error = load(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
            assert_eq!(error.matches("epochs (").count(), usize::from(text.contains("epochs:")), "{error}");
        }
    }

    #[test]
    fn texts_that_grow_without_end_are_refused() {
        let mut text = "root: '${a0}'\n".to_owned();
        for n in 0..40 {
            text += &format!("a{n}: '${{a{}}}${{a{}}}'\n", n + 1, n + 1);
        }
        text += "a40: ''\n";
        let error = load(&text).unwrap_err();
        assert!(error.contains("that refer to each other"), "{error}");
    }
}
