//! Errors of configuration.

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
    /// What is wrong, with the value.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

impl ConfigError {
    /// A single problem.
    pub fn new(key: impl Into<String>, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { problems: vec![ConfigProblem::new(key, what, remedy)] }
    }
}

impl ConfigProblem {
    /// A problem of a value set in code.
    pub fn new(key: impl Into<String>, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { key: key.into(), origin: String::new(), what: what.into(), remedy: remedy.into() }
    }
}

impl std::fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.key)?;
        if !self.origin.is_empty() {
            write!(f, " (from {})", self.origin)?;
        }
        write!(f, ": {}; {}", self.what, self.remedy)
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
