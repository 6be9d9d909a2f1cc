//! Texts and errors by their words.

/// Asserts that a text has these words.
macro_rules! assert_contains {
    ($text:expr, $($words:expr),+ $(,)?) => {{
        let text = $text;
        $(assert!(text.contains($words), "{text}\nlacks {}", $words);)+
    }};
}

/// Asserts that a result is an error whose message has these words: `assert_error!(net.forward(&x), "shape [2, 3]", "give [2, 4]")`.
macro_rules! assert_error {
    ($result:expr, $($words:expr),+ $(,)?) => {
        assert_contains!($result.err().expect("an error").to_string(), $($words),+)
    };
}
