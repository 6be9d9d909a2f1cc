//! The settings of a run with divided states, as they are in force: nothing in it is left open.

use std::time::Duration;

use tch::Kind;

use crate::distributed::DEFAULT_TIMEOUT;
use crate::precision::LossScalerConfig;

/// What is divided among the ranks, beside optimizer states.
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

/// How weights, gradients and optimizer states are divided among ranks (ZeRO, arXiv:1910.02054).
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// What is divided.
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
    /// From stage 2 on, the dtype in which the gradients of a window are added up; that of the weights unless set.
    pub grad_accum_dtype: Option<Kind>,
    /// Stage 3: parameters of at most as many elements stay whole.
    pub param_persistence_threshold: usize,
    /// How the loss is scaled with weights in float16.
    pub fp16: LossScalerConfig,
    /// With weights in bfloat16, steps whose gradients are not finite are left out; with float16 they always are.
    pub check_grad_overflow: bool,
}

impl ZeroConfig {
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
            param_persistence_threshold: 100_000,
            fp16: LossScalerConfig::default(),
            check_grad_overflow: false,
        }
    }
}
