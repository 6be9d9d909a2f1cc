//! What attention of one head reads.

use crate::attention::rows::Rows;
use crate::element::Element;

/// Queries, keys and values of a head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionHead<'a, T> {
    /// `[queries, dim]`
    pub query: Rows<'a, T>,
    /// `[keys, dim]`
    pub key: Rows<'a, T>,
    /// `[keys, dim]`
    pub value: Rows<'a, T>,
    /// Number of queries.
    pub queries: usize,
    /// Number of keys.
    pub keys: usize,
    /// What scores are multiplied with.
    pub scale: f32,
    /// Whether query `i` sees keys `0..=i` only.
    pub is_causal: bool,
}

impl<T: Element> AttentionHead<'_, T> {
    /// Keys that some query before `last` sees.
    #[inline(always)]
    pub(crate) fn visible(&self, last: usize) -> usize {
        if self.is_causal { last.min(self.keys) } else { self.keys }
    }
}

/// What the backward pass needs besides.
#[derive(Debug, Clone, Copy)]
pub struct GradHead<'a, T> {
    /// Output of the forward pass, `[queries, dim]`.
    pub out: Rows<'a, T>,
    /// Its gradient.
    pub grad_out: Rows<'a, T>,
    /// By query, at equal distances.
    pub log_sum_exp: Rows<'a, f32>,
}
