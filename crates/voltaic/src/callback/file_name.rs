//! File name templates such as `{epoch:02d}-{val_loss:.2f}`.

use std::path::Path;

/// One piece of a template.
#[derive(Debug, Clone, PartialEq)]
enum Piece {
    Text(String),
    Field { name: String, format: Format },
}

/// How a field's value is written: the part of Python's format language that file names use.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Format {
    zero_padded: bool,
    width: usize,
    precision: Option<usize>,
}

/// A value to be put into a name.
pub(super) enum Value {
    /// Epochs and steps.
    Count(u64),
    /// Anything logged.
    Metric(f64),
}

/// A parsed template.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FileName {
    pieces: Vec<Piece>,
    inserts_names: bool,
}

impl FileName {
    /// Parses a template; the error says what is wrong.
    pub(super) fn parse(template: &str, inserts_names: bool) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut rest = template;
        while let Some(open) = rest.find('{') {
            let close = rest[open..].find('}').ok_or("a `{` is never closed")? + open;
            if open > 0 {
                pieces.push(Piece::Text(rest[..open].to_owned()));
            }
            let field = &rest[open + 1..close];
            let (name, format) = field.split_once(':').unwrap_or((field, ""));
            if name.is_empty() {
                return Err("a field has no name".to_owned());
            }
            pieces.push(Piece::Field { name: name.to_owned(), format: parse_format(format)? });
            rest = &rest[close + 1..];
        }
        if rest.contains('}') {
            return Err("a `}` was never opened".to_owned());
        }
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest.to_owned()));
        }
        if pieces.is_empty() {
            return Err("it is empty".to_owned());
        }
        Ok(Self { pieces, inserts_names })
    }

    /// The name with the values that `value` gives for the fields.
    pub(super) fn fill(&self, value: impl Fn(&str) -> Value) -> String {
        let mut filled = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => filled.push_str(text),
                Piece::Field { name, format } => {
                    if self.inserts_names {
                        filled.push_str(name);
                        filled.push('=');
                    }
                    filled.push_str(&format.apply(&value(name)));
                }
            }
        }
        filled.replace('/', "_") // a metric called val/loss must not make a folder
    }
}

/// Whether a file is called `last.ckpt` or `last-v1.ckpt` and so on.
pub(super) fn is_last_name(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".ckpt"));
    let version = name.and_then(|name| name.strip_prefix("last"));
    version.is_some_and(|text| {
        let number = text.strip_prefix("-v").unwrap_or_default();
        text.is_empty() || (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

fn parse_format(text: &str) -> Result<Format, String> {
    let unknown = || format!("the format `{text}` is not understood");
    let digits = text.trim_end_matches(['d', 'f']);
    let (width, precision) = match digits.split_once('.') {
        Some((width, precision)) => (width, Some(precision.parse().map_err(|_| unknown())?)),
        None => (digits, None),
    };
    let zero_padded = width.len() > 1 && width.starts_with('0');
    let width = if width.is_empty() { 0 } else { width.parse().map_err(|_| unknown())? };
    Ok(Format { zero_padded, width, precision })
}

impl Format {
    fn apply(self, value: &Value) -> String {
        let text = match (value, self.precision) {
            (Value::Count(count), None) => count.to_string(),
            (Value::Count(count), Some(precision)) => format!("{:.precision$}", *count as f64),
            (Value::Metric(metric), Some(precision)) => format!("{metric:.precision$}").to_lowercase(), // nan, inf
            (Value::Metric(metric), None) => as_python(*metric),
        };
        let width = self.width;
        if self.zero_padded { format!("{text:0>width$}") } else { format!("{text:>width$}") }
    }
}

/// A number as Python writes it: `0.0`, `1e-05`.
fn as_python(number: f64) -> String {
    let size = number.abs();
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{number:?}") // with a point in any case
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(template: &str, inserts_names: bool) -> String {
        FileName::parse(template, inserts_names).expect(template).fill(|name| match name {
            "epoch" => Value::Count(2),
            "step" => Value::Count(18),
            _ => Value::Metric(0.046_875),
        })
    }

    #[test]
    fn fields_are_filled_as_lightning_fills_them() {
        assert_eq!(fill("{epoch}-{step}", true), "epoch=2-step=18");
        assert_eq!(fill("{epoch:02d}-{val_loss:.2f}", true), "epoch=02-val_loss=0.05");
        assert_eq!(fill("e{epoch}-v{val_loss:.3f}", false), "e2-v0.047");
        assert_eq!(fill("{val/loss:.1f}", true), "val_loss=0.0");
        assert_eq!(fill("const", true), "const");
    }

    #[test]
    fn numbers_without_a_format_are_written_as_python_writes_them() {
        let cases = [
            (0.0, "0.0"),
            (3.0, "3.0"),
            (-0.375, "-0.375"),
            (0.0001, "0.0001"),
            (1e-5, "1e-05"),
            (-1.5e-7, "-1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (2.5e100, "2.5e+100"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (number, text) in cases {
            assert_eq!(as_python(number), text);
        }
    }

    #[test]
    fn broken_templates_are_explained() {
        for template in ["", "{epoch", "epoch}", "{}", "{epoch:x}"] {
            assert!(FileName::parse(template, true).is_err(), "{template}");
        }
    }
}
