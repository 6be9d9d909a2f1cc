//! Errors of configuration.

use std::borrow::Cow;

use super::printable::{printable, shortened};
use super::problem::Problem;

/// Characters of a key that are shown.
const MAX_KEY: usize = 200;
/// The same of an origin, which is a path or a variable.
const MAX_ORIGIN: usize = 4096;

/// All problems found in a configuration, one line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The problems, in the order of their keys.
    pub problems: Vec<ConfigProblem>,
}

/// One key that cannot be used as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Dotted key as the user would type it, such as `trainer.max_epochs`.
    pub key: String,
    /// Where the value came from: `run.yaml:7`, `command line`, `VOLTAIC_...`; empty if set in code.
    pub origin: String,
    /// What is wrong, with the value, and how to fix it.
    pub problem: Problem,
}

impl ConfigError {
    /// A single problem.
    pub fn new(
        key: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::at(key, Problem::new(what, remedy))
    }

    /// A single problem, of a value set in code.
    pub fn at(key: impl Into<String>, problem: Problem) -> Self {
        Self { problems: vec![ConfigProblem::at(key, problem)] }
    }

    /// The same with the key of the place in front of all keys.
    #[must_use]
    pub(crate) fn within(mut self, place: &str) -> Self {
        self.problems = self.problems.into_iter().map(|problem| problem.within(place)).collect();
        self
    }

    /// The same with the key of the place where a class was chosen in front; a class has only its own name.
    #[must_use]
    pub(crate) fn below(mut self, place: &str) -> Self {
        self.problems = self.problems.into_iter().map(|problem| problem.below(place)).collect();
        self
    }

    /// How to fix it: the remedy of a single problem, of several those with their keys, one line each.
    pub fn remedy(&self) -> Cow<'_, str> {
        match &self.problems[..] {
            [one] => (&*one.problem.remedy).into(),
            all => {
                let lines = all.iter().map(|at| format!("{}: {}", at.key, at.problem.remedy));
                lines.collect::<Vec<_>>().join("\n").into()
            }
        }
    }
}

impl ConfigProblem {
    /// A problem of a value set in code.
    pub fn new(
        key: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::at(key, Problem::new(what, remedy))
    }

    /// A problem of a value set in code.
    pub fn at(key: impl Into<String>, problem: Problem) -> Self {
        Self { key: key.into(), origin: String::new(), problem }
    }

    fn within(mut self, place: &str) -> Self {
        self.key = format!("{place}.{}", self.key);
        self
    }

    fn below(mut self, place: &str) -> Self {
        if let Some((class, argument)) = self.key.split_once('.')
            && class.starts_with(|c: char| c.is_ascii_uppercase())
        {
            self.key = format!("{place}.{argument}");
        }
        self
    }
}

impl std::fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&printable(&shortened(&self.key, MAX_KEY)))?;
        if !self.origin.is_empty() {
            write!(f, " (from {})", printable(&shortened(&self.origin, MAX_ORIGIN)))?;
        }
        write!(f, ": {}", printable(&self.problem.to_string()))
    }
}

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
