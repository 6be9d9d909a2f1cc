//! Text of files and strangers, as it may be shown on a terminal.

use std::borrow::Cow;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_long_texts_cut() {
        assert_eq!(printable("a\x1b]0;b\x07\n\u{9b}1mc\té"), "a\\u{1b}]0;b\\u{7}\n\\u{9b}1mc\té");
        assert!(matches!(printable("plain ä\n"), Cow::Borrowed(_)));
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(shortened("äöüx", 3), "äöü... (7 bytes)");
    }
}
