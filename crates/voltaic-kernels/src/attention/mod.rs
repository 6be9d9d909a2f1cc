//! Attention.

pub(crate) mod cached;
pub(crate) mod factor;
pub(crate) mod head;
pub(crate) mod heads;
pub(crate) mod passes;
pub(crate) mod rows;
mod softmax;
