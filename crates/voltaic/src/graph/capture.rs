//! Capturing: what a thread does becomes one or more recordings.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use super::ir::Graph;
use super::metrics;
use super::plan::{PlanStats, plan};
use crate::error::{GraphError, Result, TorchError, TorchErrorKind};
use crate::ffi::{self, Recording, ReplayGraph, ReplayStats, Replayed};
use crate::nn::{CallWatcher, Module, ModuleCall, ModuleHooks, RemovableHandle, Which};

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

/// Says of operators in which module they are, by its fqn, while the module's calls are heard.
#[derive(Default)]
struct FqnScopes {
    before: Vec<String>,
}

impl CallWatcher for FqnScopes {
    fn before_forward(&mut self, call: &ModuleCall<'_>, _: &[Tensor]) -> anyhow::Result<()> {
        ffi::set_recording_scope(call.fqn());
        self.before.push(SCOPE.replace(call.fqn().to_owned()));
        Ok(())
    }

    fn end(&mut self) {
        if let Some(before) = self.before.pop() {
            ffi::set_recording_scope(&before);
            SCOPE.set(before);
        }
    }
}

/// Runs `body` with the scopes of operators named by the modules of `root` that are called.
pub(crate) fn scoped_by_fqn<R>(root: &dyn Module, body: impl FnOnce() -> R) -> Result<R> {
    let hooks = ModuleHooks::new();
    let _ = hooks.watch(Which::All, FqnScopes::default());
    hooks.within(root, body)
}

/// Names the scopes of operators by the modules that these hooks are in force for.
pub(crate) fn scope_by_fqn(hooks: &ModuleHooks) -> RemovableHandle {
    hooks.watch(Which::All, FqnScopes::default())
}

/// A recording that is ready to be replayed.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) graph: Arc<Graph>,
    pub(super) stats: PlanStats,
    replay: ReplayGraph,
}

thread_local!(static MADE: RefCell<Vec<Range<u64>>> = const { RefCell::new(Vec::new()) });

/// Memory that captures by hand on this thread have made and that outlived them, since this was last called. What a run
/// keeps from step to step must not lie there: each replay makes it again.
#[derive(Debug)]
pub(crate) struct MadeInCapture(Vec<Range<u64>>);

impl MadeInCapture {
    pub(crate) fn take() -> Self {
        Self(MADE.take())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Notes what outlived the capture of these graphs.
    pub(super) fn note<'a>(graphs: impl Iterator<Item = &'a Graph>) {
        let kept = graphs.flat_map(|graph| &graph.buffers).filter(|b| b.is_kept && b.made_by().is_some());
        MADE.with_borrow_mut(|made| made.extend(kept.map(|b| b.address..b.address + b.bytes)));
    }

    /// Refuses a tensor that lies there; `name` says what it is.
    pub(crate) fn check(&self, tensor: &Tensor, name: impl FnOnce() -> String) -> Result<()> {
        if !tensor.defined() {
            return Ok(());
        }
        let address = tensor.data_ptr().addr() as u64;
        if self.0.iter().any(|made| made.contains(&address)) {
            return Err(GraphError::MadeInCapture { tensor: name() }.into());
        }
        Ok(())
    }
}

/// Reads the recordings of one capture, in order. `names` are tensors that were there before, such as weights, with
/// their names.
pub(super) fn read_all(recordings: &[&Recording], names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
    let mut graphs: Vec<Graph> = Vec::with_capacity(recordings.len());
    for recording in recordings {
        let text = recording.describe(recordings)?;
        let mut graph: Graph = serde_json::from_str(&text).map_err(|error| {
            let what = format!("cannot be read: {error}");
            TorchError::new("recording_describe", TorchErrorKind::Other, &what)
        })?;
        for (name, tensor) in names {
            if let Some(buffer) = recording.buffer_of(tensor)? {
                graph.names.entry(buffer).or_insert_with(|| name.clone());
            }
        }
        graph.name_results_of(&graphs);
        for index in graph.unnamed() {
            graph.buffers[index].content = Some(recording.hash_of(index));
        }
        graphs.push(graph);
    }
    Ok(graphs)
}

/// Plans recordings and makes them ready, each with its graph; `inputs` are the tensors that replays may be given others
/// for, `outputs` results of which each replay should give away new ones. Also tells which of these it does: those that
/// a single recording has made.
///
/// # Errors
/// [`GraphError::NotCapturable`].
pub(super) fn compile_all(
    recordings: Vec<Recording>,
    graphs: Vec<Graph>,
    inputs: &[Tensor],
    outputs: &[Tensor],
) -> Result<(Vec<Segment>, Vec<bool>)> {
    let is_made = |output: &Tensor| -> Result<bool> {
        let ([recording], [graph]) = (recordings.as_slice(), graphs.as_slice()) else { return Ok(false) };
        let buffer = recording.buffer_of(output)?;
        Ok(buffer.is_some_and(|buffer| graph.buffers[buffer].made_by().is_some()))
    };
    let given_away = outputs.iter().map(is_made).collect::<Result<Vec<bool>>>()?;
    let outputs: Vec<Tensor> =
        outputs.iter().zip(&given_away).filter(|(_, is)| **is).map(|(o, _)| o.shallow_clone()).collect();
    let parts = recordings.into_iter().zip(graphs);
    let compile = |(recording, graph)| Segment::compile(recording, graph, inputs, &outputs);
    Ok((parts.map(compile).collect::<Result<_>>()?, given_away))
}

impl Segment {
    fn compile(recording: Recording, graph: Graph, inputs: &[Tensor], outputs: &[Tensor]) -> Result<Self> {
        if let Some(problem) = graph.problem() {
            return Err(problem.into());
        }
        let timer = metrics::Compilation::start();
        let (plan, stats) = plan(&graph, uses_out_variants());
        let replay = recording.build(&plan, inputs, outputs)?;
        timer.finish(&graph);
        Ok(Self { graph: Arc::new(graph), stats, replay })
    }

    /// Runs the kernels once more. Gives what the replay gives away.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], and then nothing has run; [`GraphError::ShapeChanged`].
    pub(super) fn replay(&mut self, inputs: Option<&[Tensor]>) -> Result<Vec<Tensor>> {
        match self.replay.replay(inputs)? {
            Replayed::Done(outputs) => Ok(outputs),
            Replayed::Gone(buffer) => Err(GraphError::TensorGone { tensor: self.name_of(buffer) }.into()),
            Replayed::Misfit(node) => Err(GraphError::ShapeChanged {
                op: self.graph.nodes[node].op.clone(),
                place: self.graph.place(node),
                is_undone: self.graph.is_pure_before(node),
            }
            .into()),
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
