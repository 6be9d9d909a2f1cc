//! The settings of a run with sharded states, with every default filled in.

use std::time::Duration;

use tch::Kind;

use crate::distributed::DEFAULT_TIMEOUT;
use crate::precision::LossScalerConfig;
use crate::strategy::offload::{Aio, OffloadOptimizer, OffloadParam, offloads};

/// What is sharded over the ranks, beside optimizer states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Optimizer states, and master weights if there are some.
    One,
    /// Gradients, too.
    Two,
    /// Weights, too.
    Three,
}

impl ZeroStage {
    /// 1, 2 or 3.
    pub fn number(self) -> u8 {
        self as u8 + 1
    }

    /// The name of the strategy.
    pub fn name(self) -> &'static str {
        match self {
            Self::One => "zero1",
            Self::Two => "zero2",
            Self::Three => "zero3",
        }
    }

    /// The stage of a strategy's name, in lower case.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "zero1" => Some(Self::One),
            "zero2" => Some(Self::Two),
            "zero3" => Some(Self::Three),
            _ => None,
        }
    }
}

/// How the gradients of N ranks are put together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GradientReduction {
    /// Their mean; each rank divides its own by N.
    Mean,
    /// Their mean; each rank divides its own by this factor, and the sum is multiplied by the factor and divided by N.
    Predivided(f64),
    /// Their sum.
    Sum,
}

impl GradientReduction {
    /// What this rank's gradients are multiplied by, and then their sum.
    pub(super) fn factors(self, ranks: usize) -> (f64, f64) {
        match self {
            Self::Mean => (1.0 / ranks as f64, 1.0),
            Self::Predivided(factor) => (1.0 / factor, factor / ranks as f64),
            Self::Sum => (1.0, 1.0),
        }
    }
}

/// How weights, gradients and optimizer states are sharded over ranks (ZeRO, arXiv:1910.02054).
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// What is sharded.
    pub stage: ZeroStage,
    /// Most elements of gradients that travel together; a larger parameter travels alone.
    pub reduce_bucket_size: usize,
    /// Buffers such as running means become rank 0's before each training step.
    pub broadcast_buffers: bool,
    /// How long ranks wait for each other.
    pub timeout: Duration,
    /// Optimizers that are not known to work on each element by itself are taken, too: their results differ from those of
    /// one process.
    pub allow_untested_optimizer: bool,
    /// The dtype in which gradients travel; that of the weights unless set.
    pub communication_dtype: Option<Kind>,
    /// The dtype in which the gradients of a window are added up; that of the weights unless set.
    pub grad_accum_dtype: Option<Kind>,
    /// How gradients are put together.
    pub gradient_reduction: GradientReduction,
    /// Weights in bfloat16 and float16 are updated in float32 copies; without, they are of 16 bits alone, and so are the
    /// optimizer states, unless the next setting says otherwise.
    pub master_weights: bool,
    /// Without master weights: the optimizer keeps its states in float32, and computes updates in it.
    pub float32_states: bool,
    /// Stage 3: parameters of at most as many elements stay unsharded.
    pub param_persistence_threshold: usize,
    /// How the loss is scaled with weights in float16.
    pub fp16: LossScalerConfig,
    /// With weights in bfloat16, steps whose gradients are not finite are left out; with float16 they always are.
    pub check_grad_overflow: bool,
    /// Stage 3: most elements of weights that are on their way ahead of their use; 0 gathers each when it is needed.
    pub prefetch_bucket_size: usize,
    /// Stage 3: most elements of unsharded weights in memory at once, those that stay not counted. What a module needs for its call
    /// is gathered even if it alone is more.
    pub max_live_parameters: usize,
    /// Stage 3: weights that are needed again before so many elements of others stay in memory until then; 0 frees all but those
    /// that are needed next.
    pub max_reuse_distance: usize,
    /// Stage 3: after a call the module is unsharded on each rank; without, or if it was made within
    /// [`nn::init::deferred`](crate::nn::init::deferred), it stays sharded until
    /// [`Trainer::gather_weights`](crate::trainer::Trainer::gather_weights). Each call shards it again: fits, `validate`, `test` and
    /// `predict`.
    pub gather_after_fit: bool,
    /// Stage 3: modules whose weights are gathered as a whole when they are called, and whose gradients are reduced as a whole, such as
    /// a mixture of experts of which each rank calls others. Each by its type's name, its fqn, or the last parts of that. DeepSpeed's
    /// `set_z3_leaf_modules`.
    pub leaf_modules: Vec<String>,
    /// Leaves frozen parameters out of checkpoints.
    pub exclude_frozen_parameters: bool,
    /// What may differ between ranks, by key, as with `ddp`.
    pub allow_differences: Vec<String>,
    /// Most elements of a unit with an offload: those of a unit are updated at a time.
    pub sub_group_size: usize,
    /// Where master weights, their gradients and optimizer states are.
    pub offload_optimizer: OffloadOptimizer,
    /// Stage 3: where the shards of the weights are.
    pub offload_param: OffloadParam,
    /// How files of an offload are read and written.
    pub aio: Aio,
}

impl ZeroConfig {
    /// Most elements of a unit of several parameters.
    pub(super) fn max_unit_len(&self) -> usize {
        let offloads = offloads(&self.offload_optimizer, &self.offload_param);
        if offloads { self.reduce_bucket_size.min(self.sub_group_size) } else { self.reduce_bucket_size }
    }

    /// The settings of a stage that is chosen by name.
    pub fn of_stage(stage: ZeroStage) -> Self {
        Self {
            stage,
            reduce_bucket_size: 200_000_000,
            broadcast_buffers: true,
            timeout: DEFAULT_TIMEOUT,
            allow_untested_optimizer: false,
            communication_dtype: None,
            grad_accum_dtype: None,
            gradient_reduction: GradientReduction::Mean,
            master_weights: true,
            float32_states: false,
            param_persistence_threshold: 100_000,
            fp16: LossScalerConfig::default(),
            check_grad_overflow: false,
            prefetch_bucket_size: 50_000_000,
            max_live_parameters: 1_000_000_000,
            max_reuse_distance: 1_000_000_000,
            gather_after_fit: true,
            leaf_modules: Vec::new(),
            exclude_frozen_parameters: false,
            allow_differences: Vec::new(),
            sub_group_size: 1_000_000_000,
            offload_optimizer: OffloadOptimizer::default(),
            offload_param: OffloadParam::default(),
            aio: Aio::default(),
        }
    }
}
