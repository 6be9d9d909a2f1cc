//! What every error that can be fixed says.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What is wrong and how to fix it, shown as `what; remedy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// What is wrong, with the values.
    pub what: String,
    /// How to fix it.
    pub remedy: Cow<'static, str>,
}

impl Problem {
    /// A problem and its remedy.
    pub fn new(what: impl Into<String>, remedy: impl Into<Cow<'static, str>>) -> Self {
        Self { what: what.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what, self.remedy)
    }
}

impl std::error::Error for Problem {}
