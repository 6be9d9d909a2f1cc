//! Errors of switches in the environment.

/// A switch in the environment is neither on nor off.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name}=`{value}` in the environment is neither 0 nor 1; {}",
    self.remedy()
)]
pub struct SwitchError {
    /// Name of the variable.
    pub name: &'static str,
    /// What the environment says.
    pub value: String,
    /// What 0 keeps, such as "allocator".
    pub what: &'static str,
}

impl SwitchError {
    /// How to fix it.
    pub fn remedy(&self) -> String {
        format!("unset it, or set it to 0 to keep libtorch's own {}", self.what)
    }
}
