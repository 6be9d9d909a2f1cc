//! What must be the same on all ranks, and the error for a difference.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Longest value that a message shows.
const SHOWN: usize = 120;
/// Most differences that a message names.
const NAMED: usize = 8;
/// Words in keys whose values are secret.
const SECRET: [&str; 9] =
    ["secret", "token", "password", "passwd", "pass", "apikey", "key", "credential", "credentials"];

/// What must be the same on all ranks: values by key, in order. Keys are those of the configuration where there is one.
///
/// Values of keys that name a secret are never kept, only compared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Facts(Vec<(String, String)>);

impl Facts {
    /// Adds a value.
    pub fn add(&mut self, key: impl Into<String>, value: impl Display) {
        let (key, value) = (key.into(), value.to_string());
        let value = if is_secret(&key, &value) { fingerprint(&value) } else { without_password(&value) };
        self.0.push((key, value));
    }

    /// Adds what a JSON value holds, one fact for each leaf, below `key`. Null adds nothing.
    pub fn add_json(&mut self, key: &str, value: &Value) {
        match value {
            Value::Null => {}
            Value::Object(members) => {
                members.iter().for_each(|(name, value)| self.add_json(&format!("{key}.{name}"), value));
            }
            Value::Array(members) if members.iter().any(|member| member.is_object() || member.is_array()) => {
                let numbered = members.iter().enumerate();
                numbered.for_each(|(index, value)| self.add_json(&format!("{key}.{index}"), value));
            }
            Value::String(text) => self.add(key, text),
            value => self.add(key, value),
        }
    }

    /// Adds all of `other`.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The same for equal facts alone.
    pub(super) fn digest(&self) -> [u8; 32] {
        let mut hasher = Sha256::new();
        for text in self.0.iter().flat_map(|(key, value)| [key, value]) {
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.finalize().into()
    }

    fn by_key(&self) -> HashMap<&str, &str> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }
}

/// How other ranks, each with its number, differ from rank 0; none if they differ only in what is allowed to.
///
/// `allowed` has keys, each for itself and for those below it: `trainer` stands for `trainer.max_time` too.
pub(super) fn differences(first: &Facts, others: &[(usize, Facts)], allowed: &[String]) -> Option<String> {
    let of_first = first.by_key();
    let (mut differing, mut named) = (Vec::new(), HashSet::new());
    for (rank, other) in others.iter().filter(|(_, other)| other != first) {
        let of_other = other.by_key();
        for (key, _) in first.0.iter().chain(&other.0) {
            let [own, its] = [&of_first, &of_other].map(|facts| facts.get(key.as_str()).copied());
            if own == its || allowed.iter().any(|allowed| covers(allowed, key)) || !named.insert(key) {
                continue;
            }
            if differing.len() < NAMED {
                let (key, own, its) = (shown(Some(key)), shown(own), shown(its));
                differing.push(format!("{key} is {own} on rank 0 and {its} on rank {rank}"));
            }
        }
    }
    let more = match named.len() - differing.len() {
        0 => String::new(),
        more => format!("; {more} more"),
    };
    (!differing.is_empty()).then(|| format!("{}{more}", differing.join("; ")))
}

fn covers(allowed: &str, key: &str) -> bool {
    key.strip_prefix(allowed).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn shown(value: Option<&str>) -> String {
    match value {
        None => "nothing".to_owned(),
        Some("") => "empty".to_owned(),
        Some(value) => {
            let short: String = value.chars().take(SHOWN).flat_map(char::escape_debug).collect();
            if value.chars().nth(SHOWN).is_some() { format!("{short}...") } else { short }
        }
    }
}

/// A number of tokens or a place among keys is none.
fn is_secret(key: &str, value: &str) -> bool {
    let last = key.rsplit('.').find(|part| part.parse::<usize>().is_err()).unwrap_or_default().to_lowercase();
    let mut words = last.split(|c: char| !c.is_alphanumeric());
    words.any(|word| SECRET.contains(&word.strip_suffix('s').unwrap_or(word)) || SECRET.contains(&word))
        && value.parse::<f64>().is_err()
}

/// Tells values apart, and says nothing of them.
fn fingerprint(value: &str) -> String {
    let digest = Sha256::digest(value.as_bytes());
    format!("(hidden, {:02x}{:02x})", digest[0], digest[1])
}

/// The text without what stands before the `@` of an address.
fn without_password(value: &str) -> String {
    let hidden = value.split_once("://").and_then(|(scheme, rest)| {
        let end = rest.find('/').unwrap_or(rest.len());
        let at = rest[..end].rfind('@')?;
        Some(format!("{scheme}://(hidden)@{}", &rest[at + 1..]))
    });
    hidden.unwrap_or_else(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn facts(pairs: &[(&str, &str)]) -> Facts {
        let mut facts = Facts::default();
        pairs.iter().for_each(|(key, value)| facts.add(*key, value));
        facts
    }

    #[test]
    fn differences_name_the_key_both_values_and_both_ranks() {
        let first = facts(&[("trainer.precision", "32-true"), ("seed", "1"), ("only.first", "a")]);
        let other = facts(&[("trainer.precision", "bf16-mixed"), ("seed", "2"), ("only.other", "b")]);
        let all = [(1, first.clone()), (2, other.clone()), (3, other)];
        let expected = "trainer.precision is 32-true on rank 0 and bf16-mixed on rank 2; seed is 1 on rank 0 and 2 on \
                        rank 2; only.first is a on rank 0 and nothing on rank 2; only.other is nothing on rank 0 and b \
                        on rank 2";
        assert_eq!(differences(&first, &all, &[]).as_deref(), Some(expected));
        let allowed = ["trainer", "seed", "only.first", "only.other"].map(str::to_owned);
        assert_eq!(differences(&first, &all, &allowed), None);
        assert!(differences(&first, &all, &["see".to_owned()]).unwrap().contains("seed is 1"));
        assert_eq!(differences(&first, &[(1, first.clone())], &[]), None);
        assert_eq!(differences(&first, &[], &[]), None);
    }

    #[test]
    fn secrets_are_compared_but_not_shown() {
        let with = |secret: &str| {
            let mut facts = Facts::default();
            let url = format!("https://me:{secret}@host/path");
            facts.add_json(
                "module",
                &json!({"api_key": secret, "tokens": [secret], "max_tokens": 8, "url": url, "lr": 0.5}),
            );
            facts
        };
        let all = [with("correct-horse"), with("battery-staple")];
        let differing = differences(&all[0], &[(1, all[1].clone())], &[]).unwrap();
        assert!(differing.contains("module.api_key is (hidden, "), "{differing}");
        let sent = serde_json::to_string(&all[0]).unwrap();
        for text in [differing, sent, format!("{all:?}")] {
            assert!(!text.contains("horse") && !text.contains("staple"), "{text}");
        }
    }

    #[test]
    fn a_message_stays_short_and_on_one_line() {
        let many = |value: &str| {
            let mut facts = Facts::default();
            (0..100).for_each(|n| facts.add(format!("key{n}"), value.repeat(1000)));
            facts
        };
        let differing = differences(&many("a\n"), &[(1, many("b"))], &[]).unwrap();
        assert!(
            differing.len() < 4000 && differing.ends_with("; 92 more") && !differing.contains('\n'),
            "{differing}"
        );
    }

    #[test]
    fn equal_digests_are_equal_facts() {
        assert_eq!(facts(&[("a", "b")]).digest(), facts(&[("a", "b")]).digest());
        assert_ne!(facts(&[("a", "bc")]).digest(), facts(&[("ab", "c")]).digest());
    }
}
