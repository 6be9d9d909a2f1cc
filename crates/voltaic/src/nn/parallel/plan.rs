//! How the layers of a module are to be divided.

use crate::config::{conversions, setters};
use voltaic_macros::Defaults;

/// Divides a layer by its output features, as PyTorch's `ColwiseParallel`: each rank computes some of them. Of an
/// [`Embedding`](crate::nn::Embedding) it divides the vectors.
#[derive(Defaults, Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColwiseParallel {
    #[default(1)]
    pub(super) parts: i64,
    #[default(1)]
    pub(super) unit: i64,
    pub(super) gather_output: bool,
}

impl ColwiseParallel {
    setters! {
        /// The features are so many parts of the same size, of each of which a rank has its share: 3 for query, key and value in one layer.
        #[must_use]
        parts: i64;
        /// So many features stay together: those of an attention head. The row-wise layer that follows needs the same unit.
        #[must_use]
        unit: i64;
    }

    /// All ranks get all features (PyTorch's `output_layouts=Replicate()`): for a layer that no row-wise one follows, such as the head
    /// of a language model.
    #[must_use]
    pub fn gather_output(mut self) -> Self {
        self.gather_output = true;
        self
    }
}

/// Divides a layer by its input features, as PyTorch's `RowwiseParallel`: each rank computes a part of all outputs, and the parts are
/// summed. The input is this rank's features, of a column-wise layer before it, or all features, of which the layer takes this rank's.
/// Of an [`Embedding`](crate::nn::Embedding) it divides the vocabulary.
#[derive(Defaults, Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowwiseParallel {
    #[default(1)]
    pub(super) unit: i64,
}

impl RowwiseParallel {
    /// So many features stay together, as in the column-wise layer before it.
    #[must_use]
    pub fn unit(mut self, features: i64) -> Self {
        self.unit = features;
        self
    }
}

/// How a layer is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParallelStyle {
    /// By output features.
    Colwise(ColwiseParallel),
    /// By input features.
    Rowwise(RowwiseParallel),
}

conversions! { ParallelStyle:
    ColwiseParallel => |style| Self::Colwise(style),
    RowwiseParallel => |style| Self::Rowwise(style),
}

/// Which layers of a module are divided, and how: PyTorch's `parallelize_plan`.
///
/// ```
/// use voltaic::nn::parallel::{ColwiseParallel, ParallelPlan, RowwiseParallel};
///
/// let head_dim = 64;
/// let plan = ParallelPlan::new()
///     .layer("*.attn.c_attn", ColwiseParallel::default().parts(3).unit(head_dim))
///     .layer("*.attn.c_proj", RowwiseParallel::default().unit(head_dim))
///     .layer("*.mlp.c_fc", ColwiseParallel::default())
///     .layer("*.mlp.c_proj", RowwiseParallel::default());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParallelPlan {
    pub(super) layers: Vec<(String, ParallelStyle)>,
}

impl ParallelPlan {
    /// One that leaves all layers whole.
    pub fn new() -> Self {
        Self::default()
    }

    /// Divides the layers with this fqn, in which `*` stands for any number of characters. The first entry that fits a layer counts.
    #[must_use]
    pub fn layer(mut self, fqn: impl Into<String>, style: impl Into<ParallelStyle>) -> Self {
        self.layers.push((fqn.into(), style.into()));
        self
    }

    /// Adds the entries of a plan for the module with this fqn.
    #[must_use]
    pub fn below(mut self, fqn: &str, plan: Self) -> Self {
        self.layers.extend(plan.layers.into_iter().map(|(name, style)| (join(fqn, &name), style)));
        self
    }

    /// Whether no layer is named.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

/// The fqn of what is called `name` in the module `fqn`.
pub(super) fn join(fqn: &str, name: &str) -> String {
    match (fqn, name) {
        ("", name) => name.to_owned(),
        (fqn, "") => fqn.to_owned(),
        (fqn, name) => format!("{fqn}.{name}"),
    }
}
