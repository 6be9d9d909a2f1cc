//! Inference by graphs: a module whose forward pass is captured for each shape of input, and replayed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use tch::{Kind, Tensor};

use super::capture::is_capturing;
use super::hpu_graph::HpuGraph;
use super::metrics;
use super::step::copy_of;
use crate::device::Device;
use crate::error::{Error, GraphError, Result};
use crate::ffi;
use crate::nn::{Forward, Member, Module, ModuleExt};

/// Pads one dimension of the input with zeros up to the next of a few sizes, so that few shapes need a graph. The
/// output is cut back along the same dimension. For modules that treat the entries of the dimension apart from each
/// other, such as the samples of a batch in evaluation mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    /// The dimension, from 0.
    pub dim: usize,
    /// The sizes. An input that is longer than all of them is not padded.
    pub sizes: Vec<i64>,
}

/// Options of [`wrap_in_hpu_graph`], with Habana's names and defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrapOptions {
    /// Without effect: a replay on the CPU and on an emulated HPU is over when it returns.
    pub asynchronous: bool,
    /// Each call gives a tensor of its own. Otherwise outputs of the same shape share memory, and the next call
    /// overwrites them.
    pub disable_tensor_cache: bool,
    /// How many graphs are kept; inputs of further shapes run without one. No limit if absent.
    pub max_graphs: Option<usize>,
    /// Pads inputs to few shapes.
    pub buckets: Option<Buckets>,
}

/// What the calls of a [`GraphedModule`] found.
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
    /// Calls that ran as usual: with grad, within another capture, or since there was no room for a graph.
    pub uncached: u64,
    /// How often a dimension of the input had another size than in the call before, and that needed a new graph.
    pub recompilations: BTreeMap<usize, u64>,
}

impl fmt::Display for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let max = self.max_graphs.map_or_else(|| "no limit".to_owned(), |max| max.to_string());
        writeln!(f, "Max graphs: {max}")?;
        writeln!(f, "No. of HPUGraphs cached: {}", self.num_graphs)?;
        writeln!(f, "Total cached hits: {}", self.hits)?;
        writeln!(f, "Total captured: {}", self.misses)?;
        writeln!(f, "Total uncached: {}", self.uncached)?;
        for (dim, count) in &self.recompilations {
            writeln!(f, "Captured anew for another size of dimension {dim}: {count}")?;
        }
        write!(f, "Total forwards executed: {}", self.hits + self.misses + self.uncached)
    }
}

/// A module whose forward pass is replayed; made by [`wrap_in_hpu_graph`]. Names of weights are those of the module.
#[derive(Debug)]
pub struct GraphedModule<M> {
    module: M,
    options: WrapOptions,
    cache: RefCell<Cache>,
    /// Tells whether grad is on.
    probe: Tensor,
}

#[derive(Debug)]
struct Cache {
    graphs: Vec<(Key, Captured)>,
    training: bool,
    last_size: Vec<i64>,
    stats: CacheStats,
    refusal: Option<String>,
}

/// What makes a forward pass another graph.
#[derive(Debug, Clone, PartialEq)]
struct Key {
    size: Vec<i64>,
    kind: Kind,
    device: Device,
    training: bool,
    autocast: (bool, i32),
}

#[derive(Debug)]
struct Captured {
    graph: HpuGraph,
    output: Tensor,
}

/// Makes a module whose forward pass is captured once for each shape of input, and replayed from then on: for
/// validation, testing and prediction. Calls with grad run as usual.
///
/// ```
/// use voltaic::graph::{wrap_in_hpu_graph, WrapOptions};
/// use voltaic::nn::{Forward, Linear};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = wrap_in_hpu_graph(Linear::new(4, 2)?, WrapOptions { max_graphs: Some(10), ..Default::default() });
/// let _no_grad = tch::no_grad_guard();
/// for _ in 0..3 {
///     net.forward(&Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu)))?;
/// }
/// assert_eq!((net.stats().misses, net.stats().hits), (1, 2));
/// # Ok(())
/// # }
/// ```
///
/// Source: `habana_frameworks.torch.hpu.wrap_in_hpu_graph`.
pub fn wrap_in_hpu_graph<M: Forward>(module: M, options: WrapOptions) -> GraphedModule<M> {
    let stats = CacheStats { max_graphs: options.max_graphs, ..CacheStats::default() };
    let cache = Cache { graphs: Vec::new(), training: true, last_size: Vec::new(), stats, refusal: None };
    let probe = Tensor::from(0.0_f32).set_requires_grad(true);
    GraphedModule { module, options, cache: RefCell::new(cache), probe }
}

impl<M: Forward> GraphedModule<M> {
    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The module, out of its wrapper.
    pub fn into_module(self) -> M {
        self.module
    }

    /// What the calls so far found.
    pub fn stats(&self) -> CacheStats {
        let cache = self.cache.borrow();
        CacheStats { num_graphs: cache.graphs.len(), ..cache.stats.clone() }
    }

    /// Why there are no graphs, if the module cannot be captured.
    pub fn refusal(&self) -> Option<String> {
        self.cache.borrow().refusal.clone()
    }

    /// Drops all graphs, with their memory.
    pub fn clear_cache(&self) {
        self.cache.borrow_mut().graphs.clear();
    }

    /// Whether a result of the module would have a history, which a replay does not give.
    fn needs_grad(&self, input: &Tensor) -> Result<bool> {
        let may_need = input.requires_grad() || self.module.parameters().iter().any(|p| p.requires_grad());
        // a number computed from one that requires grad does so too, unless grad is off
        Ok(may_need && self.probe.f_neg()?.requires_grad())
    }

    fn key(&self, input: &Tensor) -> Result<Key> {
        let device = Device::of(input)?;
        Ok(Key {
            size: input.size(),
            kind: input.kind(),
            device,
            training: self.cache.borrow().training,
            autocast: ffi::autocast_state(device)?,
        })
    }

    fn uncached(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.cache.borrow_mut().stats.uncached += 1;
        self.module.forward(input)
    }

    fn replay(&self, key: &Key, input: &Tensor) -> Result<Option<Tensor>> {
        let cache = &mut *self.cache.borrow_mut();
        let Some(index) = cache.graphs.iter().position(|(known, _)| known == key) else { return Ok(None) };
        let captured = &mut cache.graphs[index].1;
        match captured.graph.replay_with(&[input]) {
            Ok(()) => {}
            Err(Error::Graph(GraphError::TensorGone { .. })) => {
                cache.graphs.swap_remove(index); // the weights were moved or cast: captured anew
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        cache.stats.hits += 1;
        metrics::count_hit();
        cache.last_size.clone_from(&key.size);
        Ok(Some(captured.output.shallow_clone()))
    }

    fn capture(&self, key: Key, input: &Tensor) -> anyhow::Result<Tensor> {
        let placeholder = copy_of(input)?;
        let mut graph = HpuGraph::new();
        graph.name_weights(self.module.as_dyn());
        graph.capture_begin()?;
        graph.mark_user_inputs(&[&placeholder])?;
        let output = self.module.forward(&placeholder)?;
        let cache = &mut *self.cache.borrow_mut();
        cache.stats.misses += 1;
        metrics::count_miss();
        if cache.last_size.len() == key.size.len() {
            for (dim, (old, new)) in cache.last_size.iter().zip(&key.size).enumerate() {
                if old != new {
                    *cache.stats.recompilations.entry(dim).or_insert(0) += 1;
                }
            }
        }
        cache.last_size.clone_from(&key.size);
        match graph.capture_end() {
            Ok(()) => cache.graphs.push((key, Captured { graph, output: output.shallow_clone() })),
            Err(Error::Graph(error)) => {
                tracing::warn!("{} runs without graphs: {error}", self.module.type_name());
                metrics::count_fallback(&error);
                cache.refusal = Some(error.to_string());
            }
            Err(error) => return Err(error.into()),
        }
        Ok(output)
    }

    fn has_room(&self) -> bool {
        let cache = self.cache.borrow();
        cache.refusal.is_none() && self.options.max_graphs.is_none_or(|max| cache.graphs.len() < max)
    }

    fn forward_same_size(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        let key = self.key(input)?;
        let output = match self.replay(&key, input)? {
            Some(output) => output,
            None if self.has_room() => self.capture(key, input)?,
            None => return self.uncached(input),
        };
        Ok(if self.options.disable_tensor_cache { copy_of(&output)? } else { output })
    }
}

impl Buckets {
    /// The size that an input of this shape is padded to; none if it stays.
    fn target(&self, size: &[i64]) -> Option<i64> {
        let given = *size.get(self.dim)?;
        self.sizes
            .iter()
            .copied()
            .filter(|&bucket| bucket > given)
            .min()
            .filter(|_| !self.sizes.contains(&given))
    }
}

impl<M: Forward> Forward for GraphedModule<M> {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        if is_capturing() || self.needs_grad(input)? {
            return self.uncached(input);
        }
        let size = input.size();
        let Some((dim, target)) =
            self.options.buckets.as_ref().and_then(|buckets| Some((buckets.dim, buckets.target(&size)?)))
        else {
            return self.forward_same_size(input);
        };
        let mut padding = vec![0; 2 * (size.len() - dim)]; // from the last dimension backwards
        if let Some(last) = padding.last_mut() {
            *last = target - size[dim];
        }
        let output = self.forward_same_size(&input.f_constant_pad_nd(&padding)?)?;
        Ok(output.f_narrow(dim as i64, 0, size[dim])?)
    }
}

impl<M: Forward> Module for GraphedModule<M> {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.module.members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.module.children_mut(visit);
    }

    fn set_training(&mut self, training: bool) {
        self.cache.get_mut().training = training;
        self.module.set_training(training);
    }

    fn type_name(&self) -> &'static str {
        self.module.type_name()
    }
}
