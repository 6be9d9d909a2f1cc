//! One call of a module as a graph: its forward pass, and with grad its backward pass too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;

use super::capture::{Capture, scoped_by_fqn};
use super::compiled::CompiledGraph;
use super::ir::Graph;
use super::passes::Passes;
use super::places::{
    Mark, any_missing, any_within, check_inputs, copy_like, fill, missing, numbered, placeholder_for,
    write_back,
};
use super::plan::PlanStats;
use super::recordings::{Recordings, check_same, named_tensors};
use crate::device::Device;
use crate::error::{Error, GraphError, Problem, Result};
use crate::ffi::{self, ReplayStats};
use crate::nn::{Module, ModuleExt, refuse_kept, te};

/// A captured call. Its inputs lie at fixed places, and so do its outputs unless they are given away; each replay
/// overwrites these places.
#[derive(Debug)]
pub(super) struct CapturedCall {
    forward: CompiledGraph,
    inputs: Vec<Tensor>,
    /// None where each replay makes a new one, which is the caller's alone.
    outputs: Vec<Option<Tensor>>,
    /// The caller gets copies of the others.
    copies_outputs: bool,
    /// The inputs must be at their places: the backward pass reads them, an output is a view of one, or they are written
    /// to.
    needs_copies: bool,
    /// There if an output has a gradient.
    backward: Option<Arc<Backward>>,
    /// The inputs that calls write to, as the caller is to see.
    written: Vec<usize>,
    gives_back: bool,
}

/// How a call is captured.
#[derive(Debug, Clone, Copy)]
pub(super) struct HowCaptured {
    pub(super) outputs: Outputs,
    pub(super) passes: Passes,
    /// What a call writes to its inputs is copied to the caller's.
    pub(super) gives_back: bool,
    /// Without a backward pass, what depends on weights alone is computed once.
    pub(super) freezes: bool,
}

/// Whose the outputs of a replay are that has no backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outputs {
    /// The graph's: the next replay overwrites them.
    Shared,
    /// Copies of the graph's.
    Copied,
    /// The caller's alone: the graph keeps nothing of them.
    GivenAway,
}

/// A module's forward pass on some tensors.
pub type Call<'a> = &'a dyn Fn(&[Tensor]) -> anyhow::Result<Vec<Tensor>>;

/// The graphs of one module's calls.
pub trait CallGraphs: std::fmt::Debug + Send + 'static {
    /// A call of the module by a graph; by `code` where there is none for it.
    ///
    /// # Errors
    /// The module's own; what a kernel reports.
    fn run(
        &self,
        module: &dyn Module,
        is_training: bool,
        inputs: &[Tensor],
        code: Call,
    ) -> anyhow::Result<Vec<Tensor>>;

    /// Counts of the replays of each graph: forward, then backward if it has one. Empty on a Gaudi card.
    fn replay_stats(&self) -> Vec<ReplayStats>;
}

/// The backward pass, shared with autograd's graphs of the calls.
#[derive(Debug)]
struct Backward {
    module: &'static str,
    /// Number of the forward pass that no backward pass has followed yet; 0 if there is none.
    pending: AtomicU64,
    state: Mutex<BackwardState>,
}

#[derive(Debug)]
struct BackwardState {
    graph: CompiledGraph,
    /// Forward passes so far.
    forwards: u64,
    /// Which outputs have a gradient.
    is_output_trained: Vec<bool>,
    /// For those outputs.
    grad_outputs: Vec<Tensor>,
    /// Which inputs of the call have a gradient.
    is_input_trained: Vec<bool>,
    /// Parameters that have one, as they were captured.
    params: Vec<Tensor>,
    /// For the trained inputs, then the parameters.
    grad_inputs: Vec<Option<Tensor>>,
    /// The gradients of the outputs must be at their places: one of an input is a view of them.
    needs_copies: bool,
    /// The forward pass and its inputs, if the graph is not used again: their memory is read.
    forward: Option<(CompiledGraph, Vec<Tensor>)>,
}

impl CapturedCall {
    /// Runs `call` of `module` on copies of the inputs while it is captured, and with grad its backward pass on zeros.
    /// Returns the results of this call, too.
    ///
    /// # Errors
    /// `call`'s own; a [`GraphError`] beside the results if it cannot be captured.
    pub(super) fn capture(
        module: &dyn Module,
        inputs: &[Tensor],
        with_grad: bool,
        how: HowCaptured,
        call: Call,
    ) -> anyhow::Result<(Result<Self>, Vec<Tensor>)> {
        let recorded = Recorded::of(module, inputs, with_grad, call)?;
        let written = if how.gives_back { recorded.give_back(inputs)? } else { Vec::new() };
        match recorded.graphs().and_then(|_| check_written(&written)) {
            Ok(()) => {
                let (mut captured, outputs, kept) = Self::compile(recorded, module, how)?;
                captured.written = written.into_iter().map(|input| input.index).collect();
                let results = captured.results(inputs, outputs)?;
                match kept {
                    Ok(()) => Ok((Ok(captured), results)),
                    Err(error) => {
                        captured.leave_to_backward();
                        Ok((Err(error), results))
                    }
                }
            }
            Err(error @ Error::Graph(_)) => Ok((Err(error), recorded.results)),
            Err(error) => Err(error.into()),
        }
    }

    /// Also gives the outputs that are the caller's, and whether calls to come can be replayed.
    fn compile(
        mut recorded: Recorded,
        module: &dyn Module,
        HowCaptured { outputs: kind, passes, gives_back, freezes }: HowCaptured,
    ) -> Result<(Self, Vec<Tensor>, Result<()>)> {
        let results = std::mem::take(&mut recorded.results);
        let outputs: Vec<Tensor> = results.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
        drop(results); // with autograd's graph: what it alone holds of the code's is a constant
        let mut graphs = recorded.graphs()?;
        let is_kept = recorded.check_kept(&graphs, &outputs);
        let Recorded { places, forward, backward, .. } = recorded;
        let backward_graphs = graphs.split_off(forward.num_parts());
        let gives_away = kind == Outputs::GivenAway && backward.is_none();
        let asked: &[Tensor] = if gives_away { &outputs } else { &[] };
        let of_forward = if freezes && backward.is_none() { passes.freezing() } else { passes };
        let (forward, mut given_away) =
            forward.compile_giving(graphs, (&places, asked), of_forward, &weights_of(module))?;
        given_away.resize(outputs.len(), false);
        let backward = backward.map(|backward| backward.compile(backward_graphs, module, &places, passes));
        let backward = backward.transpose()?;
        let (mut kept, mut given) = (Vec::new(), Vec::new());
        for (output, is_given) in outputs.into_iter().zip(given_away) {
            kept.push((!is_given).then(|| output.shallow_clone()));
            given.extend(is_given.then_some(output));
        }
        let needs_copies = backward.is_some()
            || any_within(kept.iter().flatten(), &places)
            || forward.writes_to_named(INPUT);
        let captured = Self {
            forward,
            inputs: places,
            outputs: kept,
            copies_outputs: kind != Outputs::Shared,
            needs_copies,
            backward: backward.map(Arc::new),
            written: Vec::new(),
            gives_back,
        };
        Ok((captured, given, is_kept))
    }

    /// Runs `call` once more while it is captured, to find out whether the graph would have done the same: what the code
    /// takes from the host, such as a factor, may change from call to call. Returns the results of the code.
    ///
    /// # Errors
    /// `call`'s own; a [`GraphError`] beside the results if the graph is of no use.
    pub(super) fn check(
        &self,
        module: &dyn Module,
        inputs: &[Tensor],
        with_grad: bool,
        call: Call,
    ) -> anyhow::Result<(Result<()>, Vec<Tensor>)> {
        let recorded = Recorded::of(module, inputs, with_grad, call)?;
        if self.gives_back {
            recorded.give_back(inputs)?;
        }
        let checked = recorded.graphs().and_then(|now| {
            let backward = self.backward.as_ref().map(|backward| backward.lock());
            let before = self.forward.graphs().chain(backward.iter().flat_map(|state| state.graph.graphs()));
            check_same(before, &now)
        });
        match checked {
            Err(error) if !matches!(error, Error::Graph(_)) => Err(error.into()),
            checked => Ok((checked, recorded.results)),
        }
    }

    /// Ends the use of the graph, but for the backward pass of the call that was captured.
    pub(super) fn leave_to_backward(self) {
        if let Some(backward) = &self.backward {
            backward.lock().forward = Some((self.forward, self.inputs));
        }
    }

    /// Whether a backward pass is still to come, for which this graph's memory must stay as it is.
    pub(super) fn is_busy(&self) -> bool {
        self.backward.as_ref().is_some_and(|backward| backward.pending.load(Ordering::Acquire) != 0)
    }

    /// Whether inputs lie in memory as those of the capture do, as far as they have their shapes.
    pub(super) fn has_layout_of(&self, inputs: &[Tensor]) -> bool {
        let mut pairs = self.inputs.iter().zip(inputs);
        pairs.all(|(place, input)| place.size() != input.size() || place.stride() == input.stride())
    }

    /// Runs the call once more with other inputs, laid out as those of the capture. With a backward pass the results are
    /// tensors of their own.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], [`GraphError::InputMismatch`], [`GraphError::ShapeChanged`].
    pub(super) fn replay(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        check_inputs(&self.inputs, &inputs.iter().collect::<Vec<_>>())?;
        let given = if self.needs_copies {
            fill(&self.inputs, inputs)?;
            self.forward.replay(None)?
        } else {
            self.forward.replay(Some(inputs))?
        };
        for &index in &self.written {
            write_back(&self.inputs[index], &inputs[index], false)?;
        }
        self.results(inputs, given)
    }

    /// What the forward pass has just computed, with its history; `given` are the outputs that it gave away.
    fn results(&self, inputs: &[Tensor], given: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let mut given = given.into_iter();
        let copies = self.copies_outputs || self.backward.is_some();
        let mut result = |output: &Option<Tensor>| match output {
            Some(output) if copies => copy_like(output),
            Some(output) => Ok(output.shallow_clone()),
            None => given.next().ok_or_else(|| GraphError::NothingCaptured.into()),
        };
        let results = self.outputs.iter().map(&mut result).collect::<Result<Vec<_>>>()?;
        if let Some(backward) = &self.backward {
            let number = backward.count_forward();
            if ffi::grad_is_enabled() {
                backward.attach(number, inputs, &results)?;
            }
        }
        Ok(results)
    }

    /// The plans of both passes.
    pub(super) fn plan_stats(&self) -> Vec<PlanStats> {
        let mut stats: Vec<PlanStats> = self.forward.plan_stats().collect();
        if let Some(backward) = &self.backward {
            stats.extend(backward.lock().graph.plan_stats());
        }
        stats
    }

    /// Counts of the replays of both passes.
    pub(super) fn replay_stats(&self) -> Vec<ReplayStats> {
        let mut stats: Vec<ReplayStats> = self.forward.replay_stats().collect();
        if let Some(backward) = &self.backward {
            stats.extend(backward.lock().graph.replay_stats());
        }
        stats
    }
}

/// Names of what the forward pass and the backward pass are given; a number follows.
const INPUT: &str = "input";
const GRADIENT: &str = "gradient of output";

/// An input that a call writes to.
struct WrittenInput {
    index: usize,
    /// The write is part of what has gradients.
    has_history: bool,
}

/// A call that ran while it was captured.
struct Recorded {
    places: Vec<Tensor>,
    /// Of the places, before the call.
    marks: Vec<Mark>,
    results: Vec<Tensor>,
    names: Vec<(String, Tensor)>,
    forward: Recordings,
    /// There if a result has a history.
    backward: Option<RecordedBackward>,
}

/// The backward pass of a call on zeros, while it was captured.
struct RecordedBackward {
    step: Recordings,
    is_output_trained: Vec<bool>,
    grad_outputs: Vec<Tensor>,
    grad_inputs: Vec<Option<Tensor>>,
}

impl Recorded {
    fn of(module: &dyn Module, inputs: &[Tensor], with_grad: bool, call: Call) -> anyhow::Result<Self> {
        refuse_kept(module, "a captured call")?;
        let places = inputs.iter().map(|input| place_for(input, with_grad)).collect::<Result<Vec<_>>>()?;
        let marks = places.iter().map(Mark::of).collect::<Result<Vec<_>>>()?;
        let mut names: Vec<(String, Tensor)> = numbered(INPUT, &places).collect();
        names.extend(named_tensors(module));
        let capture = Capture::begin()?;
        let results = scoped_by_fqn(module, || call(&places))??;
        let forward = capture.end()?;
        let mut recorded = Self { places, marks, results, names, forward, backward: None };
        let is_trained = recorded.results.iter().any(Tensor::requires_grad);
        if is_trained && !any_missing(&recorded.results) && recorded.forward.read(&recorded.names).is_ok() {
            let backward = RecordedBackward::of(module, &recorded.places, &recorded.results)?;
            recorded.names.extend(numbered(GRADIENT, &backward.grad_outputs));
            recorded.backward = Some(backward);
        }
        Ok(recorded)
    }

    /// The operators of the forward pass, then those of the backward pass; an error if they cannot be replayed.
    fn graphs(&self) -> Result<Vec<Graph>> {
        if any_missing(&self.results) {
            return Err(missing("an output").into());
        }
        let backward = self.backward.as_ref().map(|backward| &backward.step);
        self.forward.read_with(backward, &self.names)
    }

    /// Copies what the forward pass has written to its inputs to those of the caller, and tells which these are.
    fn give_back(&self, inputs: &[Tensor]) -> Result<Vec<WrittenInput>> {
        let graphs = self.forward.graphs(&self.names)?;
        let mut written = Vec::new();
        for (index, (place, mark)) in self.places.iter().zip(&self.marks).enumerate() {
            let name = format!("{INPUT} {index}");
            if graphs.iter().any(|graph| graph.writes_to_tensor(&name)) {
                let has_history = mark.has_new_history(place)?;
                write_back(place, &inputs[index], has_history)?;
                written.push(WrittenInput { index, has_history });
            }
        }
        Ok(written)
    }

    /// Refuses what the module keeps for itself. Autograd must not hold anything any more.
    fn check_kept(&self, graphs: &[Graph], outputs: &[Tensor]) -> Result<()> {
        let backward = self.backward.as_ref();
        let grads = backward.into_iter().flat_map(|backward| backward.grad_inputs.iter().flatten());
        let known: Vec<&Tensor> = outputs.iter().chain(grads).collect();
        let steps = [&self.forward].into_iter().chain(backward.map(|backward| &backward.step));
        Recordings::check_kept(steps.flat_map(Recordings::recordings), graphs, &known)
    }
}

impl RecordedBackward {
    fn of(module: &dyn Module, places: &[Tensor], results: &[Tensor]) -> Result<Self> {
        let trained =
            |tensors: &[Tensor]| -> Vec<bool> { tensors.iter().map(Tensor::requires_grad).collect() };
        let outputs: Vec<Tensor> =
            results.iter().filter(|result| result.requires_grad()).map(Tensor::shallow_clone).collect();
        let mut leaves: Vec<Tensor> =
            places.iter().filter(|place| place.requires_grad()).map(Tensor::shallow_clone).collect();
        leaves.extend(trained_params(module));
        let zeros = |output: &Tensor| Ok(output.f_detach()?.f_zeros_like()?);
        let grad_outputs = outputs.iter().map(zeros).collect::<Result<Vec<_>>>()?;
        let device = Device::of(&outputs[0])?;
        let (was_casting, dtype) = ffi::autocast_state(device)?;
        ffi::set_autocast_state(device, false, dtype)?; // backward runs outside autocast
        let captured = te::not_counted(module, device, || {
            let capture = Capture::begin()?;
            let grads = ffi::autograd_grad(&outputs, &grad_outputs, &leaves)?;
            Ok((grads, capture.end()?))
        });
        ffi::set_autocast_state(device, was_casting, dtype)?;
        let (grad_inputs, step) = captured?;
        Ok(Self { step, is_output_trained: trained(results), grad_outputs, grad_inputs })
    }

    fn compile(
        self,
        graphs: Vec<Graph>,
        module: &dyn Module,
        places: &[Tensor],
        passes: Passes,
    ) -> Result<Backward> {
        let Self { step, is_output_trained, grad_outputs, grad_inputs } = self;
        let graph = step.compile(graphs, &grad_outputs, passes)?;
        let needs_copies =
            any_within(grad_inputs.iter().flatten(), &grad_outputs) || graph.writes_to_named(GRADIENT);
        let state = BackwardState {
            graph,
            forwards: 0,
            is_output_trained,
            grad_outputs,
            is_input_trained: places.iter().map(Tensor::requires_grad).collect(),
            params: trained_params(module),
            grad_inputs,
            needs_copies,
            forward: None,
        };
        let module = module.type_name();
        Ok(Backward { module, pending: AtomicU64::new(0), state: Mutex::new(state) })
    }
}

/// Refuses what autograd knows of a write to an input: a replay would not give the input that history.
fn check_written(written: &[WrittenInput]) -> Result<()> {
    let Some(WrittenInput { index, .. }) = written.iter().find(|input| input.has_history) else {
        return Ok(());
    };
    let what = format!("what it writes to {INPUT} {index} requires grad");
    Err(GraphError::Arguments { problem: Problem::new(what, "change a copy of the input") }.into())
}

/// A copy of an input, laid out as it is. With grad it leads to the input, should the results of the capture be all there is.
fn place_for(input: &Tensor, with_grad: bool) -> Result<Tensor> {
    if !input.defined() {
        return Err(missing("an input").into());
    }
    let Some(place) = placeholder_for(input)? else {
        let (size, stride) = (input.size(), input.stride());
        let what = format!("elements of an input of shape {size:?} and strides {stride:?} share memory");
        let remedy = "give a copy of it (contiguous)".to_owned();
        return Err(GraphError::Arguments { problem: Problem::new(what, remedy) }.into());
    };
    if with_grad && input.requires_grad() {
        ffi::autograd_function([input], std::slice::from_ref(&place), |grads| {
            Ok(grads.iter().map(|grad| grad.defined().then(|| grad.shallow_clone())).collect())
        })?;
    }
    Ok(place)
}

impl Backward {
    fn lock(&self) -> std::sync::MutexGuard<'_, BackwardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the memory of a forward pass is overwritten by another one, and gives that its number.
    fn count_forward(&self) -> u64 {
        let mut state = self.lock();
        state.forwards += 1;
        state.forwards
    }

    /// Gives the outputs of a forward pass their history.
    fn attach(self: &Arc<Self>, number: u64, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let state = self.lock();
        let of_function = |(output, is_trained): (&Tensor, &bool)| is_trained.then(|| output.shallow_clone());
        let outputs: Vec<Tensor> =
            outputs.iter().zip(&state.is_output_trained).filter_map(of_function).collect();
        let inputs = inputs.iter().zip(&state.is_input_trained).filter(|(_, is_trained)| **is_trained);
        let leaves: Vec<Tensor> =
            inputs.map(|(input, _)| input).chain(&state.params).map(Tensor::shallow_clone).collect();
        drop(state);
        self.pending.store(number, Ordering::Release);
        let pending = Pending { backward: self.clone(), number };
        ffi::autograd_function(&leaves, &outputs, move |grads| {
            let grads = pending.backward.run(grads, pending.number)?;
            pending.end();
            Ok(grads)
        })?;
        Ok(())
    }

    /// Gradients of the trained inputs and the parameters. Those of parameters are the graph's own, which autograd copies.
    fn run(&self, grads: &[Tensor], number: u64) -> Result<Vec<Option<Tensor>>> {
        let mut state = self.lock();
        if state.forwards != number {
            return Err(GraphError::Overwritten { module: self.module.to_owned() }.into());
        }
        let given = grads
            .iter()
            .zip(&state.grad_outputs)
            .map(
                |(grad, place)| {
                    if grad.defined() { Ok(grad.shallow_clone()) } else { Ok(place.f_zeros_like()?) }
                },
            )
            .collect::<Result<Vec<_>>>()?;
        if state.needs_copies {
            fill(&state.grad_outputs, &given)?;
            state.graph.replay(None)?;
        } else {
            check_inputs(&state.grad_outputs, &given.iter().collect::<Vec<_>>())?;
            state.graph.replay(Some(&given))?;
        }
        let num_inputs = state.grad_inputs.len() - state.params.len();
        let grad = |(index, grad): (usize, &Option<Tensor>)| match grad {
            Some(grad) if index < num_inputs => copy_like(grad).map(Some),
            grad => Ok(grad.as_ref().map(Tensor::shallow_clone)),
        };
        state.grad_inputs.iter().enumerate().map(grad).collect()
    }
}

/// All parameters.
fn weights_of(module: &dyn Module) -> Vec<Tensor> {
    module.parameters().iter().map(|parameter| parameter.leaf().shallow_clone()).collect()
}

/// Parameters that are trained.
pub(super) fn trained_params(module: &dyn Module) -> Vec<Tensor> {
    let parameters = module.parameters();
    let trained = parameters.iter().filter(|parameter| parameter.requires_grad());
    trained.map(|parameter| parameter.leaf().shallow_clone()).collect()
}

/// A forward pass whose backward pass is still to come, until it has or autograd's graph is dropped.
struct Pending {
    backward: Arc<Backward>,
    number: u64,
}

impl Pending {
    fn end(&self) {
        // one that is not the last has no say
        _ = self.backward.pending.compare_exchange(self.number, 0, Ordering::AcqRel, Ordering::Acquire);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.end();
    }
}
