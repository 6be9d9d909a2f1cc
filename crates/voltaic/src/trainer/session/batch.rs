//! Where a batch stands.

/// Where a batch stands in its accumulation window.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    /// Batches whose gradients make one step.
    pub size: u64,
    pub opens: bool,
    pub closes: bool,
}
