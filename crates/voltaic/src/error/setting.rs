//! Errors of settings in the environment.

/// A variable of the environment has a value that it cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}=`{value}` in the environment is invalid; {}", self.remedy())]
pub struct SettingError {
    /// Name of the variable.
    pub name: &'static str,
    /// What the environment says.
    pub value: String,
    /// What it may say.
    pub accepted: &'static str,
}

impl SettingError {
    /// How to fix it.
    pub fn remedy(&self) -> String {
        format!("set it to {}", self.accepted)
    }
}
