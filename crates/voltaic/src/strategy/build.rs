//! Makes the strategy that the configuration names.

use std::time::Duration;

use super::config::StrategyPlan;
use super::ddp::Ddp;
use super::deepspeed::inference::InferencePlan;
use super::deepspeed::plan::DeepSpeedPlan;
use super::inference::Inference;
use super::single::SingleDevice;
use super::strategy::Strategy;
use super::tensor_parallel::TensorParallelism;
use super::zero::Zero;
use crate::distributed::{DEFAULT_TIMEOUT, ParallelDims, World};
use crate::error::Result;
use crate::optim::OptimizerConfig;

impl StrategyPlan {
    /// Whether its ranks need a rendezvous.
    pub(crate) fn is_distributed(&self) -> bool {
        *self != Self::SingleDevice
    }

    /// The mesh of so many ranks.
    pub(crate) fn dims(&self, world_size: usize) -> ParallelDims {
        match self {
            Self::SingleDevice => ParallelDims::default(),
            Self::Ddp { tp, .. } => {
                ParallelDims { dp_replicate: world_size / tp, tp: *tp, ..ParallelDims::default() }
            }
            Self::DeepSpeed(plan) => {
                let tp = plan.settings.tp_size();
                ParallelDims { dp_shard: world_size / tp, tp, ..ParallelDims::default() }
            }
            Self::Zero(_) => ParallelDims { dp_shard: world_size, ..ParallelDims::default() },
            Self::Inference(plan) => plan.dims(world_size),
        }
    }

    /// The settings of inference, if it is for that alone.
    pub(crate) fn inference(&self) -> Option<&InferencePlan> {
        match self {
            Self::Inference(plan) => Some(plan),
            _ => None,
        }
    }

    /// DeepSpeed's settings, if it is one of its strategies.
    pub(crate) fn deepspeed(&self) -> Option<&DeepSpeedPlan> {
        match self {
            Self::DeepSpeed(plan) => Some(plan),
            _ => None,
        }
    }

    /// Takes the optimizer that DeepSpeed's settings name out of them.
    pub(crate) fn take_optimizer(&mut self) -> Option<OptimizerConfig> {
        match self {
            Self::DeepSpeed(plan) => plan.settings.optimizer.take(),
            _ => None,
        }
    }

    /// How long ranks wait for each other.
    pub(crate) fn timeout(&self) -> Duration {
        match self {
            Self::SingleDevice => DEFAULT_TIMEOUT,
            Self::Ddp { config, .. } => config.timeout(),
            Self::DeepSpeed(plan) => plan.timeout,
            Self::Inference(plan) => plan.timeout,
            Self::Zero(config) => config.timeout,
        }
    }

    /// Keys of what may differ between ranks.
    pub(crate) fn allowed_differences(&self) -> Vec<String> {
        match self {
            Self::Ddp { config, .. } => config.allow_differences.clone(),
            Self::DeepSpeed(plan) => plan.allow_differences.clone(),
            Self::Inference(plan) => plan.allow_differences.clone(),
            Self::Zero(config) => config.allow_differences.clone(),
            Self::SingleDevice => Vec::new(),
        }
    }

    /// The strategy of these ranks.
    ///
    /// # Errors
    /// What of DeepSpeed's settings is not there yet.
    pub(crate) fn build(self, world: World) -> Result<Box<dyn Strategy>> {
        let divides_layers = world.mesh().tp.size > 1 && self.inference().is_none();
        let strategy: Box<dyn Strategy> = match self {
            Self::SingleDevice => Box::new(SingleDevice::of(world)),
            Self::Ddp { name, config, .. } => Box::new(Ddp::new(name, world, config)),
            Self::DeepSpeed(plan) => Box::new(Zero::new(world, plan.zero())),
            Self::Inference(plan) => Box::new(Inference::new(world, *plan)),
            Self::Zero(config) => Box::new(Zero::new(world, *config)),
        };
        Ok(if divides_layers { Box::new(TensorParallelism::new(strategy)) } else { strategy })
    }
}
