//! Capturing: what a thread does becomes one or more recordings.

use std::cell::RefCell;
use std::marker::PhantomData;

use tch::Tensor;

use super::ir::Graph;
use super::metrics;
use super::plan::{PlanStats, plan};
use crate::error::{GraphError, Result, TorchError, TorchErrorKind};
use crate::ffi::{self, Recording, ReplayGraph, ReplayStats};

/// A capture in progress on this thread.
struct Capture {
    /// Recordings that a `mark_step` ended.
    ended: Vec<Recording>,
    was_multithreaded: bool,
}

thread_local!(static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) });

/// Whether this thread is capturing a graph.
pub fn is_capturing() -> bool {
    ffi::is_recording()
}

/// Refuses what cannot be done while a graph is captured.
pub(crate) fn check_not_capturing(what: &'static str) -> Result<()> {
    if is_capturing() { Err(GraphError::CaptureInProgress { what }.into()) } else { Ok(()) }
}

/// Notes that the capture in progress, if there is one, cannot be replayed.
pub fn refuse_capture(reason: &str) {
    ffi::refuse_recording(reason);
}

/// Begins a capture on this thread. Operators run as usual.
pub(super) fn begin() -> Result<()> {
    check_not_capturing("capture_begin")?;
    ffi::install_host_pool()?; // its blocks are what a graph's memory is made of
    let was_multithreaded = ffi::engine_multithreading()?;
    ffi::set_engine_multithreading(false)?; // backward must run on this thread
    Recording::begin()?;
    CAPTURE.set(Some(Capture { ended: Vec::new(), was_multithreaded }));
    Ok(())
}

/// Ends the capture of this thread: one recording for each part between two `mark_step`s.
pub(super) fn end() -> Result<Vec<Recording>> {
    let Some(mut capture) = CAPTURE.take() else { return Err(GraphError::NotCapturing.into()) };
    let last = Recording::end();
    ffi::set_engine_multithreading(capture.was_multithreaded)?;
    capture.ended.push(last?);
    Ok(capture.ended)
}

/// Ends the graph that is being captured and begins another one: what runs between two graphs need not be static. The
/// parts are replayed one after the other.
///
/// Outside a capture this does nothing: operators run as soon as they are called.
///
/// # Errors
/// libtorch's.
pub fn mark_step() -> Result<()> {
    metrics::count_mark_step();
    CAPTURE.with_borrow_mut(|capture| {
        if let Some(capture) = capture {
            capture.ended.push(Recording::end()?);
            Recording::begin()?;
        }
        Ok(())
    })
}

/// Names the place of the operators that follow, for messages about what cannot be captured: see [`scope`].
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct Scope {
    before: String,
    _of_this_thread: PhantomData<*const ()>,
}

thread_local!(static SCOPE: RefCell<String> = const { RefCell::new(String::new()) });

/// Operators until the result is dropped are said to be in `name`, within the scope that holds now.
pub fn scope(name: &str) -> Scope {
    let before = SCOPE.with_borrow_mut(|scope| {
        let inner = if scope.is_empty() { name.to_owned() } else { format!("{scope}.{name}") };
        std::mem::replace(scope, inner)
    });
    SCOPE.with_borrow(|scope| ffi::set_recording_scope(scope));
    Scope { before, _of_this_thread: PhantomData }
}

impl Drop for Scope {
    fn drop(&mut self) {
        ffi::set_recording_scope(&self.before);
        SCOPE.set(std::mem::take(&mut self.before));
    }
}

/// A recording that is ready to be replayed.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) graph: Graph,
    pub(super) stats: PlanStats,
    replay: ReplayGraph,
}

/// Reads a recording. `names` are tensors that were there before, such as weights, with their names.
pub(super) fn read(recording: &Recording, names: &[(String, Tensor)]) -> Result<Graph> {
    let text = recording.describe()?;
    let mut graph: Graph = serde_json::from_str(&text).map_err(|error| {
        TorchError::new("recording_describe", TorchErrorKind::Other, &format!("cannot be read: {error}"))
    })?;
    for (name, tensor) in names {
        if let Some(buffer) = recording.buffer_of(tensor)? {
            graph.names.entry(buffer).or_insert_with(|| name.clone());
        }
    }
    Ok(graph)
}

impl Segment {
    /// Plans a recording and makes it ready; `inputs` are the tensors that replays may be given others for.
    ///
    /// # Errors
    /// [`GraphError::NotCapturable`].
    pub(super) fn compile(
        recording: Recording,
        names: &[(String, Tensor)],
        inputs: &[Tensor],
    ) -> Result<Self> {
        let graph = read(&recording, names)?;
        if let Some(problem) = graph.problem() {
            return Err(problem.into());
        }
        let timer = metrics::Compilation::start();
        let (plan, stats) = plan(&graph, uses_out_variants());
        let replay = recording.build(&plan, inputs)?;
        timer.finish(&graph);
        Ok(Self { graph, stats, replay })
    }

    /// Runs the kernels once more.
    pub(super) fn replay(&mut self, inputs: Option<&[Tensor]>) -> Result<()> {
        match self.replay.replay(inputs)? {
            Some(buffer) => Err(GraphError::TensorGone { tensor: self.name_of(buffer) }.into()),
            None => Ok(()),
        }
    }

    pub(super) fn replay_stats(&self) -> ReplayStats {
        self.replay.stats()
    }

    fn name_of(&self, buffer: usize) -> String {
        if let Some(name) = self.graph.buffer_name(buffer) {
            return format!("`{name}`");
        }
        let reader = self
            .graph
            .nodes
            .iter()
            .position(|node| node.values().any(|value| self.graph.values[value].buffer == buffer));
        match reader {
            Some(node) => {
                format!("a tensor that {} {} uses", self.graph.nodes[node].op, self.graph.place(node))
            }
            None => "a tensor of the graph".to_owned(),
        }
    }
}

/// Out variants save the making of tensors; `VOLTAIC_GRAPH_OUT=0` does without them, to compare.
fn uses_out_variants() -> bool {
    std::env::var_os("VOLTAIC_GRAPH_OUT").is_none_or(|value| value != "0")
}
