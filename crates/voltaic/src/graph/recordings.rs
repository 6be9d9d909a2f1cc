//! What a capture has recorded: read, checked, compared with another capture, compiled.

use tch::Tensor;

use super::compiled::{CompiledGraph, Segment};
use super::ir::Graph;
use super::passes::Passes;
use crate::error::{GraphError, Result, TorchError, TorchErrorKind};
use crate::ffi::Recording;
use crate::nn::{Module, ModuleExt};

/// What was captured, one recording for each part between two `mark_step`s.
#[derive(Debug)]
pub(crate) struct Recordings {
    recordings: Vec<Recording>,
}

impl Recordings {
    pub(super) fn new(recordings: Vec<Recording>) -> Self {
        Self { recordings }
    }

    /// The operators; an error if they cannot be replayed.
    pub(crate) fn read(&self, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        self.read_with(None, names)
    }

    /// The operators of this capture, then those of a later one that uses its results; an error if they cannot be replayed.
    pub(super) fn read_with(&self, later: Option<&Self>, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        let graphs = self.graphs_with(later, names)?;
        match graphs.iter().find_map(Graph::problem) {
            Some(problem) => Err(problem.into()),
            None => Ok(graphs),
        }
    }

    /// The operators, whether they can be replayed or not.
    pub(crate) fn graphs(&self, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        self.graphs_with(None, names)
    }

    fn graphs_with(&self, later: Option<&Self>, names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
        let later = later.iter().flat_map(|later| &later.recordings);
        read_all(&self.recordings.iter().chain(later).collect::<Vec<_>>(), names)
    }

    /// Refuses what the code keeps for itself of the tensors that it makes: a replay would not give it new ones. `known` are those
    /// that it is meant to leave behind.
    ///
    /// # Errors
    /// [`GraphError::NotCapturable`].
    pub(super) fn check_kept<'a>(
        recordings: impl IntoIterator<Item = &'a Recording>,
        graphs: &[Graph],
        known: &[&Tensor],
    ) -> Result<()> {
        for (recording, graph) in recordings.into_iter().zip(graphs) {
            let known = known.iter().map(|tensor| recording.buffer_of(tensor));
            let known = known.collect::<Result<Vec<_>, _>>()?;
            if let Some(problem) = graph.kept_problem(|buffer| known.contains(&Some(buffer))) {
                return Err(problem.into());
            }
        }
        Ok(())
    }

    /// The recordings of its parts.
    pub(super) fn recordings(&self) -> &[Recording] {
        &self.recordings
    }

    /// As [`Recordings::check_kept`], of a step with these graphs.
    pub(crate) fn check_kept_of_step(&self, graphs: &[Graph], known: &[&Tensor]) -> Result<()> {
        Self::check_kept(&self.recordings, graphs, known)
    }

    /// Number of parts between two `mark_step`s.
    pub(super) fn num_parts(&self) -> usize {
        self.recordings.len()
    }

    /// Keeps what a later capture is compared with.
    pub(crate) fn into_seen(mut self, graphs: Vec<Graph>) -> FirstCapture {
        self.recordings.iter_mut().for_each(Recording::forget_results);
        FirstCapture { graphs, _recordings: self.recordings }
    }

    /// Makes it ready to be replayed, with what [`Recordings::read`] gave and after these passes; `inputs` are the placeholders that
    /// replays are given others for.
    pub(crate) fn compile(
        self,
        graphs: Vec<Graph>,
        inputs: &[Tensor],
        passes: Passes,
    ) -> Result<CompiledGraph> {
        Ok(self.compile_giving(graphs, (inputs, &[]), passes, &[])?.0)
    }

    /// The same; each replay makes new ones of the `outputs` for which this returns true, and keeps nothing of them. `weights` are what passes
    /// may freeze.
    pub(super) fn compile_giving(
        self,
        mut graphs: Vec<Graph>,
        (inputs, outputs): (&[Tensor], &[Tensor]),
        passes: Passes,
        weights: &[Tensor],
    ) -> Result<(CompiledGraph, Vec<bool>)> {
        let mut places = Vec::new();
        for (at, (recording, graph)) in self.recordings.iter().zip(&mut graphs).enumerate() {
            for weight in weights {
                if let Some(buffer) = recording.buffer_of(weight)? {
                    graph.buffers[buffer].is_weight = true;
                    places.push((at, buffer, weight.shallow_clone()));
                }
            }
        }
        let (segments, given_away) = compile_all(self.recordings, graphs, inputs, outputs, passes)?;
        Ok((CompiledGraph::new(segments, places), given_away))
    }
}

/// A capture of a step, to be compared with the next one.
#[derive(Debug)]
pub(crate) struct FirstCapture {
    graphs: Vec<Graph>,
    /// They hold the tensors that were there before: where one of those lies no other can lie meanwhile, so that the same
    /// address is the same tensor.
    _recordings: Vec<Recording>,
}

impl FirstCapture {
    /// Whether another capture of the same code is the same graph, so that one can stand for all that follow.
    ///
    /// # Errors
    /// [`GraphError::NotStatic`].
    pub(crate) fn check_same(&self, now: &[Graph]) -> Result<()> {
        check_same(&self.graphs, now)
    }
}

/// Whether two captures of the same code are the same graph. What was there before the first one must still be held, or
/// other tensors may lie where it was.
pub(super) fn check_same<'a>(
    before: impl IntoIterator<Item = &'a Graph>,
    now: impl IntoIterator<Item = &'a Graph>,
) -> Result<()> {
    let (before, now): (Vec<_>, Vec<_>) = (before.into_iter().collect(), now.into_iter().collect());
    let difference = if before.len() == now.len() {
        before.iter().zip(&now).find_map(|(before, now)| before.difference(now))
    } else {
        Some(format!("there were {} parts and are {}", before.len(), now.len()))
    };
    let Some(difference) = difference else { return Ok(()) };
    Err(GraphError::NotStatic { difference }.into())
}

/// Parameters and buffers with their names, for messages and printed graphs.
pub(crate) fn named_tensors(module: &dyn Module) -> Vec<(String, Tensor)> {
    let parameters = module.named_parameters().into_iter();
    let parameters = parameters.map(|(fqn, parameter)| (fqn, parameter.leaf().shallow_clone()));
    let buffers = module.named_buffers().into_iter();
    parameters.chain(buffers.map(|(fqn, buffer)| (fqn, buffer.tensor().shallow_clone()))).collect()
}

/// Reads the recordings of one capture, in order. `names` are tensors that were there before, such as weights, with
/// their names.
fn read_all(recordings: &[&Recording], names: &[(String, Tensor)]) -> Result<Vec<Graph>> {
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
    Graph::note_writes(&mut graphs);
    Ok(graphs)
}

/// Plans recordings and makes them ready, each with its graph; `inputs` are the tensors that replays may be given others
/// for, `outputs` the results for which each replay should allocate new memory. Also returns which of them it does allocate: those that
/// a single recording has made.
///
/// # Errors
/// [`GraphError::NotCapturable`].
fn compile_all(
    recordings: Vec<Recording>,
    graphs: Vec<Graph>,
    inputs: &[Tensor],
    outputs: &[Tensor],
    passes: Passes,
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
    let compile = |(recording, graph)| Segment::compile(recording, graph, inputs, &outputs, passes);
    Ok((parts.map(compile).collect::<Result<_>>()?, given_away))
}
