//! Errors of modules.

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
    #[error("{layer}: {what}; {remedy}")]
    Input {
        /// The layer with its sizes, such as `Embedding(65, 128)`.
        layer: String,
        /// What is wrong, with the values.
        what: String,
        /// How to mend it.
        remedy: String,
    },
    /// A hook of module calls cannot do what it is for.
    #[error("{what}; {remedy}")]
    Hook {
        /// What is wrong, with the names.
        what: String,
        /// How to fix it.
        remedy: String,
    },
    /// A layer was asked for sizes that make no sense.
    #[error("{layer}: {what}; {remedy}")]
    Sizes {
        /// The layer, such as `Conv2d`.
        layer: &'static str,
        /// What is wrong, with the values.
        what: String,
        /// How to mend it.
        remedy: String,
    },
}
