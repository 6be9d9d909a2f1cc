//! File name templates such as `{epoch:02d}-{val_loss:.2f}`.

use std::path::Path;

/// One piece of a template.
#[derive(Debug, Clone, PartialEq)]
enum Piece {
    Text(String),
    Field { name: String, format: Format },
}

/// How a field's value is written: `[0][width][.precision][type]` of Python's format language.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Format {
    zero_padded: bool,
    width: usize,
    precision: Option<usize>,
    kind: Kind,
}

/// The type at the end of a format.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum Kind {
    /// None: a count as it is, a metric as Python writes it.
    #[default]
    Any,
    /// `d`.
    Integer,
    /// `f`.
    Fixed,
    /// `e`.
    Exponent,
    /// `g`.
    General,
    /// `%`.
    Percent,
}

/// Larger widths and precisions do not fit into the name of a file.
const MAX_WIDTH: usize = 100;

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
    let unknown =
        || format!("the format `{text}` is not understood: it is [0][width][.precision][d, f, e, g or %]");
    let (sizes, kind) = match text.char_indices().last() {
        Some((at, 'd')) => (&text[..at], Kind::Integer),
        Some((at, 'f')) => (&text[..at], Kind::Fixed),
        Some((at, 'e')) => (&text[..at], Kind::Exponent),
        Some((at, 'g')) => (&text[..at], Kind::General),
        Some((at, '%')) => (&text[..at], Kind::Percent),
        _ => (text, Kind::Any),
    };
    let size = |digits: &str| {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(unknown());
        }
        let size = digits.parse().ok().filter(|size| *size <= MAX_WIDTH);
        size.ok_or_else(|| format!("{digits} in the format `{text}` is above {MAX_WIDTH}"))
    };
    let (width, precision) = match sizes.split_once('.') {
        Some(_) if kind == Kind::Integer => {
            return Err(format!("an integer has no precision, as in `{text}`"));
        }
        Some((width, precision)) => (width, Some(size(precision)?)),
        None => (sizes, None),
    };
    let zero_padded = width.len() > 1 && width.starts_with('0');
    let width = if width.is_empty() { 0 } else { size(width)? };
    Ok(Format { zero_padded, width, precision, kind })
}

impl Format {
    fn apply(self, value: &Value) -> String {
        let number = match *value {
            Value::Count(count) => count as f64,
            Value::Metric(metric) => metric,
        };
        let precision = self.precision.unwrap_or(6);
        let text = match (self.kind, value, self.precision) {
            (Kind::Any, Value::Count(count), _) | (Kind::Integer, Value::Count(count), None) => {
                count.to_string()
            }
            (Kind::Integer, ..) if number.fract() == 0.0 => format!("{number:.0}"),
            (Kind::Any | Kind::Integer, _, None) => as_python(number),
            (Kind::Any, ..) => general(number, precision.max(1), true),
            (Kind::Fixed | Kind::Integer, ..) => format!("{number:.precision$}"),
            (Kind::Exponent, ..) => with_exponent(number, precision),
            (Kind::General, ..) => general(number, precision.max(1), false),
            (Kind::Percent, ..) => format!("{:.precision$}%", number * 100.0),
        };
        let text = text.to_lowercase(); // nan, inf
        let width = self.width;
        match text.strip_prefix('-') {
            Some(digits) if self.zero_padded => format!("-{digits:0>0$}", width.saturating_sub(1)),
            _ if self.zero_padded => format!("{text:0>width$}"),
            _ => format!("{text:>width$}"),
        }
    }
}

/// `1.50e-07`: the exponent has a sign and at least two digits.
fn with_exponent(number: f64, precision: usize) -> String {
    python_exponent(&format!("{number:.precision$e}"))
}

/// Rust's `1.5e-7` as Python's `1.5e-07`.
fn python_exponent(text: &str) -> String {
    let Some((digits, exponent)) = text.split_once('e') else { return text.to_owned() };
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
    format!("{digits}e{sign}{exponent:0>2}")
}

/// With so many significant digits, and an exponent only if the number is very small or has more digits before its point; or as many,
/// if there is to be a point in any case.
fn general(number: f64, digits: usize, has_point: bool) -> String {
    let text = format!("{number:.0$e}", digits - 1);
    let exponent = text.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok());
    let Some(exponent) = exponent else { return text };
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    let last = digits as i32 - 1;
    if (-4..=last - i32::from(has_point)).contains(&exponent) {
        let text = trim(&format!("{number:.0$}", (last - exponent).unsigned_abs() as usize));
        return if has_point && !text.contains('.') { text + ".0" } else { text };
    }
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    python_exponent(&format!("{}e{exponent}", trim(mantissa)))
}

/// A number as Python writes it: `0.0`, `1e-05`.
fn as_python(number: f64) -> String {
    let size = number.abs();
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        return python_exponent(&format!("{number:e}"));
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
    fn a_precision_without_a_type_counts_digits_as_in_python() {
        for (number, format, expected) in [
            (5.0, ".2", "5.0"),
            (0.046_875, ".2", "0.047"),
            (12.0, ".2", "1.2e+01"),
            (12.0, ".3", "12.0"),
            (123_456.0, ".3", "1.23e+05"),
            (0.000_012, ".2", "1.2e-05"),
            (-3.21459, "07.3", "-003.21"),
            (f64::NAN, ".2", "nan"),
        ] {
            let name = FileName::parse(&format!("{{x:{format}}}"), false).expect(format);
            assert_eq!(name.fill(|_| Value::Metric(number)), expected, "{number} {format}");
        }
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
    fn formats_are_those_of_python() {
        let numbers = [0.046_875, -1.5, 123_456_789.0, 1.5e-7, 0.0, f64::NAN, f64::NEG_INFINITY, 99.99];
        // (format, what Python writes for each number)
        for (format, expected) in [
            ("f", "0.046875 -1.500000 123456789.000000 0.000000 0.000000 nan -inf 99.990000"),
            ("e", "4.687500e-02 -1.500000e+00 1.234568e+08 1.500000e-07 0.000000e+00 nan -inf 9.999000e+01"),
            ("g", "0.046875 -1.5 1.23457e+08 1.5e-07 0 nan -inf 99.99"),
            (".3g", "0.0469 -1.5 1.23e+08 1.5e-07 0 nan -inf 100"),
            (".10g", "0.046875 -1.5 123456789 1.5e-07 0 nan -inf 99.99"),
            (".0g", "0.05 -2 1e+08 1e-07 0 nan -inf 1e+02"),
            (".2e", "4.69e-02 -1.50e+00 1.23e+08 1.50e-07 0.00e+00 nan -inf 1.00e+02"),
            (".1%", "4.7% -150.0% 12345678900.0% 0.0% 0.0% nan% -inf% 9999.0%"),
            ("08.3f", "0000.047 -001.500 123456789.000 0000.000 0000.000 00000nan -0000inf 0099.990"),
        ] {
            let format = parse_format(format).expect(format);
            let written: Vec<String> = numbers.iter().map(|x| format.apply(&Value::Metric(*x))).collect();
            assert_eq!(written.join(" "), expected, "{format:?}");
        }
        for (format, expected) in
            [("05d", "00018"), (".3g", "18"), (".2e", "1.80e+01"), (".1%", "1800.0%"), ("6.2f", " 18.00")]
        {
            let format = parse_format(format).expect(format);
            assert_eq!(format.apply(&Value::Count(18)), expected, "{format:?}");
        }
    }

    #[test]
    fn broken_templates_are_explained() {
        for template in ["", "{epoch", "epoch}", "{}", "{epoch:x}", "{x:.f}", "{x:.2dd}", "{x:.2d}", "{x:+5}"]
        {
            assert!(FileName::parse(template, true).is_err(), "{template}");
        }
        for format in ["999999999d", "101", ".101f", "99999999999999999999999"] {
            let error = FileName::parse(&format!("{{step:{format}}}"), true).expect_err(format);
            assert!(error.contains("is above 100"), "{error}");
        }
    }
}
