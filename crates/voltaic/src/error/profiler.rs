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
    /// A recording is to end on another thread than the one on which it began.
    #[error("profiler: a recording cannot end on another thread than the one on which it began; {}", self.remedy())]
    OtherThread,
    /// `HABANA_PROFILE` is set to something that collides with traces.
    #[error("profiler: HABANA_PROFILE is `{value}`; `HABANA_PROFILE` should not be set when using `HPUProfiler`; {}", self.remedy())]
    HabanaProfile {
        /// What it is set to.
        value: String,
    },
}

impl ProfilerError {
    /// What is wrong, without how to fix it.
    pub(crate) fn what(&self) -> String {
        let text = self.to_string();
        let text = text.strip_prefix("profiler: ").unwrap_or(&text);
        text.strip_suffix(&format!("; {}", self.remedy())).unwrap_or(text).to_owned()
    }

    /// How to fix it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::AlreadyStarted { .. } => "stop it first, or use another name",
            Self::NeverStarted { .. } => "start it first",
            Self::NotInnermost { .. } => "stop that first",
            Self::OtherThread => "train on one thread, and stop there what you started there",
            Self::HabanaProfile { .. } => "unset it, or set it to profile_api_light",
        }
    }
}
