//! One call of a module as a graph: its forward pass, and with grad its backward pass too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;

use super::hpu_graph::{HpuGraph, check_inputs};
use super::step::{copy_of, fill};
use crate::device::Device;
use crate::error::{Error, GraphError, Result};
use crate::ffi::{self, ReplayStats};
use crate::nn::{Module, ModuleExt};

/// A captured call. Its inputs and outputs lie at fixed places, which each replay overwrites.
#[derive(Debug)]
pub(super) struct CapturedCall {
    forward: HpuGraph,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    /// The inputs must be at their places: the backward pass reads them, or an output is a view of one.
    needs_copies: bool,
    /// There if an output has a gradient.
    backward: Option<Arc<Backward>>,
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
    graph: HpuGraph,
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
        call: &dyn Fn(&[Tensor]) -> anyhow::Result<Vec<Tensor>>,
    ) -> anyhow::Result<(Result<Self>, Vec<Tensor>)> {
        let places = inputs.iter().map(|input| place_for(input, with_grad)).collect::<Result<Vec<_>>>()?;
        let mut forward = HpuGraph::new();
        forward.name_weights(module);
        forward.capture_begin()?;
        forward.mark_user_inputs(&places.iter().collect::<Vec<_>>())?;
        let results = call(&places)?;
        match forward.capture_end().and_then(|()| Backward::capture(module, &places, &results)) {
            Ok(backward) => {
                let outputs = results.iter().map(Tensor::f_detach).collect::<Result<Vec<_>, _>>()?;
                drop(results); // and autograd's graph with its tensors
                let needs_copies = backward.is_some() || any_within(&outputs, &places);
                let backward = backward.map(Arc::new);
                let captured = Self { forward, inputs: places, outputs, needs_copies, backward };
                let results = captured.results(inputs)?;
                Ok((Ok(captured), results))
            }
            Err(error @ Error::Graph(_)) => Ok((Err(error), results)),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a backward pass is still to come, for which this graph's memory must stay as it is.
    pub(super) fn is_busy(&self) -> bool {
        self.backward.as_ref().is_some_and(|backward| backward.pending.load(Ordering::Acquire) != 0)
    }

    /// Runs the call once more with other inputs. With a backward pass the results are tensors of their own, else those
    /// that the next replay overwrites.
    ///
    /// # Errors
    /// [`GraphError::TensorGone`], [`GraphError::InputMismatch`].
    pub(super) fn replay(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let given: Vec<&Tensor> = inputs.iter().collect();
        if self.needs_copies {
            check_inputs(&self.inputs, &given)?;
            fill(&self.inputs, inputs)?;
            self.forward.replay()?;
        } else {
            self.forward.replay_with(&given)?;
        }
        self.results(inputs)
    }

    /// What the forward pass has just computed, with its history.
    fn results(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let Some(backward) = &self.backward else {
            return Ok(self.outputs.iter().map(Tensor::shallow_clone).collect());
        };
        let outputs = self.outputs.iter().map(copy_of).collect::<Result<Vec<_>>>()?;
        let number = backward.count_forward();
        if ffi::grad_is_enabled() {
            backward.attach(number, inputs, &outputs)?;
        }
        Ok(outputs)
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

/// Whether one of the tensors lies within the memory of one of the places, which have no gaps.
pub(crate) fn any_within<'a>(tensors: impl IntoIterator<Item = &'a Tensor>, places: &[Tensor]) -> bool {
    let range = |place: &Tensor| {
        let start = place.data_ptr().addr();
        start..start + place.numel() * place.kind().elt_size_in_bytes()
    };
    let places: Vec<_> = places.iter().map(range).collect();
    tensors.into_iter().any(|tensor| places.iter().any(|place| place.contains(&tensor.data_ptr().addr())))
}

/// A copy of an input. With grad it leads to the input, should the results of the capture be all there is.
fn place_for(input: &Tensor, with_grad: bool) -> Result<Tensor> {
    let place = copy_of(input)?;
    if with_grad && input.requires_grad() {
        ffi::autograd_function([input], std::slice::from_ref(&place), |grads| {
            Ok(grads.iter().map(|grad| grad.defined().then(|| grad.shallow_clone())).collect())
        })?;
    }
    Ok(place)
}

impl Backward {
    /// Captures the backward pass of `results`; none if they have no history.
    fn capture(module: &dyn Module, places: &[Tensor], results: &[Tensor]) -> Result<Option<Self>> {
        let is_output_trained: Vec<bool> = results.iter().map(Tensor::requires_grad).collect();
        let outputs: Vec<Tensor> =
            results.iter().filter(|result| result.requires_grad()).map(Tensor::shallow_clone).collect();
        if outputs.is_empty() {
            return Ok(None);
        }
        let is_input_trained: Vec<bool> = places.iter().map(Tensor::requires_grad).collect();
        let mut leaves: Vec<Tensor> =
            places.iter().filter(|place| place.requires_grad()).map(Tensor::shallow_clone).collect();
        let params = trained_params(module);
        leaves.extend(params.iter().map(Tensor::shallow_clone));
        let grad_outputs = outputs
            .iter()
            .map(|output| Ok(output.f_detach()?.f_zeros_like()?))
            .collect::<Result<Vec<_>>>()?;

        let mut graph = HpuGraph::new();
        graph.name_weights(module);
        let device = Device::of(&outputs[0])?;
        let (was_casting, dtype) = ffi::autocast_state(device)?;
        ffi::set_autocast_state(device, false, dtype)?; // backward runs outside autocast
        let grads = (|| -> Result<Vec<Option<Tensor>>> {
            graph.capture_begin()?;
            graph.mark_user_inputs(&grad_outputs.iter().collect::<Vec<_>>())?;
            Ok(ffi::autograd_grad(&outputs, &grad_outputs, &leaves)?)
        })(); // a graph that is dropped gives up its capture
        ffi::set_autocast_state(device, was_casting, dtype)?;
        let grad_inputs = grads?;
        graph.capture_end()?;
        let needs_copies = any_within(grad_inputs.iter().flatten(), &grad_outputs);
        let state = BackwardState {
            needs_copies,
            graph,
            forwards: 0,
            is_output_trained,
            grad_outputs,
            is_input_trained,
            params,
            grad_inputs,
        };
        let module = module.type_name();
        Ok(Some(Self { module, pending: AtomicU64::new(0), state: Mutex::new(state) }))
    }

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
            state.graph.replay()?;
        } else {
            state.graph.replay_with(&given.iter().collect::<Vec<_>>())?;
        }
        let num_inputs = state.grad_inputs.len() - state.params.len();
        let grad = |(index, grad): (usize, &Option<Tensor>)| match grad {
            Some(grad) if index < num_inputs => copy_of(grad).map(Some),
            grad => Ok(grad.as_ref().map(Tensor::shallow_clone)),
        };
        state.grad_inputs.iter().enumerate().map(grad).collect()
    }
}

/// Parameters that are trained.
pub(super) fn trained_params(module: &dyn Module) -> Vec<Tensor> {
    let parameters = module.parameters();
    let trained = parameters.iter().filter(|parameter| parameter.requires_grad());
    trained.map(|parameter| parameter.tensor().shallow_clone()).collect()
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
