//! Checks of the settings of data modules, so that all mistakes are reported together, before anything is read.

use std::fmt::Display;

use super::split_size::SplitSize;
use crate::error::{ConfigError, ConfigProblem};

/// Threads of a loader; more are a slip of the pen.
const MAX_WORKERS: usize = 1024;

/// What is wrong with the settings of a data module.
#[derive(Debug, Default)]
pub(in crate::data) struct Settings {
    problems: Vec<ConfigProblem>,
}

impl Settings {
    /// Notes that `value` is not what `rule` says (such as `a number from 1 to 8`) unless `holds`.
    pub fn require(&mut self, holds: bool, key: &str, value: impl Display, rule: &str) {
        if !holds {
            self.problems.push(ConfigProblem::new(key, value.to_string(), format!("give {rule}")));
        }
    }

    /// What all loaders have.
    pub fn loader(&mut self, batch_size: usize, num_workers: usize) {
        self.require(batch_size > 0, "batch_size", format!("{batch_size} samples"), "1 or more");
        let rule = format!("a number from 0 to {MAX_WORKERS}");
        self.require(num_workers <= MAX_WORKERS, "num_workers", format!("{num_workers} threads"), &rule);
    }

    pub fn split(&mut self, key: &str, size: SplitSize) {
        let shown = match size {
            SplitSize::Count(count) => count.to_string(),
            SplitSize::Fraction(fraction) => fraction.to_string(),
        };
        let rule = "a number of samples, or a fraction from 0 up to but not including 1";
        self.require(size.is_possible(), key, shown, rule);
    }

    pub fn finish(self) -> Result<(), ConfigError> {
        if self.problems.is_empty() { Ok(()) } else { Err(ConfigError { problems: self.problems }) }
    }
}
