//! Errors of graphs.

use std::borrow::Cow;

use super::problem::Problem;

/// A graph cannot be recorded or replayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// What ran while it was recorded cannot be replayed.
    #[error("{op} {place} cannot be part of a graph: {problem}")]
    NotCapturable {
        /// The operator.
        op: String,
        /// The layer it came from.
        place: String,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// Two captures of the same code gave two graphs.
    #[error("the step is not static: {difference}; {}", self.remedy())]
    NotStatic {
        /// In what they differ.
        difference: String,
    },
    /// A tensor that later steps only update was made while the graph was captured.
    #[error("{tensor} was made while a graph was captured, so that each replay would make it again; {}", self.remedy())]
    MadeInCapture {
        /// Which tensor.
        tensor: String,
    },
    /// The result of an operator has another shape than when the graph was captured.
    #[error("{op} {place} cannot be part of a graph: its result has another shape in a replay, since that depends on data; {}", self.remedy())]
    ShapeChanged {
        /// The operator.
        op: String,
        /// The layer it came from.
        place: String,
        /// Nothing that the replay did before the failure is visible outside of it.
        is_undone: bool,
    },
    /// A graph is being captured on this thread.
    #[error("{what} while a graph is being captured on this thread; {}", self.remedy())]
    CaptureInProgress {
        /// What was tried.
        what: &'static str,
    },
    /// Nothing is being captured.
    #[error("capture_end without capture_begin on this thread; {}", self.remedy())]
    NotCapturing,
    /// A graph is replayed before anything was captured.
    #[error("replay of a graph that holds nothing; {}", self.remedy())]
    NothingCaptured,
    /// An optimizer whose step was captured would now do another.
    #[error("{what} since its step was captured, which a replay would not follow; {}", self.remedy())]
    Outdated {
        /// What has changed.
        what: String,
    },
    /// Something else holds on the thread than when the graph was captured, and its code would do something else.
    #[error("the graph was captured {difference}; {}", self.remedy())]
    OtherConditions {
        /// In what the two differ.
        difference: String,
    },
    /// An input is not like the one that was captured.
    #[error("input {index} is {given}, but the graph was captured with {captured}; {}", self.remedy())]
    InputMismatch {
        /// Its position.
        index: usize,
        /// What was given.
        given: String,
        /// What the graph takes.
        captured: String,
    },
    /// A number of inputs, or their nesting, is not what was captured.
    #[error("{problem}")]
    Arguments {
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// A tensor that the graph reads or writes is gone.
    #[error("{tensor} is gone or was given other memory since the graph was captured; {}", self.remedy())]
    TensorGone {
        /// Which tensor.
        tensor: String,
    },
    /// The backward pass of a graph came after another replay of its forward pass.
    #[error("the graph of {module} was replayed again before its backward pass; {}", self.remedy())]
    Overwritten {
        /// The module.
        module: String,
    },
    /// The requested function is not available here.
    #[error("{what} is not available: {problem}")]
    Unavailable {
        /// The requested function.
        what: String,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
}

impl GraphError {
    /// How to fix it.
    pub fn remedy(&self) -> Cow<'_, str> {
        let remedy = match self {
            Self::NotCapturable { problem, .. }
            | Self::Arguments { problem }
            | Self::Unavailable { problem, .. } => &*problem.remedy,
            Self::NotStatic { .. } => {
                "take from it what changes from step to step, or compute that on the device from tensors of the batch"
            }
            Self::MadeInCapture { .. } => "make it before the capture, or run one step before it",
            Self::ShapeChanged { .. } => "use a mask or where(), or leave it between two graphs (mark_step)",
            Self::CaptureInProgress { .. } => "end that capture first",
            Self::NotCapturing => "begin the capture on the thread that ends it",
            Self::NothingCaptured => {
                "capture something first (HpuGraph::capture), in a resumed run, too: checkpoints hold no graphs"
            }
            Self::Outdated { .. } => "capture again, or leave the step of this optimizer out of the graph",
            Self::OtherConditions { .. } => {
                "replay it under what it was captured under, or capture another one"
            }
            Self::InputMismatch { .. } => "capture a graph for each shape, or use a ModuleCacher",
            Self::TensorGone { .. } => "keep it alive and change it in place (copy_), or capture again",
            Self::Overwritten { .. } => "call backward after each forward pass, or use one graph for each",
        };
        remedy.into()
    }
}
