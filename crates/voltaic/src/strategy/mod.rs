//! How training is spread over ranks.
//!
//! A strategy gets the module, losses and votes from the trainer, never the trainer. [`SingleDevice`] does nothing
//! beyond backward; [`Ddp`] averages gradients while backward runs; [`Zero`] shards states among the ranks, too. [`init_inference`]
//! sets a module up that is not trained.

mod build;
mod config;
mod ddp;
mod deepspeed;
mod inference;
mod offload;
mod peers;
mod sharded;
mod single;
mod sparse;
#[expect(clippy::module_inception, reason = "the trait of the folder")]
mod strategy;
mod tensor_parallel;
mod votes;
mod zero;

pub(crate) use config::StrategyPlan;
pub use config::{
    DdpConfig, GradientCompression, HpuDeepSpeedStrategy, MeshSize, ModelParallelStrategy,
    SingleDeviceConfig, StrategyClass, StrategyConfig,
};
pub use ddp::Ddp;
pub use deepspeed::config::DeepSpeedStrategy;
pub use deepspeed::inference::{InferenceConfig, TensorParallel};
pub(crate) use deepspeed::plan::{Beside, DeepSpeedPlan};
pub use inference::{InferenceEngine, init_inference};
pub use offload::{Aio, OffloadDevice, OffloadOptimizer, OffloadParam};
pub use sharded::{ShardedGrads, ShardedState};
pub use single::SingleDevice;
pub use strategy::{BuildStrategy, Strategy, StrategyChoice};
pub use votes::Votes;
pub use zero::Zero;
pub use zero::config::{GradientReduction, ZeroConfig, ZeroStage};
