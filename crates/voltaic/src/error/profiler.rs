//! Errors of profilers.

/// Actions that do not begin and end as they should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProfilerError {
    /// An action is to begin that has not ended.
    #[error("profiler: cannot start `{action}`, which has already started; {}", self.remedy())]
    AlreadyStarted {
        /// Its name.
        action: String,
    },
    /// An action is to end that has not begun.
    #[error("profiler: cannot stop `{action}`, which was never started; {}", self.remedy())]
    NeverStarted {
        /// Its name.
        action: String,
    },
    /// An action is to end before one that began within it.
    #[error("profiler: cannot stop `{action}` while `{inner}` runs, which began later; {}", self.remedy())]
    NotInnermost {
        /// The one that is to end.
        action: String,
        /// The one that runs.
        inner: String,
    },
}

impl ProfilerError {
    /// How to fix it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::AlreadyStarted { .. } => "stop it first, or use another name",
            Self::NeverStarted { .. } => "start it first",
            Self::NotInnermost { .. } => "stop that first",
        }
    }
}
