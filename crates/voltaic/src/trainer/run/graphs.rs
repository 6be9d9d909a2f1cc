//! `trainer.graph=step` and `trainer.compile`: forward and backward of a training step as one graph, and its update as another, both captured by themselves.
//!
//! The first steps run as usual. Then each kind of batch (shapes and dtypes) is captured twice, which costs two eager
//! steps; if both captures are the same graph, it takes the place of the code from then on. What is not the same, or
//! cannot be replayed, is reported once, and the run continues without graphs. Clipping and the optimizer step after a replayed step are
//! captured in the same way as a graph of their own, so that hooks and gradient scaling stay between the two. Learning rates are read
//! again in each replay.

use tch::Tensor;

use crate::data::Batch;
use crate::error::{Error, GraphError, Result};
use crate::ffi::TensorList;
use crate::graph::{self, Conditions, FirstCapture, Graph, InputSignature, Recordings};
use crate::module::{BatchFacts, LightningModule, Logged, NamedTensors, OutputValue, StepHook, StepOutput};
use crate::nn::{ModuleExt, NumberHash, each_parameter};
use crate::precision::LossScale;
use crate::precision::fp8::note_replayed;
use crate::trainer::session::graphs::{GraphState, Ready, Signature, Update};
use crate::trainer::session::hooks::scope;
use crate::trainer::session::session::Session;
use crate::trainer::session::step::{OPTIMIZER_STEP, Step, Window};

/// Name of a tensor of the batch; a number follows.
const INPUT: &str = "input";
/// Name of a gradient that was there before; the fqn of its parameter follows.
const GRADIENT: &str = "gradient of";
/// Steps that run as usual before the first capture: kernels choose their algorithms meanwhile.
const WARM_UP_STEPS: u64 = 3;

/// A step that ran while it was captured.
struct Captured {
    step: Recordings,
    graphs: Vec<Graph>,
    /// Where its batch was.
    inputs: Vec<Tensor>,
    loss: Tensor,
    logged: Vec<Logged>,
    outputs: NamedTensors,
}

impl<M: LightningModule> Session<'_, M> {
    /// Forward and backward of one batch by a graph, or while one is being found, as usual: by `forward_backward`, the code
    /// that is captured. Gives the batch back for the hooks that follow.
    pub(crate) fn graphed_step(
        &mut self,
        batch: M::Batch,
        window: Window,
        facts: BatchFacts,
        forward_backward: &dyn Fn(&mut Self, &M::Batch) -> Result<Tensor>,
    ) -> Result<(M::Batch, Tensor)> {
        let mut inputs = Vec::new();
        let batch = batch.map_tensors(&mut |tensor| {
            inputs.push(tensor.shallow_clone());
            Ok(tensor)
        })?;
        let signature = Signature {
            inputs: inputs.iter().map(InputSignature::of).collect::<Result<_>>()?,
            opens_window: window.opens,
            window_size: window.size,
            loss_scale: self.run.engine.loss_scale.as_ref().map_or(1.0, |scale| scale.get_scale()),
            conditions: Conditions::of_call(self.module, self.plan.device, true)?,
            module: self.graphs.modes.kind(self.module),
            params: self.params_hash(window.opens),
        };
        self.graphs.replayed = None;
        let found = self.graphs.find(&signature);
        if let Some(index) = found
            && let GraphState::Ready(_) = &self.graphs.entries[index].1
        {
            self.hooks_before_graph(window, facts)?;
            if self.module.automatic_optimization() {
                self.note_replayed_backward(window);
            }
            if let Some(loss) = self.replay_step(index, &inputs, facts)? {
                return Ok((batch, loss));
            }
            let loss = self.without_hooks_before(|session| forward_backward(session, &batch))?;
            return Ok((batch, loss));
        }
        let is_warm = self.graphs.report.eager_steps >= WARM_UP_STEPS;
        if found.is_some() || (is_warm && self.has_room(&signature)) {
            return self.capture_step(batch, &inputs, (window, facts), signature, forward_backward);
        }
        self.graphs.report.eager_steps += 1;
        let loss = forward_backward(self, &batch)?;
        Ok((batch, loss))
    }

    /// Records that a replay computes gradients, which it does without `Engine::backward`.
    fn note_replayed_backward(&mut self, window: Window) {
        let engine = &mut self.run.engine;
        let scale = engine.loss_scale.as_ref().map(LossScale::get_scale);
        if window.opens {
            engine.of_call.gradients.begin_window();
        }
        engine.of_call.gradients.begin_backward(window.closes, scale, None);
    }

    /// Runs a step of which the hooks before backward were called already.
    fn without_hooks_before<T>(&mut self, step: impl FnOnce(&mut Self) -> T) -> T {
        self.graphs.called_hooks = true;
        let result = step(self);
        self.graphs.called_hooks = false;
        result
    }

    /// Graphs of another loss scale, or of other lists, are of no use any more; says once if there are too many others.
    fn has_room(&mut self, signature: &Signature) -> bool {
        let graphs = &mut self.graphs;
        let holds = |known: &Signature| {
            known.loss_scale == signature.loss_scale && known.conditions == signature.conditions
        };
        graphs.entries.retain(|(known, _)| holds(known));
        if graphs.entries.len() < graphs.max {
            return true;
        }
        let is_stale = |known: &Signature| {
            !known.module.has_settings_of(&signature.module) || known.params != signature.params
        };
        let is_ready = |state: &GraphState| matches!(state, GraphState::Ready(_));
        if graphs.entries.iter().any(|(known, state)| is_stale(known) && is_ready(state)) {
            graphs.entries.retain(|(known, _)| !is_stale(known));
            return true;
        }
        if graphs.entries.iter().all(|(known, _)| is_stale(known)) {
            graphs.refuse(
                "plain values in fields of the module, or which parameters are trained, change from step to step",
            );
            return false;
        }
        if !std::mem::replace(&mut graphs.is_full, true) {
            tracing::warn!(
                "{}: batches of more than {} shapes; those of {:?} and later ones run without a graph; pad batches to few shapes",
                graphs.key(),
                graphs.max,
                signature.inputs.iter().map(|input| &input.size).collect::<Vec<_>>()
            );
        }
        false
    }

    /// Which parameters are trained, and which have gradients if the step adds to them: hooks may freeze and unfreeze parameters,
    /// and batches before this one may have left some of them out.
    fn params_hash(&self, opens_window: bool) -> u64 {
        let mut hash = NumberHash::new();
        each_parameter(self.module, &mut |parameter| {
            let has_grad = !opens_window && parameter.grad().defined();
            hash.add(u64::from(parameter.requires_grad()) + 2 * u64::from(has_grad));
        });
        hash.get()
    }

    /// Calls what comes before backward in an eager step; in a graphed one they come before forward too.
    fn hooks_before_graph(&mut self, window: Window, facts: BatchFacts) -> Result<()> {
        if window.opens {
            self.call_in_step(StepHook::OnBeforeZeroGrad, facts)?;
        }
        self.call_in_step(StepHook::OnBeforeBackward, facts)
    }

    /// The loss of a batch by a graph; none if the graph turns out to be of no use, and the step is still to be done.
    fn replay_step(&mut self, index: usize, inputs: &[Tensor], facts: BatchFacts) -> Result<Option<Tensor>> {
        let _action = self.profile_strategy("replay")?;
        self.run.log.metrics.enter(scope(Step::Training.facts(), &facts));
        let graphs = &mut self.graphs;
        let (Some(params), Some((_, GraphState::Ready(ready)))) =
            (&graphs.params, graphs.entries.get_mut(index))
        else {
            return Err(GraphError::NothingCaptured.into());
        };
        // a graph that adds to gradients starts from those that are there
        ready.grads.bind_grads(params, ready.adds)?;
        let replayed = match &ready.places {
            Some(places) => {
                graph::fill(places, inputs)?;
                ready.graph.replay(Some(places))
            }
            None => ready.graph.replay(Some(inputs)),
        };
        if let Err(Error::Graph(error @ GraphError::ShapeChanged { is_undone: true, .. })) = &replayed {
            self.graphs.fall_back(error)?;
            return Ok(None);
        }
        replayed?;
        note_replayed();
        self.run.log.metrics.record_again(&ready.logged)?;
        let loss = graph::copy_of(&ready.loss)?;
        self.outputs = copies_of(&ready.outputs)?; // the graph writes to its own again
        graphs.report.replayed_steps += 1;
        graphs.replayed = Some(index);
        graph::count_hit();
        self.check_logged()?;
        Ok(Some(loss))
    }

    /// Runs one batch as usual, on placeholders, while it is captured. The second time the graph is made ready.
    fn capture_step(
        &mut self,
        batch: M::Batch,
        given: &[Tensor],
        (window, facts): (Window, BatchFacts),
        signature: Signature,
        forward_backward: &dyn Fn(&mut Self, &M::Batch) -> Result<Tensor>,
    ) -> Result<(M::Batch, Tensor)> {
        let mut inputs = Vec::with_capacity(given.len());
        for tensor in given {
            let Some(placeholder) = graph::placeholder_for(tensor)? else {
                let (size, stride) = (tensor.size(), tensor.stride());
                self.graphs.refuse(&format!(
                    "elements of a tensor of the batch share memory (shape {size:?}, strides {stride:?}); give a copy (contiguous)"
                ));
                let loss = forward_backward(self, &batch)?;
                return Ok((batch, loss));
            };
            inputs.push(placeholder);
        }
        self.hooks_before_graph(window, facts)?;
        let mut placeholders = inputs.iter().map(Tensor::shallow_clone);
        let batch = batch.map_tensors(&mut |tensor| Ok(placeholders.next().unwrap_or(tensor)))?;
        let scopes = graph::scope_by_fqn(&self.run.facts.module_hooks);
        let capture = graph::Capture::begin().inspect_err(|_| scopes.remove())?;
        self.run.log.metrics.begin_capture();
        let loss: Result<Tensor> = self.without_hooks_before(|session| {
            let loss = forward_backward(session, &batch)?;
            if !loss.defined() {
                graph::refuse_capture("training_step gives no loss");
                return Ok(loss);
            }
            Ok(loss.f_detach()?) // the rest of autograd's graph ends here, and its tensors with it
        });
        let logged = self.run.log.metrics.end_capture();
        let captured = capture.end();
        scopes.remove();
        let mut given_back = given.iter().map(Tensor::shallow_clone);
        let batch = batch.map_tensors(&mut |tensor| Ok(given_back.next().unwrap_or(tensor)))?;
        let loss = loss?; // an error of the step is more to the point than one of the capture
        self.run.log.metrics.record_again(&logged)?;
        self.check_logged()?;
        self.graphs.report.captured_steps += 1;
        graph::count_miss();
        let copy = if loss.defined() { graph::copy_of(&loss)? } else { Tensor::new() };
        let outputs = self.outputs.take_tensors(graph::copy_of)?;
        let ready = captured.and_then(|step| {
            let names = self.tensor_names(&inputs);
            if step.graphs(&names)?.iter().any(|graph| graph.writes_to_named(INPUT)) {
                graph::fill(given, &inputs)?; // as the step would have left the batch
            }
            let graphs = step.read(&names)?;
            self.make_ready(Captured { step, graphs, inputs, loss, logged, outputs }, signature)
        });
        match ready {
            Ok(()) => {}
            Err(Error::Graph(error)) => {
                self.graphs.fall_back(&error)?;
            }
            Err(error) => return Err(error),
        }
        Ok((batch, copy))
    }

    fn make_ready(&mut self, captured: Captured, signature: Signature) -> Result<()> {
        let Captured { step, graphs, inputs, loss, logged, outputs } = captured;
        let own_grads: Vec<Tensor> = self.module.parameters().iter().map(|p| p.grad()).collect();
        let named = || outputs.iter().map(|(_, tensor)| tensor);
        let known = logged.iter().filter_map(Logged::tensor).chain([&loss]).chain(named()).chain(&own_grads);
        step.check_kept_of_step(&graphs, &known.collect::<Vec<_>>())?;
        let Some(index) = self.graphs.find(&signature) else {
            self.graphs.entries.push((signature, GraphState::Seen(step.into_seen(graphs), logged)));
            return Ok(());
        };
        if let GraphState::Seen(before, logged_before) = &self.graphs.entries[index].1 {
            before.check_same(&graphs)?;
            if let Some(name) = Logged::first_difference(logged_before, &logged) {
                let difference = format!("it logs another number or value by `{name}`");
                return Err(GraphError::NotStatic { difference }.into());
            }
        }
        if self.graphs.params.is_none() {
            self.graphs.params = Some(TensorList::new(self.module.parameters().iter().map(|p| p.leaf()))?);
        }
        let mut grads = TensorList::new([])?;
        if let Some(params) = &self.graphs.params {
            grads.fill_with_all_grads(params)?;
        }
        let adds = graphs.iter().any(|graph| graph.uses_named(GRADIENT));
        let graph = step.compile(graphs, &inputs, self.graphs.passes)?;
        graph::label_shown(graph.plan_stats().count(), || {
            let sizes: Vec<&Vec<i64>> = signature.inputs.iter().map(|input| &input.size).collect();
            let adds = if adds { ", which adds to gradients" } else { "" };
            format!("training_step of a batch of {sizes:?}{adds}")
        });
        for stats in graph.plan_stats() {
            tracing::info!(
                "captured training_step for {:?}: {} operators, {} replayed in {} KiB",
                signature.inputs.iter().map(|input| &input.size).collect::<Vec<_>>(),
                stats.num_nodes,
                stats.num_calls,
                stats.arena_bytes / 1024
            );
        }
        let results = logged.iter().filter_map(Logged::tensor).chain([&loss]).chain(named());
        let places = graph::any_within(results, &inputs).then_some(inputs);
        let ready = Ready { graph, places, loss, logged, outputs, grads, adds, update: Update::default() };
        self.graphs.entries[index].1 = GraphState::Ready(Box::new(ready));
        self.graphs.report.graphs =
            self.graphs.entries.iter().filter(|(_, state)| matches!(state, GraphState::Ready(_))).count();
        Ok(())
    }

    /// Tensors that are there before a step, with their names.
    pub(crate) fn tensor_names(&self, inputs: &[Tensor]) -> Vec<(String, Tensor)> {
        let mut names: Vec<(String, Tensor)> = graph::numbered(INPUT, inputs).collect();
        for (fqn, parameter) in self.module.named_parameters() {
            let grad = parameter.grad();
            if grad.defined() {
                names.push((format!("{GRADIENT} {fqn}"), grad));
            }
        }
        names.extend(graph::named_tensors(self.module));
        names
    }
}

/// What hooks are given: tensors that no later replay writes to.
fn copies_of(outputs: &NamedTensors) -> Result<StepOutput> {
    let mut copies = StepOutput::default();
    for (name, tensor) in outputs {
        copies.put(name.clone(), OutputValue::Tensor(graph::copy_of(tensor)?));
    }
    Ok(copies)
}

/// How often an update may turn out to be another one before that is taken to be the rule.
const MAX_CHANGES: u64 = 10;

impl<M: LightningModule> Session<'_, M> {
    /// Clips and steps the optimizers by a graph, or by `update` while that is captured; `false` if this is left to be done
    /// as usual, since the gradients are not those of a replayed step, or there can be no graph.
    pub(crate) fn graphed_update(
        &mut self,
        facts: BatchFacts,
        update: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<bool> {
        if self.graphs.replayed.is_none() || self.graphs.report.update_refusal.is_some() {
            return Ok(false);
        }
        let prepared = self.training.optimizers.iter_mut().map(|optimizer| optimizer.prepare_replay());
        let Some(prepared) = prepared.collect::<Result<Option<Vec<u64>>>>()? else {
            self.refuse_update("an optimizer does not implement prepare_replay");
            return Ok(false);
        };
        let _action = self.profile_strategy("update")?;
        let Some((ready, params)) = self.graphs.replayed_step() else { return Ok(false) };
        if !ready.grads.are_grads_of(params)? {
            return Ok(false); // a hook has put others in their place
        }
        let before = match std::mem::take(&mut ready.update) {
            Update::Ready(captured, mut graph) if captured == prepared => {
                graph.replay(None)?;
                ready.update = Update::Ready(captured, graph);
                self.graphs.report.replayed_updates += 1;
                return Ok(true);
            }
            Update::Seen(captured, before) if captured == prepared => Some(before),
            Update::Unknown => None,
            Update::Ready(..) | Update::Seen(..) => {
                self.graphs.changed_updates += 1;
                None
            }
        };
        if self.graphs.changed_updates > MAX_CHANGES {
            self.refuse_update(
                "other numbers than learning rates, or what has gradients, change from step to step",
            );
            return Ok(false);
        }
        self.capture_update(before, prepared, facts, update)?;
        Ok(true)
    }

    fn capture_update(
        &mut self,
        before: Option<FirstCapture>,
        prepared: Vec<u64>,
        facts: BatchFacts,
        update: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let (names, passes) = (self.tensor_names(&[]), self.graphs.passes);
        let capture = graph::Capture::begin()?;
        self.run.log.metrics.begin_capture();
        let updated = update(self);
        let logged = self.run.log.metrics.end_capture();
        if !logged.is_empty() {
            graph::refuse_capture("values are logged there");
        }
        let captured = capture.end();
        updated?; // an error of the update is more to the point than one of the capture
        self.run.log.metrics.enter(scope(OPTIMIZER_STEP, &facts));
        self.run.log.metrics.record_again(&logged)?;
        self.run.log.metrics.enter(scope(Step::Training.facts(), &facts));
        self.graphs.report.captured_updates += 1;
        let update = captured.and_then(|captured| {
            let graphs = captured.read(&names)?;
            let Some(before) = before else { return Ok(Update::Seen(prepared, captured.into_seen(graphs))) };
            before.check_same(&graphs)?;
            let graph = captured.compile(graphs, &[], passes)?;
            graph::label_shown(graph.plan_stats().count(), || "clipping and the optimizer step".to_owned());
            for stats in graph.plan_stats() {
                let (all, replayed) = (stats.num_nodes, stats.num_calls);
                tracing::info!(
                    "captured clipping and the optimizer step: {all} operators, {replayed} replayed"
                );
            }
            Ok(Update::Ready(prepared, graph))
        });
        match (update, self.graphs.replayed_step()) {
            (Ok(update), Some((ready, _))) => ready.update = update,
            (Ok(_), None) => {}
            (Err(Error::Graph(error)), _) => {
                self.graphs.fall_back_in_update(&error)?;
                self.refuse_update(&error.to_string());
            }
            (Err(error), _) => return Err(error),
        }
        Ok(())
    }

    fn refuse_update(&mut self, why: &str) {
        tracing::warn!("{}: clipping and the optimizer step run as usual: {why}", self.graphs.key());
        self.graphs.report.update_refusal = Some(why.to_owned());
    }
}
