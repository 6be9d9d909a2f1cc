//! Collects what is wrong with settings, so that all of it is reported together.

use std::borrow::Cow;
use std::fmt::Display;

use crate::error::{ConfigError, ConfigProblem, Result};

/// Problems found so far, under keys that begin with `prefix`.
pub(super) struct Problems {
    prefix: String,
    found: Vec<ConfigProblem>,
}

impl Problems {
    pub(super) fn new(prefix: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), found: Vec::new() }
    }

    pub(super) fn add(
        &mut self,
        key: impl Display,
        what: impl Into<String>,
        remedy: impl Into<Cow<'static, str>>,
    ) {
        self.found.push(ConfigProblem::new(format!("{}.{key}", self.prefix), what, remedy));
    }

    /// Notes that `value` does not satisfy `rule` (such as "a finite number >= 0") unless `ok`.
    pub(super) fn require(&mut self, ok: bool, key: impl Display, value: impl Display, rule: &str) {
        if !ok {
            self.add(key, format!("{value} is not {rule}"), format!("set {rule}"));
        }
    }

    /// Requires a finite number that is not negative.
    pub(super) fn require_not_negative(&mut self, key: impl Display, value: f64) {
        let fits = value <= f64::from(f32::MAX); // or it would be infinite where it is used
        self.require(value.is_finite() && value >= 0.0, &key, value, "a finite number >= 0");
        self.require(fits || !value.is_finite(), &key, value, "a number that float32 can hold");
    }

    pub(super) fn len(&self) -> usize {
        self.found.len()
    }

    pub(super) fn append(&mut self, other: Self) {
        self.found.extend(other.found);
    }

    /// The error that holds all problems, if there are any.
    pub(super) fn finish(self) -> Result<()> {
        if self.found.is_empty() { Ok(()) } else { Err(ConfigError { problems: self.found }.into()) }
    }
}
