//! Divides an epoch among ranks.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::sampler::{RandomSampler, Sampler, SequentialSampler};
use crate::Result;
use crate::config::setters;
use crate::error::ConfigError;

/// What becomes of the samples that cannot be divided evenly among the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remainder {
    /// Samples from the head of the order are repeated until all ranks have as many (PyTorch's `drop_last=False`).
    #[default]
    Repeat,
    /// Samples at the end of the order are left out (PyTorch's `drop_last=True`).
    Drop,
    /// Each sample is visited once, so that ranks may differ by one sample. For evaluation without collectives per
    /// batch: a training loop with gradient averaging would wait for ever on the rank that has a batch less.
    Exact,
}

/// Gives each rank every `world_size`-th index of an order that all ranks agree on.
///
/// Same indices as `torch.utils.data.DistributedSampler`, including which samples are repeated, for
/// [`Remainder::Repeat`] and [`Remainder::Drop`].
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    order: Arc<dyn Sampler>,
    rank: usize,
    world_size: usize,
    seed: Option<u64>,
    remainder: Remainder,
}

impl DistributedSampler {
    /// Divides `len` samples, shuffled per epoch (seed + epoch) or in order.
    ///
    /// # Errors
    /// [`ConfigError`] if `rank` is not below `world_size`.
    pub fn new(len: usize, rank: usize, world_size: usize, shuffle: bool) -> Result<Self> {
        let order: Arc<dyn Sampler> =
            if shuffle { Arc::new(RandomSampler::new(len)) } else { Arc::new(SequentialSampler::new(len)) };
        Self::wrap(order, rank, world_size)
    }

    /// Divides what another sampler chooses. That sampler must give the same order on all ranks.
    ///
    /// # Errors
    /// [`ConfigError`] if `rank` is not below `world_size`.
    pub fn wrap(order: Arc<dyn Sampler>, rank: usize, world_size: usize) -> Result<Self> {
        if rank >= world_size {
            return Err(ConfigError::new(
                "DistributedSampler.rank",
                format!("rank {rank} of world_size {world_size}"),
                "ranks count from 0 to world_size - 1",
            )
            .into());
        }
        Ok(Self { order, rank, world_size, seed: None, remainder: Remainder::Repeat })
    }

    setters! {
        /// Uses this seed in place of the loader's.
        seed: u64 = Some(seed);
        /// Chooses what becomes of samples that cannot be divided evenly.
        remainder: Remainder;
    }

    /// Samples of all ranks together, repeated ones counted.
    fn total(&self) -> usize {
        let len = self.order.num_samples();
        match self.remainder {
            Remainder::Repeat => len.div_ceil(self.world_size) * self.world_size,
            Remainder::Drop => len / self.world_size * self.world_size,
            Remainder::Exact => len,
        }
    }
}

impl Sampler for DistributedSampler {
    fn num_samples(&self) -> usize {
        (self.total() + self.world_size - 1 - self.rank) / self.world_size
    }

    fn indices(&self, seed: u64, epoch: u64) -> anyhow::Result<Vec<usize>> {
        let order = self.order.indices(self.seed.unwrap_or(seed), epoch)?;
        let repeated = order.iter().cycle().take(self.total());
        Ok(repeated.skip(self.rank).step_by(self.world_size).copied().collect())
    }

    fn is_shuffled(&self) -> bool {
        self.order.is_shuffled()
    }

    fn is_distributed(&self) -> bool {
        true
    }
}
