//! `torch.compile` for modules: graphs of their calls that passes have changed.

use super::backend::CompileBackend;
use super::cache::{Buckets, CacheOptions, CachedGraphs};
use super::options::{CompileConfig, CompileOptions};
use super::wrap::{GraphedInPlace, GraphedModule};
use crate::error::Result;
use crate::ffi;
use crate::nn::Module;

/// Compiles the calls of a module on this thread (`module.call(&x)`, `ctx.graphed`) until what is returned is dropped: graphs as those of
/// a [`ModuleCacher`](super::ModuleCacher), with fewer passes over memory. `backend` is a name of [`CompileBackend`]. The module stays
/// what it is, such as a [`LightningModule`](crate::module::LightningModule), and may move.
///
/// Each kind of call (shapes, dtypes, what requires grad, modes of layers, autocast) is captured twice, in its first two calls, then
/// passes change the graph, and it is replayed. 8 kinds are compiled for each module; calls of others run as usual, and a warning
/// says so once. In float32 results are those of the module to 1e-6; in bfloat16 a chain of operators rounds less often.
///
/// ```
/// use voltaic::nn::{Callable, Linear, Relu, Sequential};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let net = Sequential::new().add(Linear::new(4, 8)?).add(Relu).add(Linear::new(8, 2)?);
/// let compiled = voltaic::compile(&net, "hpu_backend")?;
/// for _ in 0..3 {
///     let loss = net.call(&Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu)))?.sum(Kind::Float);
///     loss.backward();
/// }
/// assert_eq!((compiled.stats().misses, compiled.stats().checks, compiled.stats().hits), (1, 1, 1));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`GraphError::Arguments`](crate::error::GraphError::Arguments) for another name; as [`ffi::install_kernels`], which it calls.
///
/// Source: `torch.compile`.
pub fn compile(module: &impl Module, backend: &str) -> Result<GraphedInPlace> {
    Ok(Compiler::new(backend)?.inplace(module))
}

/// Compiles modules as [`compile()`] does, with settings.
///
/// ```
/// use voltaic::graph::{Buckets, Compiler};
/// use voltaic::nn::{Forward, Linear};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let buckets = Buckets { dim: 0, sizes: vec![8, 16] };
/// let net = Compiler::new("hpu_backend")?.buckets(buckets).wrap(Linear::new(4, 2)?);
/// for batch in [5, 7, 8, 12, 16] {
///     net.forward(&Tensor::ones([batch, 4], (Kind::Float, tch::Device::Cpu)))?.sum(Kind::Float).backward();
/// }
/// assert_eq!(net.stats().num_graphs, 2); // for 8 and 16 rows
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "wrap() makes the module, inplace() leaves it what it is"]
pub struct Compiler {
    config: CompileConfig,
    buckets: Option<Buckets>,
}

impl Compiler {
    /// With a backend of this name.
    ///
    /// # Errors
    /// As [`compile()`].
    pub fn new(backend: &str) -> Result<Self> {
        let backend: CompileBackend = backend.parse()?;
        backend.warn_if_deprecated();
        ffi::install_kernels()?;
        Ok(Self { config: backend.into(), buckets: None })
    }

    /// How many kinds of calls are compiled; 8 unless set.
    pub fn recompile_limit(mut self, limit: usize) -> Self {
        self.config.recompile_limit = Some(limit);
        self
    }

    /// Options of the backend.
    ///
    /// ```
    /// use voltaic::graph::{CompileOptions, Compiler};
    /// use voltaic::nn::{Forward, Linear, Relu, Sequential};
    /// # use voltaic::{Kind, Tensor};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let options = CompileOptions { fuse_elementwise: Some(false), ..CompileOptions::default() };
    /// let net = Sequential::new().add(Linear::new(4, 8)?).add(Relu).add(Relu);
    /// let net = Compiler::new("hpu_backend")?.options(options).wrap(net);
    /// for _ in 0..3 {
    ///     net.forward(&Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu)))?.sum(Kind::Float).backward();
    /// }
    /// assert!(net.plan_stats().iter().all(|plan| plan.num_fused == 0));
    /// # Ok(())
    /// # }
    /// ```
    pub fn options(mut self, options: CompileOptions) -> Self {
        self.config.options = options;
        self
    }

    /// Pads inputs to few shapes.
    pub fn buckets(mut self, buckets: Buckets) -> Self {
        self.buckets = Some(buckets);
        self
    }

    /// A module around the module, whose calls are compiled on any thread.
    pub fn wrap<M: Module>(&self, module: M) -> GraphedModule<M> {
        let graphs = CachedGraphs::new(&module, self.for_cache());
        GraphedModule::new(module, graphs, true)
    }

    /// See [`compile()`].
    pub fn inplace(&self, module: &impl Module) -> GraphedInPlace {
        GraphedInPlace::new(module, CachedGraphs::new(module, self.for_cache()))
    }

    fn for_cache(&self) -> CacheOptions {
        CacheOptions { buckets: self.buckets.clone(), ..CacheOptions::compiled(self.config) }
    }
}
