//! Graphs of modules by a cache, with Habana's names and options.

use super::cache::{Buckets, CacheOptions, CacheStats, CachedGraphs};
use super::graphed::{Graphed, InPlace};
use super::plan::PlanStats;
use crate::accelerator::RuntimeFlags;
use crate::nn::Module;

/// Options of [`wrap_in_hpu_graph`], with Habana's names and defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrapOptions {
    /// Without effect: a replay on the CPU and on an emulated HPU is over when it returns.
    pub asynchronous: bool,
    /// Each call gives a tensor that is the caller's alone: the graph keeps no memory for it. Otherwise outputs of the
    /// same shape share memory that the graph keeps, and the next call overwrites them. `PT_HPUGRAPH_DISABLE_TENSOR_CACHE`
    /// wins over it.
    pub disable_tensor_cache: bool,
    /// How many graphs are kept; inputs of further shapes run without one. No limit if absent.
    pub max_graphs: Option<usize>,
    /// Pads inputs to few shapes.
    pub buckets: Option<Buckets>,
}

/// A module whose calls are replayed; made by [`wrap_in_hpu_graph`] or a [`ModuleCacher`].
pub type GraphedModule<M> = Graphed<M, CachedGraphs>;

/// Graphs of a module's calls on this thread, until this is dropped; made by [`ModuleCacher::inplace`] and
/// [`wrap_in_hpu_graph_inplace`].
pub type GraphedInPlace = InPlace<CachedGraphs>;

impl<M: Module> Graphed<M, CachedGraphs> {
    /// See [`CachedGraphs::stats`].
    pub fn stats(&self) -> CacheStats {
        self.graphs.stats()
    }

    /// See [`CachedGraphs::plan_stats`].
    pub fn plan_stats(&self) -> Vec<PlanStats> {
        self.graphs.plan_stats()
    }

    /// See [`CachedGraphs::refusal`].
    pub fn refusal(&self) -> Option<String> {
        self.graphs.refusal()
    }

    /// See [`CachedGraphs::clear_cache`].
    pub fn clear_cache(&self) {
        self.graphs.clear_cache();
    }
}

/// Makes a module whose forward pass is captured for each kind of input, twice to compare, and replayed from then on: for
/// validation, testing and prediction. Calls with grad run as usual; a [`ModuleCacher`] captures those.
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
/// assert_eq!((net.stats().misses, net.stats().checks, net.stats().hits), (1, 1, 1));
/// # Ok(())
/// # }
/// ```
///
/// Source: `habana_frameworks.torch.hpu.wrap_in_hpu_graph`.
pub fn wrap_in_hpu_graph<M: Module>(module: M, options: WrapOptions) -> GraphedModule<M> {
    cached(module, options.for_cache())
}

/// [`wrap_in_hpu_graph`] for a module that stays what it is: see [`ModuleCacher::inplace`].
pub fn wrap_in_hpu_graph_inplace(module: &impl Module, options: WrapOptions) -> GraphedInPlace {
    GraphedInPlace::new(module, CachedGraphs::new(module, options.for_cache()))
}

fn cached<M: Module>(module: M, options: CacheOptions) -> GraphedModule<M> {
    let graphs = CachedGraphs::new(&module, options);
    GraphedModule::new(module, graphs, true)
}

impl WrapOptions {
    fn for_cache(self) -> CacheOptions {
        if self.asynchronous {
            tracing::info!(
                "wrap_in_hpu_graph: asynchronous=true has no effect: a replay is over when it returns"
            );
        }
        CacheOptions {
            max_graphs: self.max_graphs,
            disable_tensor_cache: disable_tensor_cache(self.disable_tensor_cache),
            buckets: self.buckets,
            ..CacheOptions::default()
        }
    }
}

/// Habana's variable wins over the argument.
fn disable_tensor_cache(argument: bool) -> bool {
    match RuntimeFlags::disable_tensor_cache() {
        Ok(set) => set.unwrap_or(argument),
        Err(error) => {
            tracing::warn!("{error}; it is left out of account");
            argument
        }
    }
}

/// Wraps modules so that training is captured too: the forward pass and the backward pass of each kind of call (shapes,
/// dtypes, which tensors require grad, training or evaluation, autocast) are two graphs, replayed from then on. Results
/// are bit for bit those of the module. Each kind of call is captured twice, and both captures must be the same graph:
/// a module that takes numbers from the host which change from call to call is found out, and runs as usual.
///
/// ```
/// use voltaic::graph::ModuleCacher;
/// use voltaic::nn::{Forward, Linear, Relu, Sequential};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = Sequential::new().add(Linear::new(4, 8)?).add(Relu).add(Linear::new(8, 2)?);
/// let net = ModuleCacher::new(10).wrap(net);
/// for batch in [8, 8, 8, 5, 5, 8, 5] {
///     let loss = net.forward(&Tensor::ones([batch, 4], (Kind::Float, tch::Device::Cpu)))?.sum(Kind::Float);
///     loss.backward();
/// }
/// assert_eq!((net.stats().misses, net.stats().checks, net.stats().hits), (2, 2, 3));
/// # Ok(())
/// # }
/// ```
///
/// Each call gives tensors of its own. A graph keeps what its backward pass needs, so a second call before the
/// backward pass of the first gets another graph, or none if there is no room. Gradients add up as usual.
///
/// Source: `habana_frameworks.torch.hpu.ModuleCacher`. Its options `have_grad_accumulation` and
/// `allow_unused_input` have no counterpart: both always hold.
#[derive(Debug, Clone)]
#[must_use = "wrap() makes the module, inplace() leaves it what it is"]
pub struct ModuleCacher {
    options: CacheOptions,
}

impl ModuleCacher {
    /// At most `max_graphs` graphs for each module; further sorts of calls run as usual.
    pub fn new(max_graphs: usize) -> Self {
        let options = CacheOptions {
            max_graphs: Some(max_graphs),
            captures_grad: true,
            disable_tensor_cache: disable_tensor_cache(false),
            ..CacheOptions::default()
        };
        Self { options }
    }

    /// When the cache is full, a signature that is called more often than the least used graph takes its place.
    pub fn use_lfu(mut self, use_lfu: bool) -> Self {
        self.options.use_lfu = use_lfu;
        self
    }

    /// The graph keeps no memory for outputs of calls without grad, which are the caller's anyway: in place of copies of its own
    /// it gives away what it has made. `PT_HPUGRAPH_DISABLE_TENSOR_CACHE` wins over it.
    pub fn disable_tensor_cache(mut self, disable: bool) -> Self {
        self.options.disable_tensor_cache = disable_tensor_cache(disable);
        self
    }

    /// Pads inputs to few shapes.
    pub fn buckets(mut self, buckets: Buckets) -> Self {
        self.options.buckets = Some(buckets);
        self
    }

    /// Logs the statistics after each `log_frequency` calls, and at the end.
    pub fn verbose(mut self, log_frequency: u64) -> Self {
        self.options.log_frequency = log_frequency;
        self
    }

    /// Graphs for a module that stays what it is, such as a [`LightningModule`](crate::module::LightningModule): its calls
    /// (`module.call(&x)`, `ctx.graphed`) go by graphs on this thread until what is returned is dropped. See
    /// [`GraphedInPlace`].
    ///
    /// ```
    /// use voltaic::graph::ModuleCacher;
    /// use voltaic::nn::{Callable, Linear};
    /// # use voltaic::{Kind, Tensor};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let net = Linear::new(4, 2)?;
    /// let graphs = ModuleCacher::new(10).inplace(&net);
    /// for _ in 0..3 {
    ///     net.call(&Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu)))?.sum(Kind::Float).backward();
    /// }
    /// assert_eq!((graphs.stats().misses, graphs.stats().checks, graphs.stats().hits), (1, 1, 1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Source: `ModuleCacher(max_graphs)(model, inplace=True)`.
    pub fn inplace(&self, module: &impl Module) -> GraphedInPlace {
        GraphedInPlace::new(module, CachedGraphs::new(module, self.options.clone()))
    }

    /// The module with its cache.
    pub fn wrap<M: Module>(&self, module: M) -> GraphedModule<M> {
        cached(module, self.options.clone())
    }
}
