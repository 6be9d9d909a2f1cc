//! Graphs of a module's calls, one for each kind of inputs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use tch::Tensor;

use super::backend::{CompileBackend, RECOMPILE_LIMIT};
use super::call::{Call, CallGraphs, CapturedCall, HowCaptured, Outputs};
use super::capture::is_capturing;
use super::metrics;
use super::options::{CompileConfig, fall_back};
use super::passes::Passes;
use super::places::{Mark, any_missing, copy_of, share_memory, shares_elements, write_back};
use super::plan::PlanStats;
use super::signature::{Conditions, InputSignature};
use crate::device::Device;
use crate::error::{Error, GraphError, Problem, Result};
use crate::ffi;
use crate::nn::{ModeNumbers, Module, ModuleExt, ModuleKind, is_in_segment};
use crate::precision::fp8::{Measured, share_amaxes};

/// Pads one dimension of the inputs with zeros up to the next of a few sizes, so that few shapes need a graph. Outputs
/// are cut back along the same dimension. For modules that treat the entries of the dimension apart from each other,
/// such as the samples of a batch where no batch norm is trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    /// The dimension, from 0. Inputs that have fewer dimensions are left as they are.
    pub dim: usize,
    /// The sizes. An input that is longer than all of them is not padded.
    pub sizes: Vec<i64>,
}

/// How a cache of graphs behaves.
#[derive(Debug, Clone, Default)]
pub(crate) struct CacheOptions {
    pub(crate) max_graphs: Option<usize>,
    /// Calls with grad are captured too.
    pub(crate) captures_grad: bool,
    pub(crate) disable_tensor_cache: bool,
    pub(crate) use_lfu: bool,
    pub(crate) buckets: Option<Buckets>,
    /// Logs the statistics after so many calls, and at the end; 0 does not.
    pub(crate) log_frequency: u64,
    /// How the graphs are compiled, if they are.
    pub(crate) compile: Option<CompileConfig>,
}

impl CacheOptions {
    /// Those of what is compiled.
    pub(crate) fn compiled(config: CompileConfig) -> Self {
        Self {
            max_graphs: Some(config.recompile_limit.unwrap_or(RECOMPILE_LIMIT)),
            captures_grad: config.backend.trains(),
            disable_tensor_cache: true,
            compile: Some(config),
            ..Self::default()
        }
    }
}

/// What the calls of a module with graphs found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Graphs in the cache.
    pub num_graphs: usize,
    /// Most graphs that it may hold.
    pub max_graphs: Option<usize>,
    /// Calls that were replayed.
    pub hits: u64,
    /// Calls that were captured.
    pub misses: u64,
    /// Calls that were captured a second time, to find out whether the graph does what the code does: it might take
    /// numbers from the host that change from call to call.
    pub checks: u64,
    /// Calls that ran as usual: within another capture, while a backward pass was still to come, since there was no room
    /// for a graph, or since the module cannot be captured.
    pub uncached: u64,
    /// Graphs that made room for those of inputs that come more often.
    pub evictions: u64,
    /// How often a dimension of an input had another size than in the call before, and that needed a new graph.
    pub recompilations: BTreeMap<usize, u64>,
    /// Why there are no graphs, if the module cannot be captured.
    pub refusal: Option<String>,
}

impl CacheStats {
    /// Calls in all.
    pub fn num_calls(&self) -> u64 {
        self.hits + self.misses + self.checks + self.uncached
    }
}

impl fmt::Display for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let max = self.max_graphs.map_or_else(|| "no limit".to_owned(), |max| max.to_string());
        writeln!(f, "Max graphs: {max}")?;
        writeln!(f, "No. of HPUGraphs cached: {}", self.num_graphs)?;
        writeln!(f, "Total cached hits: {}", self.hits)?;
        writeln!(f, "Total captured: {}", self.misses)?;
        writeln!(f, "Total checked: {}", self.checks)?;
        writeln!(f, "Total uncached: {}", self.uncached)?;
        if self.evictions > 0 {
            writeln!(f, "Total evicted: {}", self.evictions)?;
        }
        for (dim, count) in &self.recompilations {
            writeln!(f, "Captured again for another size of dimension {dim}: {count}")?;
        }
        if let Some(refusal) = &self.refusal {
            writeln!(f, "Not captured: {refusal}")?;
        }
        write!(f, "Total forwards executed: {}", self.num_calls())
    }
}

/// What makes a call another graph.
#[derive(Debug, Clone, PartialEq)]
struct Key {
    inputs: Vec<InputSignature>,
    /// Modes and plain values of the module and all modules below it.
    kind: ModuleKind,
    is_training: bool,
    with_grad: bool,
    conditions: Conditions,
    /// Which parameters are trained.
    trained: Vec<bool>,
    /// Inputs share memory with each other, which those of a graph do not.
    shares_memory: bool,
}

/// A graph and the kind of calls that it is for.
#[derive(Debug)]
struct Entry {
    key: Key,
    call: CapturedCall,
    /// Layers whose largest magnitudes ranks share after a call.
    measured: Measured,
    /// A second capture was the same.
    is_checked: bool,
}

/// The graphs of one module.
#[derive(Debug)]
pub(crate) struct GraphCache {
    options: CacheOptions,
    passes: Passes,
    module: String,
    graphs: Vec<Entry>,
    /// How often each kind of call came; kept to find the least frequent one.
    counts: Vec<(Key, u64)>,
    /// Kinds of calls whose inputs share memory, and whether they write to one.
    shared: Vec<(Key, bool)>,
    params: Option<Vec<Tensor>>,
    modes: ModeNumbers,
    last_sizes: Vec<Vec<i64>>,
    stats: CacheStats,
    /// It was said that there is no room.
    is_full: bool,
}

impl GraphCache {
    /// `module` is its name in messages.
    pub(crate) fn new(module: impl Into<String>, options: CacheOptions) -> Self {
        let stats = CacheStats { max_graphs: options.max_graphs, ..CacheStats::default() };
        Self {
            passes: Passes::of(options.compile),
            options,
            module: module.into(),
            graphs: Vec::new(),
            counts: Vec::new(),
            shared: Vec::new(),
            params: None,
            modes: ModeNumbers::default(),
            last_sizes: Vec::new(),
            stats,
            is_full: false,
        }
    }

    pub(crate) fn stats(&self) -> CacheStats {
        CacheStats { num_graphs: self.graphs.len(), ..self.stats.clone() }
    }

    pub(crate) fn module(&self) -> &str {
        &self.module
    }

    pub(crate) fn clear(&mut self) {
        self.graphs.drain(..).for_each(|entry| entry.call.leave_to_backward());
        self.params = None;
    }

    /// Runs `call` of `module`: by a graph if there is one, else captured if there is room, else as usual.
    pub(crate) fn run(
        &mut self,
        module: &dyn Module,
        is_training: bool,
        inputs: &[Tensor],
        call: Call,
    ) -> anyhow::Result<Vec<Tensor>> {
        if is_capturing() || is_in_segment() || any_missing(inputs) {
            return call(inputs); // part of a larger graph, or of a checkpoint that runs it again
        }
        let target = self.options.buckets.as_ref().and_then(|buckets| buckets.target(inputs));
        // padded ones would not share what these do
        let Some((dim, size, target)) = target.filter(|_| !share_parts(inputs)) else {
            return self.run_same_size(module, is_training, inputs, call);
        };
        let padded = padded(inputs, |input| resize(input, dim, size, target))?;
        let marks = padded.iter().map(Mark::of).collect::<Result<Vec<_>>>()?;
        let outputs = self.run_same_size(module, is_training, &padded, call)?;
        for ((input, padded), mark) in inputs.iter().zip(&padded).zip(marks) {
            let now = resize(padded, dim, target, size)?;
            let is_written =
                || -> Result<bool> { mark.is_written(padded).map_or_else(|| Ok(!now.f_equal(input)?), Ok) };
            if padded.size() != input.size() && is_written()? {
                write_back(&now, input, mark.has_new_history(padded)?)?;
            }
        }
        Ok(outputs.iter().map(|output| resize(output, dim, target, size)).collect::<Result<_>>()?)
    }

    fn run_same_size(
        &mut self,
        module: &dyn Module,
        is_training: bool,
        inputs: &[Tensor],
        call: Call,
    ) -> anyhow::Result<Vec<Tensor>> {
        let key = self.key(module, is_training, inputs)?;
        self.refuse_grad(key.with_grad)?;
        self.count(&key);
        let unchecked = self.graphs.iter().position(|entry| !entry.is_checked && entry.key == key);
        let outputs = if self.stats.refusal.is_some() || (key.with_grad && !self.options.captures_grad) {
            self.uncached(inputs, call)?
        } else if key.shares_memory && self.writes_shared(&key) != Some(false) {
            self.watch_shared(key, inputs, call)?
        } else if let Some(index) = unchecked {
            self.check(module, &key, index, inputs, call)?
        } else if let Some(outputs) = self.replay(&key, inputs)? {
            outputs
        } else if !inputs.iter().any(shares_elements) && self.has_room(&key) {
            self.capture(module, key, inputs, call)?
        } else {
            self.warn_if_full(&key);
            self.uncached(inputs, call)?
        };
        self.log_stats();
        Ok(outputs)
    }

    /// Whether calls of a kind, whose inputs share memory, write to one; none if there was no such call yet.
    fn writes_shared(&self, key: &Key) -> Option<bool> {
        self.shared.iter().find(|(known, _)| known == key).map(|(_, writes)| *writes)
    }

    /// Runs a call as usual whose inputs share memory, since a graph would see a write to one of them in that one alone, and notes whether
    /// it writes to one.
    fn watch_shared(&mut self, key: Key, inputs: &[Tensor], call: Call) -> anyhow::Result<Vec<Tensor>> {
        if self.writes_shared(&key).is_some() {
            return self.uncached(inputs, call);
        }
        let marks = inputs.iter().map(Mark::of).collect::<Result<Vec<_>>>()?;
        let before = inputs.iter().map(copy_of).collect::<Result<Vec<_>>>()?;
        let outputs = self.uncached(inputs, call)?;
        let mut writes = false;
        for ((input, mark), before) in inputs.iter().zip(marks).zip(before) {
            writes |= mark.is_written(input).map_or_else(|| Ok(!input.f_equal(&before)?), Ok::<_, Error>)?;
        }
        self.shared.push((key, writes));
        Ok(outputs)
    }

    /// Who compiles the graphs.
    fn backend(&self) -> Option<CompileBackend> {
        self.options.compile.map(|config| config.backend)
    }

    /// Refuses a call that wants gradients, if the backend has none.
    fn refuse_grad(&self, with_grad: bool) -> Result<()> {
        match self.backend() {
            Some(backend) if with_grad && !backend.trains() => {
                let what =
                    format!("{} is called with grad, and {backend} computes no gradients", self.module);
                let remedy = "call it within no_grad, or compile it with hpu_backend";
                Err(GraphError::Arguments { problem: Problem::new(what, remedy) }.into())
            }
            _ => Ok(()),
        }
    }

    /// Says once that a kind of call is not compiled, since there are too many others.
    fn warn_if_full(&mut self, key: &Key) {
        let (Some(backend), Some(max)) = (self.backend(), self.options.max_graphs) else { return };
        let is_known = self.graphs.iter().any(|entry| entry.key == *key);
        if self.stats.refusal.is_none()
            && !is_known
            && self.graphs.len() >= max
            && !std::mem::replace(&mut self.is_full, true)
        {
            tracing::warn!(
                "{backend}: {} was compiled for {max} kinds of calls; those of {:?} and later kinds run as usual; pad inputs to few shapes (Compiler::buckets)",
                self.module,
                key.inputs.iter().map(|input| &input.size).collect::<Vec<_>>()
            );
        }
    }

    fn key(&mut self, module: &dyn Module, is_training: bool, inputs: &[Tensor]) -> Result<Key> {
        let params = self.params.get_or_insert_with(|| {
            module.parameters().iter().map(|parameter| parameter.leaf().shallow_clone()).collect()
        });
        let grad_is_on = ffi::grad_is_enabled();
        let trained: Vec<bool> = params.iter().map(|param| grad_is_on && param.requires_grad()).collect();
        let shares_memory = share_memory(inputs);
        let inputs: Vec<InputSignature> = inputs.iter().map(InputSignature::of).collect::<Result<_>>()?;
        let device = inputs.first().map_or(Device::Cpu, |input| input.device);
        let with_grad =
            trained.iter().any(|is_trained| *is_trained) || inputs.iter().any(|input| input.requires_grad);
        let kind = self.modes.kind(module);
        let conditions = Conditions::of_call(module, device, with_grad)?;
        Ok(Key { shares_memory, inputs, kind, is_training, with_grad, conditions, trained })
    }

    fn count(&mut self, key: &Key) {
        if !self.options.use_lfu {
            return;
        }
        match self.counts.iter_mut().find(|(known, _)| known == key) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((key.clone(), 1)),
        }
    }

    fn uncached(&mut self, inputs: &[Tensor], call: Call) -> anyhow::Result<Vec<Tensor>> {
        self.stats.uncached += 1;
        call(inputs)
    }

    /// None if there is no graph that is free, or it is of no use any more.
    fn replay(&mut self, key: &Key, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let is_free = |entry: &Entry| entry.key == *key && !entry.call.is_busy();
        let Some(index) = self.graphs.iter().position(is_free) else { return Ok(None) };
        share_amaxes()?;
        let outputs = match self.graphs[index].call.replay(inputs) {
            Ok(outputs) => outputs,
            Err(Error::Graph(GraphError::TensorGone { .. })) => {
                self.clear(); // the weights were moved or cast: captured again
                return Ok(None);
            }
            Err(Error::Graph(error @ GraphError::ShapeChanged { is_undone: true, .. })) => {
                self.refuse(&error)?;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        self.graphs[index].measured.note();
        self.stats.hits += 1;
        metrics::count_hit();
        self.note_sizes(key);
        Ok(Some(outputs))
    }

    fn capture(
        &mut self,
        module: &dyn Module,
        key: Key,
        inputs: &[Tensor],
        call: Call,
    ) -> anyhow::Result<Vec<Tensor>> {
        let outputs = match &self.options {
            options if options.disable_tensor_cache => Outputs::GivenAway,
            options if options.captures_grad => Outputs::Copied,
            _ => Outputs::Shared,
        };
        share_amaxes()?;
        let compile = self.options.compile;
        let freezes = compile.is_some_and(|config| config.options.freezes());
        let how = HowCaptured { outputs, passes: self.passes, gives_back: compile.is_some(), freezes };
        let (captured, measured) =
            Measured::by(|| CapturedCall::capture(module, inputs, key.with_grad, how, call));
        let (captured, results) = captured?;
        self.stats.misses += 1;
        metrics::count_miss();
        self.count_recompilation(&key);
        match captured {
            // the first call makes what later ones find, as largest magnitudes that scales of float8 are made of
            Ok(call) if !key.conditions.holds_again(module) => call.leave_to_backward(),
            Ok(call) => {
                self.note_sizes(&key);
                // of a sort that was checked before, there are several: their backward passes were still to come
                let is_checked = self.graphs.iter().any(|entry| entry.key == key);
                self.graphs.push(Entry { key, call, measured, is_checked });
            }
            Err(Error::Graph(error)) => self.refuse(&error)?,
            Err(error) => return Err(error.into()),
        }
        Ok(results)
    }

    /// Runs the code, to find out whether a graph may stand for it.
    fn check(
        &mut self,
        module: &dyn Module,
        key: &Key,
        index: usize,
        inputs: &[Tensor],
        call: Call,
    ) -> anyhow::Result<Vec<Tensor>> {
        let (checked, results) = self.graphs[index].call.check(module, inputs, key.with_grad, call)?;
        self.stats.checks += 1;
        self.note_sizes(key);
        match checked {
            Ok(()) => self.graphs[index].is_checked = true,
            Err(Error::Graph(error)) => self.refuse(&error)?,
            Err(error) => return Err(error.into()),
        }
        Ok(results)
    }

    /// There are no graphs from now on; an error if that is forbidden.
    fn refuse(&mut self, error: &GraphError) -> Result<()> {
        fall_back(self.options.compile, error)?;
        tracing::warn!("{} runs without graphs: {error}", self.module);
        self.stats.refusal = Some(error.to_string());
        self.clear();
        Ok(())
    }

    /// Which dimensions have other sizes than in the call before.
    fn count_recompilation(&mut self, key: &Key) {
        for (before, now) in self.last_sizes.iter().zip(&key.inputs) {
            if before.len() != now.size.len() {
                continue;
            }
            for (dim, (old, new)) in before.iter().zip(&now.size).enumerate() {
                if old != new {
                    *self.stats.recompilations.entry(dim).or_insert(0) += 1;
                }
            }
        }
    }

    fn note_sizes(&mut self, key: &Key) {
        if !self.last_sizes.iter().eq(key.inputs.iter().map(|input| &input.size)) {
            self.last_sizes = key.inputs.iter().map(|input| input.size.clone()).collect();
        }
    }

    fn has_room(&mut self, key: &Key) -> bool {
        if self.stats.refusal.is_some() {
            return false; // since the replay that was tried
        }
        if self.options.max_graphs.is_none_or(|max| self.graphs.len() < max) {
            return true;
        }
        self.drop_other_settings(key) || (self.options.use_lfu && self.evict_for(key))
    }

    /// Drops the graphs of plain values that the module has no longer, or of other interceptors. False if there are none, or none came twice: they change
    /// from call to call.
    fn drop_other_settings(&mut self, key: &Key) -> bool {
        let is_other = |known: &Key| {
            !known.kind.has_settings_of(&key.kind) || !known.conditions.has_interceptors_of(&key.conditions)
        };
        let is_stale = |entry: &Entry| is_other(&entry.key) && !entry.call.is_busy();
        let was_used = self.graphs.iter().any(|entry| is_stale(entry) && entry.is_checked);
        self.graphs.retain(|entry| !was_used || !is_stale(entry));
        was_used
    }

    /// Drops the graph of the calls that came least often, if those of `key` came more often.
    fn evict_for(&mut self, key: &Key) -> bool {
        let count =
            |key: &Key| self.counts.iter().find(|(known, _)| known == key).map_or(0, |(_, count)| *count);
        let free = self.graphs.iter().enumerate().filter(|(_, entry)| !entry.call.is_busy());
        let Some((least, index)) = free.map(|(index, entry)| (count(&entry.key), index)).min() else {
            return false;
        };
        if count(key) <= least {
            return false;
        }
        self.graphs.swap_remove(index);
        self.stats.evictions += 1;
        true
    }

    fn log_stats(&self) {
        let calls = self.stats.num_calls();
        if self.options.log_frequency != 0 && calls.is_multiple_of(self.options.log_frequency) {
            tracing::info!("graphs of {}:\n{}", self.module, self.stats());
        }
    }

    pub(crate) fn plan_stats(&self) -> Vec<PlanStats> {
        self.graphs.iter().flat_map(|entry| entry.call.plan_stats()).collect()
    }

    /// Replays in all, and what they could not place as planned.
    pub(crate) fn replay_stats(&self) -> Vec<ffi::ReplayStats> {
        self.graphs.iter().flat_map(|entry| entry.call.replay_stats()).collect()
    }
}

/// The graphs of one module, one for each kind of calls.
#[derive(Debug)]
pub struct CachedGraphs(RefCell<GraphCache>);

impl CachedGraphs {
    pub(super) fn new(module: &dyn Module, options: CacheOptions) -> Self {
        Self(RefCell::new(GraphCache::new(module.type_name(), options)))
    }

    /// What the calls so far found.
    pub fn stats(&self) -> CacheStats {
        self.0.borrow().stats()
    }

    /// The plan of each graph: forward, then backward if it has one.
    pub fn plan_stats(&self) -> Vec<PlanStats> {
        self.0.borrow().plan_stats()
    }

    /// Why there are no graphs, if the module cannot be captured.
    pub fn refusal(&self) -> Option<String> {
        self.0.borrow().stats.refusal.clone()
    }

    /// Drops all graphs, with their memory. To be called after a parameter was replaced by another one; weights that were
    /// moved, cast, frozen or unfrozen are found out.
    pub fn clear_cache(&self) {
        self.0.borrow_mut().clear();
    }
}

impl CallGraphs for CachedGraphs {
    fn run(
        &self,
        module: &dyn Module,
        is_training: bool,
        inputs: &[Tensor],
        code: Call,
    ) -> anyhow::Result<Vec<Tensor>> {
        // a module within its own call is part of that
        let Ok(mut cache) = self.0.try_borrow_mut() else { return code(inputs) };
        cache.run(module, is_training, inputs, code)
    }

    fn replay_stats(&self) -> Vec<ffi::ReplayStats> {
        self.0.borrow().replay_stats()
    }
}

impl Drop for GraphCache {
    fn drop(&mut self) {
        if self.options.log_frequency != 0 {
            tracing::info!("graphs of {} at the end:\n{}", self.module, self.stats());
        }
    }
}

impl Buckets {
    /// The dimension, its size, and what the inputs are padded to; none if they stay.
    fn target(&self, inputs: &[Tensor]) -> Option<(usize, i64, i64)> {
        let given = inputs.iter().find_map(|input| input.size().get(self.dim).copied())?;
        let larger = self.sizes.iter().copied().filter(|&bucket| bucket >= given).min()?;
        (larger != given).then_some((self.dim, given, larger))
    }
}

/// Whether two inputs are one tensor.
fn is_same(one: &Tensor, other: &Tensor) -> bool {
    let place = |tensor: &Tensor| (tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.kind());
    let edge = |tensor: &Tensor| ffi::gradient_edge(tensor).ok();
    place(one) == place(other) && edge(one) == edge(other)
}

/// Whether inputs share memory that are not one tensor.
fn share_parts(inputs: &[Tensor]) -> bool {
    let is_new =
        |(at, input): &(usize, &Tensor)| !inputs[..*at].iter().any(|earlier| is_same(earlier, input));
    let apart: Vec<Tensor> =
        inputs.iter().enumerate().filter(is_new).map(|(_, input)| input.shallow_clone()).collect();
    share_memory(&apart)
}

/// The inputs of another size; one that is there twice stays one tensor.
fn padded(inputs: &[Tensor], resize: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<Tensor>> {
    let mut padded: Vec<Tensor> = Vec::with_capacity(inputs.len());
    for (at, input) in inputs.iter().enumerate() {
        let earlier = inputs[..at].iter().position(|earlier| is_same(earlier, input));
        padded.push(earlier.map_or_else(|| resize(input), |earlier| Ok(padded[earlier].shallow_clone()))?);
    }
    Ok(padded)
}

/// Pads dimension `dim` with zeros, or cuts it, from `size` to `target`; a tensor of another size there stays.
fn resize(tensor: &Tensor, dim: usize, size: i64, target: i64) -> Result<Tensor> {
    let sizes = tensor.size();
    if sizes.get(dim) != Some(&size) {
        return Ok(tensor.shallow_clone());
    }
    if target < size {
        return Ok(tensor.f_narrow(dim as i64, 0, target)?);
    }
    let mut padding = vec![0; 2 * (sizes.len() - dim)]; // from the last dimension backwards
    if let Some(last) = padding.last_mut() {
        *last = target - size;
    }
    Ok(tensor.f_constant_pad_nd(&padding)?)
}
