//! Reads the keys of a section, one after the other, and says what is wrong with them and what has no effect.

use super::document::{Data, Entry};
use crate::config::nearest;
use crate::error::{ConfigProblem, Problem};

/// What a file says that must be told to the user.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// The file's name in errors; empty if the settings were given otherwise.
    pub path: String,
    pub problems: Vec<ConfigProblem>,
    /// Keys that have no effect, a sentence each.
    pub notes: Vec<String>,
    /// Keys that DeepSpeed does not have, and ignores; mistakes, if there are others.
    pub unknown: Vec<ConfigProblem>,
}

/// A section whose keys are read.
pub(super) struct Section<'a> {
    /// Its dotted key.
    at: String,
    entries: &'a [(String, Entry)],
    /// Keys that were asked for, so that the others are unknown.
    known: Vec<&'static str>,
}

/// Word that leaves a key to its default, as in files for Hugging Face.
const AUTO: &str = "auto";

impl<'a> Section<'a> {
    pub fn new(at: &str, entries: &'a [(String, Entry)]) -> Self {
        Self { at: at.to_owned(), entries, known: Vec::new() }
    }

    pub fn key(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_owned() } else { format!("{}.{key}", self.at) }
    }

    /// A value, unless it is absent, `null` or `auto`.
    pub fn get(&mut self, key: &'static str) -> Option<&'a Entry> {
        self.known.push(key);
        let (_, entry) = self.entries.iter().find(|(name, _)| name == key)?;
        let is_open = entry.data == Data::Null || matches!(&entry.data, Data::Text(text) if text == AUTO);
        (!is_open).then_some(entry)
    }

    /// A value under one of two names, of which the second one is older.
    pub fn get_either(
        &mut self,
        found: &mut Findings,
        key: &'static str,
        old: &'static str,
    ) -> Option<&'a Entry> {
        let (new, old_value) = (self.get(key), self.get(old));
        if let (Some(_), Some(second)) = (new, old_value) {
            self.refuse(
                found,
                old,
                second,
                format!("is given beside {key}, which is the same"),
                "remove one of the two",
            );
        }
        new.or(old_value)
    }

    pub fn refuse(
        &self,
        found: &mut Findings,
        key: &str,
        entry: &Entry,
        what: String,
        remedy: impl Into<std::borrow::Cow<'static, str>>,
    ) {
        let origin = if entry.line == 0 { String::new() } else { format!("{}:{}", found.path, entry.line) };
        found.problems.push(ConfigProblem {
            key: self.key(key),
            origin,
            problem: Problem::new(what, remedy),
        });
    }

    /// Says that a key has no effect.
    pub fn note(&self, found: &mut Findings, key: &str, why: &str) {
        found.notes.push(format!("{} has no effect: {why}", self.key(key)));
    }

    fn wrong(&self, found: &mut Findings, key: &str, entry: &Entry, wanted: &str) {
        self.refuse(found, key, entry, format!("{} is not {wanted}", entry.shown()), format!("set {wanted}"));
    }

    pub fn flag(&mut self, found: &mut Findings, key: &'static str, default: bool) -> bool {
        let entry = self.get(key);
        self.as_flag(found, key, entry).unwrap_or(default)
    }

    pub fn as_flag(&self, found: &mut Findings, key: &'static str, entry: Option<&Entry>) -> Option<bool> {
        let entry = entry?;
        match entry.data {
            Data::Bool(flag) => return Some(flag),
            _ => self.wrong(found, key, entry, "true or false"),
        }
        None
    }

    /// A whole number, which may be written `5e8`.
    pub fn count(&mut self, found: &mut Findings, key: &'static str, least: u64) -> Option<u64> {
        let entry = self.get(key);
        self.as_count(found, key, entry, least)
    }

    pub fn as_count(
        &self,
        found: &mut Findings,
        key: &'static str,
        entry: Option<&Entry>,
        least: u64,
    ) -> Option<u64> {
        let entry = entry?;
        if let Data::Number(number) = entry.data
            && number.fract() == 0.0
            && number >= least as f64
            && number <= i64::MAX as f64
        {
            return Some(number as u64);
        }
        self.wrong(found, key, entry, &format!("a whole number from {least} on"));
        None
    }

    /// A number from `least` on.
    pub fn number(&mut self, found: &mut Findings, key: &'static str, least: f64) -> Option<f64> {
        let entry = self.get(key)?;
        match entry.data {
            Data::Number(number) if number >= least => return Some(number),
            _ => self.wrong(found, key, entry, &format!("a number from {least} on")),
        }
        None
    }

    pub fn text(&mut self, found: &mut Findings, key: &'static str) -> Option<&'a str> {
        let entry = self.get(key)?;
        match &entry.data {
            Data::Text(text) => return Some(text),
            _ => self.wrong(found, key, entry, "text"),
        }
        None
    }

    /// A list of texts.
    pub fn texts(&mut self, found: &mut Findings, key: &'static str) -> Option<Vec<String>> {
        let entry = self.get(key)?;
        let text = |entry: &Entry| match &entry.data {
            Data::Text(text) if !text.is_empty() => Some(text.clone()),
            _ => None,
        };
        if let Data::List(entries) = &entry.data
            && let Some(texts) = entries.iter().map(text).collect()
        {
            return Some(texts);
        }
        self.wrong(found, key, entry, "a list of texts");
        None
    }

    /// One of some words; the case does not matter.
    pub fn choice<T: Copy>(
        &mut self,
        found: &mut Findings,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Option<T> {
        let entry = self.get(key)?;
        let chosen = match &entry.data {
            Data::Text(text) => words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text)),
            _ => None,
        };
        if chosen.is_none() {
            let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.wrong(found, key, entry, &format!("one of {}", names.join(", ")));
        }
        chosen.map(|(_, value)| *value)
    }

    /// A section below this one.
    pub fn section(&mut self, found: &mut Findings, key: &'static str) -> Option<Section<'a>> {
        let entry = self.get(key)?;
        match &entry.data {
            Data::Map(entries) => return Some(Section::new(&self.key(key), entries)),
            _ => self.wrong(found, key, entry, "a section"),
        }
        None
    }

    /// Notes keys that DeepSpeed knows and that do nothing here, each if it is given.
    pub fn idle(&mut self, found: &mut Findings, keys: &[&'static str], why: &str) {
        for key in keys {
            if self.get(key).is_some() {
                self.note(found, key, why);
            }
        }
    }

    /// Refuses keys unless they are absent, `false`, 0, null, or a section that is not enabled.
    pub fn refused(&mut self, found: &mut Findings, keys: &[&'static str], what: &str, remedy: &'static str) {
        for key in keys {
            let Some(entry) = self.get(key) else { continue };
            let is_off = match &entry.data {
                Data::Bool(flag) => !flag,
                Data::Number(number) => *number == 0.0,
                Data::Map(entries) => {
                    entries.iter().all(|(name, value)| name != "enabled" || value.data == Data::Bool(false))
                        && entries.iter().any(|(name, _)| name == "enabled")
                }
                _ => false,
            };
            if !is_off {
                self.refuse(found, key, entry, what.to_owned(), remedy);
            }
        }
    }

    fn unknown(&self) -> impl Iterator<Item = &'a (String, Entry)> {
        self.entries.iter().filter(|(name, _)| !self.known.contains(&name.as_str()))
    }

    fn hint(&self, name: &str) -> Option<&'static str> {
        nearest(name, self.known.iter().copied())
    }

    /// Refuses keys that were not asked for.
    pub fn finish(self, found: &mut Findings) {
        for (name, entry) in self.unknown() {
            let remedy =
                self.hint(name).map_or("remove it".to_owned(), |near| format!("did you mean {near}"));
            self.refuse(found, name, entry, "unknown key".to_owned(), remedy);
        }
    }

    /// Notes keys that were not asked for, as DeepSpeed ignores them here.
    pub fn finish_leniently(self, found: &mut Findings) {
        for (name, entry) in self.unknown().take(8) {
            let near = self.hint(name);
            let why = match near {
                Some(near) => format!("DeepSpeed has no such key; did you mean {near}"),
                None => "DeepSpeed has no such key".to_owned(),
            };
            self.note(found, name, &why);
            let remedy = near.map_or_else(|| "remove it".to_owned(), |near| format!("did you mean {near}"));
            let mut aside = Findings { path: found.path.clone(), ..Findings::default() };
            self.refuse(&mut aside, name, entry, "DeepSpeed has no such key".to_owned(), remedy);
            found.unknown.extend(aside.problems);
        }
        let more = self.unknown().count().saturating_sub(8);
        if more > 0 {
            found.notes.push(format!("{more} more keys have no effect: DeepSpeed has no such keys"));
        }
    }
}
