//! Text of files and strangers, as it may be shown on a terminal.

use std::borrow::Cow;

/// Characters that a list shows of a name.
const MAX_NAME: usize = 200;

/// The text with escapes in place of control characters, which would change the terminal. Lines and tabs stay.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let is_harmless = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    if text.chars().all(is_harmless) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match is_harmless(c) {
            true => shown.push(c),
            false => shown.extend(c.escape_default()),
        }
    }
    Cow::Owned(shown)
}

/// The beginning of a text that is longer than so many characters, and how long it is.
pub(crate) fn shortened(text: &str, limit: usize) -> Cow<'_, str> {
    match text.char_indices().nth(limit) {
        Some((end, _)) => Cow::Owned(format!("{}... ({} bytes)", &text[..end], text.len())),
        None => Cow::Borrowed(text),
    }
}

/// So many of the texts, which are shortened, and how many there are besides.
pub(crate) fn first_of(texts: &[impl AsRef<str>], count: usize) -> String {
    let shown = texts.iter().take(count).map(|text| shortened(text.as_ref(), MAX_NAME));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match texts.len().saturating_sub(count) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_long_texts_cut() {
        assert_eq!(printable("a\x1b]0;b\x07\n\u{9b}1mc\té"), "a\\u{1b}]0;b\\u{7}\n\\u{9b}1mc\té");
        assert!(matches!(printable("plain ä\n"), Cow::Borrowed(_)));
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(shortened("äöüx", 3), "äöü... (7 bytes)");
        let long = "n".repeat(1 << 20);
        assert_eq!(first_of(&["a", "b", "c"], 2), "a, b and 1 more");
        assert!(first_of(&["a", &long], 2).len() < 250);
        let problem = crate::error::Problem::new(format!("no {long}"), "give another");
        let text = problem.to_string();
        assert!(text.len() < 5_000 && text.ends_with("... (1048579 bytes); give another"), "{}", text.len());
    }
}
