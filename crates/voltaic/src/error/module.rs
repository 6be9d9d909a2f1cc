//! Errors of modules.

use std::borrow::Cow;

use super::problem::Problem;

/// A module was given what it cannot use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModuleError {
    /// A layer's input has the wrong shape.
    #[error("{layer}: input of shape {shape:?} does not fit: {expected}")]
    Shape {
        /// The layer with its sizes, such as `Linear(784, 256)`.
        layer: String,
        /// The input's shape.
        shape: Vec<i64>,
        /// What the layer needs.
        expected: String,
    },
    /// A layer's input has values or a dtype that it cannot use.
    #[error("{layer}: {problem}")]
    Input {
        /// The layer with its sizes, such as `Embedding(65, 128)`.
        layer: String,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// A hook of module calls cannot do what it is for.
    #[error("{problem}")]
    Hook {
        /// What is wrong, with the names, and how to fix it.
        problem: Problem,
    },
    /// A layer was asked for invalid sizes.
    #[error("{layer}: {problem}")]
    Sizes {
        /// The layer, such as `Conv2d`.
        layer: &'static str,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
}

impl ModuleError {
    /// How to fix it; none where the message says what was expected.
    pub fn remedy(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Shape { .. } => None,
            Self::Input { problem, .. } | Self::Hook { problem } | Self::Sizes { problem, .. } => {
                Some((&*problem.remedy).into())
            }
        }
    }
}
