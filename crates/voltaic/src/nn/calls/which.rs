//! Which modules a hook is for.

use std::any::TypeId;
use std::fmt;

use crate::config::conversions;
use crate::nn::module::Module;

/// Which modules of a tree a hook is for: those whose fqn fits a pattern, or those of a type. A text is a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// By fqn; `*` stands for any number of characters, dots included: `encoder.*`, `*.attn`. Empty is the root.
    Fqn(String),
    /// By their type; see [`Which::of_type`].
    Type(TypeId, &'static str),
    /// All modules, the root included.
    All,
}

impl Which {
    /// The modules of type `M`.
    pub fn of_type<M: Module>() -> Self {
        let name = std::any::type_name::<M>();
        Self::Type(TypeId::of::<M>(), name.rsplit("::").next().unwrap_or(name))
    }

    /// Whether they are named one by one.
    pub(super) fn is_exact(&self) -> bool {
        matches!(self, Self::Fqn(pattern) if !pattern.contains('*'))
    }

    pub(super) fn fits(&self, fqn: &str, type_id: TypeId) -> bool {
        match self {
            Self::Fqn(pattern) => fits(pattern, fqn),
            Self::Type(known, _) => *known == type_id,
            Self::All => true,
        }
    }
}

conversions! { Which:
    &str => |pattern| Self::Fqn(pattern.to_owned()),
    String => |pattern| Self::Fqn(pattern),
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fqn(pattern) => write!(f, "`{pattern}`"),
            Self::Type(_, name) => write!(f, "modules of type {name}"),
            Self::All => f.write_str("all modules"),
        }
    }
}

/// Whether `text` is `pattern` with something in place of each `*`.
pub(in crate::nn) fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_file_names_do() {
        for (pattern, text, expected) in [
            ("fc1", "fc1", true),
            ("fc1", "fc12", false),
            ("", "", true),
            ("", "fc1", false),
            ("*", "", true),
            ("*", "a.b", true),
            ("h.*.attn", "h.3.attn", true),
            ("h.*.attn", "h.attn", false),
            ("h.*.attn", "h.3.attn.c_proj", false),
            ("*.attn*", "h.3.attn.c_proj", true),
            ("a*a", "a", false),
            ("a*a", "aa", true),
        ] {
            assert_eq!(fits(pattern, text), expected, "{pattern} {text}");
        }
    }
}
