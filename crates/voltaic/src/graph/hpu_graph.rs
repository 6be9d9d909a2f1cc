//! A graph that is captured once and replayed many times.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use super::capture::{Capture, check_not_capturing};
use super::compiled::{CompiledGraph, Segment};
use super::ir::Graph;
use super::options::CompileConfig;
use super::passes::Passes;
use super::places::{check_inputs, fill};
use super::plan::PlanStats;
use super::recordings::named_tensors;
use super::signature::Conditions;
use super::static_tensor::no_weights;
use crate::device::Device;
use crate::error::{GraphError, Result};
use crate::ffi::{self, CudaGraph, ReplayStats};
use crate::nn::Module;

/// Records what a thread does on its device, forward, backward and optimizer alike, and does it again on request.
///
/// Capturing runs the operators as usual, so that results are there afterwards. A replay calls their kernels again, on
/// the same memory: inputs are the tensors that were there when the capture began, to be filled by `copy_`; results are
/// the tensors that the captured code made, overwritten by each replay. Random numbers are drawn again. Nothing else of
/// the captured code runs: numbers that it computed on the host, such as a learning rate, stay what they were.
///
/// ```
/// use voltaic::graph::HpuGraph;
/// use voltaic::{Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// let mut input = Tensor::ones([2, 3], (Kind::Float, tch::Device::Cpu));
/// let graph = HpuGraph::new();
/// graph.capture_begin()?;
/// let output = &input * 2.0;
/// graph.capture_end()?;
/// input.copy_(&Tensor::full([2, 3], 4.0, (Kind::Float, tch::Device::Cpu)));
/// graph.replay()?;
/// assert_eq!(output.double_value(&[1, 2]), 8.0);
/// # Ok(())
/// # }
/// ```
///
/// What cannot be replayed (results that go to the host, shapes that depend on data) is found at the end of the capture
/// and reported with the operator and the layer. Works on the CPU and on emulated HPUs; [`HpuGraph::on`] a CUDA device too.
/// A Gaudi card has no graphs here: a capture runs the code and holds nothing, which a warning says once. Code that
/// captures unless [`HpuGraph::is_captured`] trains there, too, without a graph.
///
/// Source: `habana_frameworks.torch.hpu.HPUGraph`.
#[derive(Debug, Default)]
pub struct HpuGraph {
    state: RefCell<GraphState>,
}

/// The state of a graph. It is not borrowed while code of the user runs.
#[derive(Debug, Default)]
struct GraphState {
    graph: CompiledGraph,
    /// On a CUDA device: its index, and the driver's graph in place of `graph`.
    cuda: Option<(usize, Option<CudaGraph>)>,
    is_capturing: bool,
    /// What changes what was captured.
    passes: Passes,
    /// The capture in progress, unless it is the driver's.
    capture: Option<Capture>,
    names: Vec<(String, Tensor)>,
    /// What held when the capture began, and which of the named tensors were trained.
    held: Option<(Conditions, Vec<bool>)>,
    inputs: Vec<Tensor>,
    /// Steps of optimizers that were captured.
    optimizer_steps: u64,
}

thread_local! {
    /// Optimizer steps of the [`HpuGraph`] capture in progress on this thread.
    static CAPTURED_STEPS: Cell<u64> = const { Cell::new(0) };
    /// Those that replays on this thread have done since they were last taken.
    static REPLAYED_STEPS: Cell<u64> = const { Cell::new(0) };
    /// Captures on this thread that can be replayed, and replays.
    static USES: Cell<GraphUses> = const { Cell::new(GraphUses { captured: 0, replayed: 0 }) };
    /// Why no replay on this thread may do such a step now.
    static OUTDATED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// How often graphs were captured by hand and replayed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GraphUses {
    pub captured: u64,
    pub replayed: u64,
}

impl GraphUses {
    /// Of each [`HpuGraph`] of this thread so far.
    pub(crate) fn so_far() -> Self {
        USES.get()
    }
}

/// Refuses replays of optimizer steps on this thread, for this reason; none lets them be.
pub(crate) fn forbid_replayed_steps(reason: Option<String>) {
    OUTDATED.set(reason);
}

/// Notes a step of an optimizer of the run, which may be part of a capture.
pub(crate) fn note_optimizer_step() {
    CAPTURED_STEPS.set(CAPTURED_STEPS.get() + 1);
}

/// Optimizer steps that replays on this thread have done since [`take_replayed_steps`].
pub(crate) fn replayed_steps() -> u64 {
    REPLAYED_STEPS.get()
}

/// The same, and begins to count again.
pub(crate) fn take_replayed_steps() -> u64 {
    REPLAYED_STEPS.take()
}

thread_local!(static MADE: RefCell<Vec<Range<u64>>> = const { RefCell::new(Vec::new()) });

/// Memory that [`HpuGraph`] captures on this thread have allocated and that outlived them, since this was last called. State that a
/// run keeps from step to step must not lie there, since each replay overwrites it.
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

impl HpuGraph {
    /// A graph that holds nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A graph for a device: on CUDA it is the driver's, made by libtorch, which must have been set up
    /// (`accelerator=cuda`). It has no printed form, and what it cannot hold is reported by CUDA. Not yet run on hardware.
    pub fn on(device: Device) -> Self {
        let cuda = if let Device::Cuda(index) = device { Some((index, None)) } else { None };
        Self { state: RefCell::new(GraphState { cuda, ..GraphState::default() }) }
    }

    /// The same with the passes of [`compile`](super::compile()) over what is captured, unless the environment turns them off.
    #[must_use]
    pub(crate) fn compiled(mut self) -> Self {
        self.state.get_mut().passes = Passes::of(Some(CompileConfig::default()));
        self
    }

    /// Gives the weights of `module` their names, for messages and when the graph is printed.
    pub fn name_weights(&self, module: &dyn Module) {
        self.state.borrow_mut().names.extend(named_tensors(module));
    }

    /// Captures what `code` does, and gives back what it returns. What was captured before is dropped. The graph is used
    /// by `&self`, so that a step can capture into a field of its module, and replay it.
    ///
    /// ```
    /// use voltaic::graph::{HpuGraph, StaticTensor};
    /// use voltaic::{Kind, Tensor};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let input = StaticTensor::new(Tensor::ones([2, 3], (Kind::Float, tch::Device::Cpu)));
    /// let graph = HpuGraph::new();
    /// let doubled = graph.capture(|| Ok(input.get().f_mul_scalar(2.0)?))?;
    /// input.copy_(&Tensor::full([2, 3], 4.0, (Kind::Float, tch::Device::Cpu)))?;
    /// graph.replay()?;
    /// assert_eq!(doubled.double_value(&[1, 2]), 8.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of `code`, after which the capture is abandoned; as [`HpuGraph::capture_begin`] and
    /// [`HpuGraph::capture_end`].
    pub fn capture<R>(&self, code: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
        let guard = graph(self)?;
        let result = code()?;
        guard.end()?;
        Ok(result)
    }

    /// Captures what this thread does from now on. What was captured before is dropped.
    ///
    /// # Errors
    /// [`GraphError::CaptureInProgress`] if this thread captures already.
    pub fn capture_begin(&self) -> Result<()> {
        check_not_capturing("capture_begin")?;
        let state = &mut *self.state.borrow_mut();
        state.graph = CompiledGraph::default();
        state.inputs.clear();
        match &mut state.cuda {
            Some((index, graph)) => {
                *graph = None; // with its memory, before there is another
                *graph = Some(CudaGraph::begin(*index)?);
            }
            None => state.capture = Some(Capture::begin()?),
        }
        state.is_capturing = true;
        state.held = Some(state.held_now()?);
        CAPTURED_STEPS.set(0);
        Ok(())
    }

    /// Tensors that [`HpuGraph::replay_with`] will be given others for. To be called during a capture.
    ///
    /// # Errors
    /// [`GraphError::NotCapturing`] outside one.
    pub fn mark_user_inputs(&self, inputs: &[&Tensor]) -> Result<()> {
        let mut state = self.state.borrow_mut();
        if !state.is_capturing {
            return Err(GraphError::NotCapturing.into());
        }
        state.inputs = inputs.iter().map(|input| input.shallow_clone()).collect();
        Ok(())
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// [`GraphError::NotCapturable`] for the first operator that cannot be replayed: then this graph holds nothing.
    /// [`GraphError::NotCapturing`] without [`HpuGraph::capture_begin`].
    pub fn capture_end(&self) -> Result<()> {
        let state = &mut *self.state.borrow_mut();
        if !std::mem::take(&mut state.is_capturing) {
            return Err(GraphError::NotCapturing.into());
        }
        if let Some((held, _)) = &mut state.held {
            held.take_lists(); // the first region of autocast may have set them up
        }
        if let Some((_, graph)) = &mut state.cuda {
            let ended = graph.as_mut().map_or(Ok(()), CudaGraph::end);
            *graph = graph.take().filter(|_| ended.is_ok());
            ended?;
            state.note_captured();
            return Ok(());
        }
        let Some(capture) = state.capture.take() else { return Err(GraphError::NotCapturing.into()) };
        let recordings = capture.end()?;
        let graphs = recordings.graphs(&state.names)?;
        state.graph = recordings.compile(graphs, &state.inputs, state.passes)?;
        state.note_captured();
        MadeInCapture::note(state.graph.graphs());
        Ok(())
    }

    /// Whether there is something to replay.
    pub fn is_captured(&self) -> bool {
        let state = self.state.borrow();
        !state.is_capturing && !state.is_empty()
    }

    /// Does what was captured once more.
    ///
    /// # Errors
    /// [`GraphError::OtherConditions`] if another grad mode, autocast or interceptor of calls holds than when the capture began, or a
    /// named weight was frozen or unfrozen; [`GraphError::TensorGone`] if a tensor that was there before the capture is not there any more;
    /// [`GraphError::NothingCaptured`]; what a kernel reports.
    pub fn replay(&self) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.check_ready()?;
        match &mut state.cuda {
            Some((_, Some(graph))) => graph.replay()?,
            _ => drop(state.graph.replay(None)?),
        }
        state.note_replayed();
        Ok(())
    }

    /// The same with other tensors in place of those given to [`HpuGraph::mark_user_inputs`]. They are read where they
    /// are, without a copy if they are laid out as those.
    ///
    /// # Errors
    /// [`GraphError::InputMismatch`] if shape, dtype or device of one differ; as [`HpuGraph::replay`].
    pub fn replay_with(&self, inputs: &[&Tensor]) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.check_ready()?;
        check_inputs(&state.inputs, inputs)?;
        if state.cuda.is_some() {
            fill(&state.inputs, inputs)?;
            drop(state);
            return self.replay();
        }
        let inputs: Vec<Tensor> = inputs.iter().map(|input| input.shallow_clone()).collect();
        state.graph.replay(Some(&inputs))?;
        state.note_replayed();
        Ok(())
    }

    /// Drops what was captured, with its memory.
    pub fn reset(&self) {
        let mut state = self.state.borrow_mut();
        state.abort();
        state.cuda = state.cuda.take().map(|(index, _)| (index, None));
        state.graph = CompiledGraph::default();
        state.inputs.clear();
    }

    /// The recorded operators: one graph for each part between two `mark_step`s.
    pub fn graphs(&self) -> impl Iterator<Item = Arc<Graph>> + use<> {
        self.each(|segment| Arc::clone(&segment.graph))
    }

    /// What a replay of each part runs, and the memory it needs.
    pub fn stats(&self) -> impl Iterator<Item = PlanStats> + use<> {
        self.each(|segment| segment.stats)
    }

    /// Counts of the replays of each part. Kernels are given the memory that they had before, so that nothing is
    /// allocated or copied unless a kernel takes memory elsewhere or in other pieces.
    pub fn replay_stats(&self) -> impl Iterator<Item = ReplayStats> + use<> {
        self.each(Segment::replay_stats)
    }

    fn each<T>(&self, what: impl Fn(&Segment) -> T) -> std::vec::IntoIter<T> {
        self.state.borrow().graph.segments.iter().map(what).collect::<Vec<T>>().into_iter()
    }
}

impl GraphState {
    fn check_ready(&self) -> Result<()> {
        if self.is_capturing {
            return Err(GraphError::CaptureInProgress { what: "replay" }.into());
        }
        if self.is_empty() {
            return Err(GraphError::NothingCaptured.into());
        }
        self.check_held()?;
        match OUTDATED.with_borrow(Clone::clone).filter(|_| self.optimizer_steps > 0) {
            Some(what) => Err(GraphError::Outdated { what }.into()),
            None => Ok(()),
        }
    }

    /// What holds now that a capture depends on.
    fn held_now(&self) -> Result<(Conditions, Vec<bool>)> {
        let mut devices = vec![Device::Cpu, Device::Hpu(0)];
        devices.extend(self.cuda.as_ref().map(|(index, _)| Device::Cuda(*index)));
        let trained = self.names.iter().map(|(_, tensor)| tensor.requires_grad()).collect();
        Ok((Conditions::now(&devices, ffi::grad_is_enabled())?, trained))
    }

    /// Refuses a replay of what would be captured otherwise now.
    fn check_held(&self) -> Result<()> {
        let Some((then, were_trained)) = &self.held else { return Ok(()) };
        let (now, are_trained) = self.held_now()?;
        let trained = |is| if is { "trained" } else { "frozen" };
        let mut pairs = self.names.iter().zip(were_trained.iter().zip(are_trained));
        let changed = || {
            let ((name, _), (was, is)) = pairs.find(|(_, (was, is))| **was != *is)?;
            Some(format!("while `{name}` was {}, and is used while it is {}", trained(*was), trained(is)))
        };
        match then.difference(&now).or_else(changed) {
            Some(difference) => Err(GraphError::OtherConditions { difference }.into()),
            None => Ok(()),
        }
    }

    fn is_empty(&self) -> bool {
        self.cuda.as_ref().map_or(self.graph.is_empty(), |(_, graph)| graph.is_none())
    }

    fn note_captured(&mut self) {
        self.optimizer_steps = CAPTURED_STEPS.get();
        USES.set(GraphUses { captured: USES.get().captured + 1, ..USES.get() });
    }

    fn note_replayed(&self) {
        REPLAYED_STEPS.set(REPLAYED_STEPS.get() + self.optimizer_steps);
        USES.set(GraphUses { replayed: USES.get().replayed + 1, ..USES.get() });
    }

    fn abort(&mut self) {
        if !std::mem::take(&mut self.is_capturing) {
            return;
        }
        self.capture = None;
        if let Some((_, graph)) = &mut self.cuda {
            *graph = None;
        }
    }
}

impl Drop for HpuGraph {
    fn drop(&mut self) {
        self.state.get_mut().abort();
    }
}

no_weights!(HpuGraph);

/// Captures into a graph until [`CaptureGuard::end`]; dropped before, the capture is abandoned.
#[derive(Debug)]
#[must_use = "the capture is abandoned when the guard is dropped; call end()"]
pub struct CaptureGuard<'a> {
    graph: &'a HpuGraph,
}

/// Captures what this thread does into `graph` until the guard's end: `with htcore.hpu.graph(g):`, where
/// [`HpuGraph::capture`] does not fit.
///
/// # Errors
/// [`GraphError::CaptureInProgress`].
pub fn graph(graph: &HpuGraph) -> Result<CaptureGuard<'_>> {
    graph.capture_begin()?;
    Ok(CaptureGuard { graph })
}

impl CaptureGuard<'_> {
    /// Ends the capture.
    ///
    /// # Errors
    /// As [`HpuGraph::capture_end`].
    pub fn end(self) -> Result<()> {
        self.graph.capture_end()
    }
}

impl Drop for CaptureGuard<'_> {
    fn drop(&mut self) {
        self.graph.state.borrow_mut().abort();
    }
}
