//! What a captured step consists of, before and after the passes: as data, as text and as a picture.

mod picture;
mod shown_graph;
mod text;

pub use shown_graph::{GraphTotals, ShownGraph};
pub(super) use shown_graph::{add, is_asked};
pub(crate) use shown_graph::{label_shown, shown};
