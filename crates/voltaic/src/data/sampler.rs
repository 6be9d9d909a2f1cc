//! Samplers: the order in which an epoch visits the samples.

use std::fmt;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::ConfigError;
use crate::{Result, ffi};

/// Chooses the samples of an epoch and their order.
///
/// A sampler holds no position: its answer depends only on its own fields, the seed and the epoch, which is what
/// makes an epoch resumable from the middle.
pub trait Sampler: fmt::Debug + Send + Sync + 'static {
    /// Number of indices that [`Sampler::indices`] gives, the same for every epoch.
    fn num_samples(&self) -> usize;

    /// Indices of `epoch` in order. `seed` is the loader's; a sampler with a seed of its own uses that instead.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the epoch before its first batch.
    fn indices(&self, seed: u64, epoch: u64) -> anyhow::Result<Vec<usize>>;

    /// Whether the order is random.
    fn is_shuffled(&self) -> bool {
        false
    }

    /// Whether each rank gets a part of its own already.
    fn is_distributed(&self) -> bool {
        false
    }
}

/// Indices 0, 1, 2, ... in every epoch.
#[derive(Debug, Clone)]
pub struct SequentialSampler {
    len: usize,
}

impl SequentialSampler {
    /// Visits `len` samples in order.
    pub fn new(len: usize) -> Self {
        Self { len }
    }
}

impl Sampler for SequentialSampler {
    fn num_samples(&self) -> usize {
        self.len
    }

    fn indices(&self, _seed: u64, _epoch: u64) -> anyhow::Result<Vec<usize>> {
        Ok((0..self.len).collect())
    }
}

/// A random permutation per epoch: `torch.randperm(len)` with a generator seeded by `seed + epoch`, which is the
/// order of torch's `DistributedSampler` with one rank.
#[derive(Debug, Clone)]
pub struct RandomSampler {
    len: usize,
    seed: Option<u64>,
}

impl RandomSampler {
    /// Visits each of `len` samples once per epoch; the loader's seed decides the order.
    pub fn new(len: usize) -> Self {
        Self { len, seed: None }
    }

    /// Uses this seed in place of the loader's.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }
}

impl Sampler for RandomSampler {
    fn num_samples(&self) -> usize {
        self.len
    }

    fn indices(&self, seed: u64, epoch: u64) -> anyhow::Result<Vec<usize>> {
        Ok(ffi::randperm(self.len, self.seed.unwrap_or(seed).wrapping_add(epoch))?)
    }

    fn is_shuffled(&self) -> bool {
        true
    }
}

/// Draws samples with given probabilities, for classes that are out of balance.
///
/// The draws come from Rust's `StdRng`, so they differ from PyTorch's sampler of the same name, whose distribution
/// they share.
#[derive(Debug, Clone)]
pub struct WeightedRandomSampler {
    weights: Vec<f64>,
    num_samples: usize,
    replacement: bool,
    seed: Option<u64>,
}

impl WeightedRandomSampler {
    /// Draws `num_samples` indices per epoch, index `i` in proportion to `weights[i]` (they need not add up to 1),
    /// each at most once unless `replacement` is set.
    ///
    /// # Errors
    /// [`ConfigError`] if a weight is negative or not finite, all are zero, `num_samples` is 0, or without replacement
    /// exceeds the number of positive weights.
    pub fn new(weights: impl Into<Vec<f64>>, num_samples: usize, replacement: bool) -> Result<Self> {
        let weights = weights.into();
        let key = |field| format!("WeightedRandomSampler.{field}");
        if let Some(at) = weights.iter().position(|weight| !(weight.is_finite() && *weight >= 0.0)) {
            let what = format!("weight {at} is {}", weights[at]);
            return Err(ConfigError::new(key("weights"), what, "give finite weights of at least 0").into());
        }
        let positive = weights.iter().filter(|&&weight| weight > 0.0).count();
        if positive == 0 {
            let what = format!("none of the {} weights is positive", weights.len());
            return Err(ConfigError::new(key("weights"), what, "give at least one positive weight").into());
        }
        if num_samples == 0 || (!replacement && num_samples > positive) {
            return Err(ConfigError::new(
                key("num_samples"),
                format!("{num_samples} draws asked for, {positive} weights are positive, replacement={replacement}"),
                "draw at least 1, and without replacement at most as many as there are positive weights",
            )
            .into());
        }
        Ok(Self { weights, num_samples, replacement, seed: None })
    }

    /// Uses this seed in place of the loader's.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    fn draw_with_replacement(&self, rng: &mut StdRng) -> Vec<usize> {
        let mut total = 0.0;
        let cumulative: Vec<f64> = self
            .weights
            .iter()
            .map(|weight| {
                total += weight;
                total
            })
            .collect();
        let last = self.weights.iter().rposition(|&weight| weight > 0.0).unwrap_or(0);
        (0..self.num_samples)
            .map(|_| {
                let target = rng.random::<f64>() * total;
                // rounding may put the target at the very end of the sum, past the last positive weight
                cumulative.partition_point(|&sum| sum <= target).min(last)
            })
            .collect()
    }

    /// Exponential keys: the largest `ln(u) / weight` are a weighted draw without replacement
    /// (Efraimidis and Spirakis, Information Processing Letters 97, 2006).
    fn draw_without_replacement(&self, rng: &mut StdRng) -> Vec<usize> {
        let mut keys: Vec<(f64, usize)> = Vec::new();
        for (index, &weight) in self.weights.iter().enumerate() {
            let uniform = 1.0 - rng.random::<f64>();
            if weight > 0.0 {
                keys.push((uniform.ln() / weight, index));
            }
        }
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        keys.into_iter().take(self.num_samples).map(|(_, index)| index).collect()
    }
}

impl Sampler for WeightedRandomSampler {
    fn num_samples(&self) -> usize {
        self.num_samples
    }

    fn indices(&self, seed: u64, epoch: u64) -> anyhow::Result<Vec<usize>> {
        let mut rng = StdRng::seed_from_u64(self.seed.unwrap_or(seed).wrapping_add(epoch));
        Ok(if self.replacement {
            self.draw_with_replacement(&mut rng)
        } else {
            self.draw_without_replacement(&mut rng)
        })
    }

    fn is_shuffled(&self) -> bool {
        true
    }
}
