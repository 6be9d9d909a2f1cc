//! Makes the strategy that the configuration names.

use std::time::Duration;

use super::config::StrategyPlan;
use super::ddp::Ddp;
use super::single::SingleDevice;
use super::strategy::Strategy;
use crate::distributed::{DEFAULT_TIMEOUT, World};

impl StrategyPlan {
    /// Whether its ranks have to meet.
    pub(crate) fn is_distributed(&self) -> bool {
        *self != Self::SingleDevice
    }

    /// How long ranks wait for each other.
    pub(crate) fn timeout(&self) -> Duration {
        match self {
            Self::SingleDevice => DEFAULT_TIMEOUT,
            Self::Ddp { config, .. } => config.timeout(),
        }
    }

    /// Keys of what may differ between ranks.
    pub(crate) fn allowed_differences(&self) -> Vec<String> {
        match self {
            Self::SingleDevice => Vec::new(),
            Self::Ddp { config, .. } => config.allow_differences.clone(),
        }
    }

    /// The strategy of these ranks.
    pub(crate) fn build(self, world: World) -> Box<dyn Strategy> {
        match self {
            Self::SingleDevice => Box::new(SingleDevice::of(world)),
            Self::Ddp { name, config } => Box::new(Ddp::new(name, world, config)),
        }
    }
}
