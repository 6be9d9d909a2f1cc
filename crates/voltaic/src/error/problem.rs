//! What every error that can be fixed says.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::printable::shortened;

/// Characters that are shown of what is wrong: files may have names of any length.
const MAX_WHAT: usize = 4000;

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
        write!(f, "{}; {}", shortened(&self.what, MAX_WHAT), self.remedy)
    }
}

impl std::error::Error for Problem {}
