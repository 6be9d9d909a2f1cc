//! Errors of libtorch's operators.

use super::problem::Problem;

/// libtorch's own error, with the operation that raised it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("libtorch: {op}: {message}")]
#[non_exhaustive]
pub struct TorchError {
    /// The function called, such as `_fused_adamw_`.
    pub op: &'static str,
    /// Which family of errors it belongs to.
    pub kind: TorchErrorKind,
    /// libtorch's text without its C++ backtrace.
    pub message: String,
    /// The end of the message: how to fix it, for errors that voltaic recognises.
    remedy: Option<&'static str>,
}

/// Family of a [`TorchError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TorchErrorKind {
    /// Memory of a device is used up.
    OutOfMemory,
    /// An index lies outside its dimension.
    Index,
    /// libtorch has no such operation for these arguments.
    NotImplemented,
    /// Anything else.
    Other,
}

impl TorchError {
    /// An error of `op`; the text's C++ backtrace is cut off.
    pub(crate) fn new(op: &'static str, kind: TorchErrorKind, message: &str) -> Self {
        let end = message.find("\nException raised from").unwrap_or(message.len());
        let own = if lacks_hpu(message) {
            Some((NO_HPU, SET_UP))
        } else if message.contains("backward through the graph a second time") {
            Some((USED_GRAPH, ONCE))
        } else {
            None
        };
        match own {
            Some((what, remedy)) => {
                Self { op, kind, message: Problem::new(what, remedy).to_string(), remedy: Some(remedy) }
            }
            None => Self { op, kind, message: message[..end].trim_end().to_owned(), remedy: None },
        }
    }

    /// How to fix it, for errors that voltaic recognises.
    pub fn remedy(&self) -> Option<&'static str> {
        self.remedy
    }
}

const NO_HPU: &str = "no HPU is set up in this process";
const SET_UP: &str = "build a trainer with accelerator=hpu first, which sets it up";

// libtorch's text speaks of `retain_graph`, which the trainer does not have
const USED_GRAPH: &str = "backward has gone through the graph of this loss before, which freed it";
const ONCE: &str = "add up losses that share a part of it and call backward once, or compute the loss again";

/// Whether there is no back end that makes tensors on HPUs.
fn lacks_hpu(message: &str) -> bool {
    let makes_tensors = ["aten::empty.memory_format'", "aten::empty_strided'"];
    message.contains("from the 'HPU' backend")
        && makes_tensors.iter().any(|op| message.contains(&format!("Could not run '{op}")))
}
