//! Characters as numbers.

use crate::Result;
use crate::error::{DataError, Problem};

/// Text as the tokens of a model, and back.
pub trait Tokenizer: Send + Sync {
    /// Number of different tokens; they are the numbers below it.
    fn vocab_size(&self) -> i64;

    /// The tokens of `text`.
    ///
    /// # Errors
    /// If there is none for a part of it.
    fn encode(&self, text: &str) -> Result<Vec<i64>>;

    /// The text of `tokens`.
    ///
    /// # Errors
    /// If there is no such token.
    fn decode(&self, tokens: &[i64]) -> Result<String>;
}

/// Marks a code point that is not in the vocabulary.
const ABSENT: u16 = u16::MAX;

/// The different characters of a text, in the order of their code points; a character's place is its token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CharVocabulary {
    chars: Vec<char>,
    /// Token by code point, up to the largest that occurs.
    tokens: Vec<u16>,
}

impl CharVocabulary {
    /// The vocabulary of `text`.
    ///
    /// # Errors
    /// [`DataError::Text`] if there is no character, or 65,536 different ones or more.
    pub fn of(text: &str) -> Result<Self> {
        let mut occurs = Vec::new();
        for char in text.chars() {
            let code = char as usize;
            if code >= occurs.len() {
                occurs.resize(code + 1, false);
            }
            occurs[code] = true;
        }
        let codes = (0_u32..).zip(occurs).filter_map(|(code, occurs)| occurs.then_some(code));
        Self::from_chars(codes.filter_map(char::from_u32).collect())
    }

    /// The vocabulary whose token `i` is `chars[i]`, such as one kept in a checkpoint.
    ///
    /// # Errors
    /// [`DataError::Text`] if there is no character, 65,536 or more, or one occurs twice.
    pub fn from_chars(chars: Vec<char>) -> Result<Self> {
        let error =
            |what: String, remedy: &'static str| DataError::Text { problem: Problem::new(what, remedy) };
        let Some(&largest) = chars.iter().max() else {
            return Err(
                error("a vocabulary of no characters".to_owned(), "give a text that is not empty").into()
            );
        };
        let mut tokens = vec![ABSENT; largest as usize + 1];
        for (place, &char) in chars.iter().enumerate() {
            let Some(token) = u16::try_from(place).ok().filter(|&token| token != ABSENT) else {
                let what = format!("a vocabulary of {} characters", chars.len());
                return Err(error(what, "give a text with less than 65536 different characters").into());
            };
            if std::mem::replace(&mut tokens[char as usize], token) != ABSENT {
                return Err(error(
                    format!("{char:?} is in the vocabulary twice"),
                    "name each character once",
                )
                .into());
            }
        }
        Ok(Self { chars, tokens })
    }

    /// Number of characters.
    pub fn len(&self) -> usize {
        self.chars.len()
    }

    /// Never true: a vocabulary has at least one character.
    pub fn is_empty(&self) -> bool {
        self.chars.is_empty()
    }

    /// The characters in the order of their tokens.
    pub fn chars(&self) -> &[char] {
        &self.chars
    }

    /// The tokens of `text`.
    ///
    /// # Errors
    /// [`DataError::Text`] names the first character that the vocabulary lacks, and its place.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        Ok(self.encode_u16(text)?.into_iter().map(i64::from).collect())
    }

    pub(super) fn encode_u16(&self, text: &str) -> Result<Vec<u16>> {
        let encode = |(place, char)| {
            self.tokens.get(char as usize).copied().filter(|&token| token != ABSENT).ok_or_else(|| {
                DataError::Text { problem: Problem::new(format!(
                        "character {char:?} at place {place} of the text is not one of the {} of the vocabulary",
                        self.len()
                    ), "leave it out, or make the vocabulary from a text that holds it") }
                .into()
            })
        };
        text.chars().enumerate().map(encode).collect()
    }

    /// The text of `tokens`.
    ///
    /// # Errors
    /// [`DataError::Text`] names the first token that is not below [`CharVocabulary::len`], and its place.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        let decode = |(place, &token): (usize, &i64)| {
            usize::try_from(token).ok().and_then(|token| self.chars.get(token)).copied().ok_or_else(|| {
                DataError::Text {
                    problem: Problem::new(
                        format!("token {token} at place {place} is not a character of the vocabulary"),
                        format!("tokens are 0 to {}", self.len() - 1),
                    ),
                }
                .into()
            })
        };
        tokens.iter().enumerate().map(decode).collect()
    }
}

impl Tokenizer for CharVocabulary {
    fn vocab_size(&self) -> i64 {
        self.len() as i64
    }

    fn encode(&self, text: &str) -> Result<Vec<i64>> {
        self.encode(text)
    }

    fn decode(&self, tokens: &[i64]) -> Result<String> {
        self.decode(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_and_decoding_are_inverse() {
        let vocabulary = CharVocabulary::of("hello\nwörld").unwrap();
        assert_eq!(vocabulary.chars(), ['\n', 'd', 'e', 'h', 'l', 'o', 'r', 'w', 'ö']);
        let tokens = vocabulary.encode("how\ndö").unwrap();
        assert_eq!(tokens, [3, 5, 7, 0, 1, 8]);
        assert_eq!(vocabulary.decode(&tokens).unwrap(), "how\ndö");
        assert_eq!(CharVocabulary::from_chars(vocabulary.chars().to_vec()).unwrap(), vocabulary);
    }

    #[test]
    fn what_is_not_in_it_is_named() {
        let vocabulary = CharVocabulary::of("abc").unwrap();
        let error = vocabulary.encode("abxc").unwrap_err().to_string();
        assert!(error.contains("'x' at place 2") && error.contains("; "), "{error}");
        for token in [3, -1] {
            let error = vocabulary.decode(&[0, token]).unwrap_err().to_string();
            assert!(error.contains(&format!("token {token} at place 1")), "{error}");
        }
        assert!(CharVocabulary::of("").is_err());
        assert!(CharVocabulary::from_chars(vec!['a', 'b', 'a']).is_err());
        let all: Vec<char> = (0..=0x10_ffff).filter_map(char::from_u32).collect();
        assert_eq!(
            CharVocabulary::from_chars(all[..65_535].to_vec()).unwrap().encode("a\0").unwrap(),
            [97, 0]
        );
        assert!(CharVocabulary::from_chars(all[..65_536].to_vec()).is_err());
    }
}
