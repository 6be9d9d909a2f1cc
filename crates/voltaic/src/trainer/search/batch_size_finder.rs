//! Finds the largest batch size that a device has memory for: short runs with batches that grow.

use crate::data::{DataModule, Stage};
use crate::error::{ConfigError, Result};
use crate::module::LightningModule;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::searches::{BatchSizeFinderConfig, BatchSizeSearch};
use crate::trainer::config::values::Limit;
use crate::trainer::search::trial::Searcher;

impl BatchSizeFinderConfig {
    /// The largest batch size for which `try_size` says that it fits.
    fn search(&self, mut try_size: impl FnMut(usize) -> Result<SizeTrial>) -> Result<usize> {
        let (mut fits, mut fails): (Option<usize>, Option<usize>) = (None, None);
        let mut size = self.init_val;
        for _ in 0..self.max_trials {
            match try_size(size)? {
                SizeTrial::Fits => {
                    tracing::info!("batch size {size} fits");
                    fits = Some(size);
                }
                SizeTrial::Covers(samples) => {
                    tracing::info!("batch size {size} takes all {samples} samples");
                    fits = Some(size.min(samples));
                    break;
                }
                SizeTrial::Fails => {
                    tracing::info!("memory is too small for batch size {size}");
                    fails = Some(size);
                }
            }
            match self.next(fits, fails) {
                Some(next) => size = next,
                None => break,
            }
        }
        let Some(found) = fits else {
            let what = format!("not even a batch of {size} has room in memory");
            return Err(ConfigError::new(
                "BatchSizeFinder",
                what,
                "use a smaller model, or another precision",
            )
            .into());
        };
        match self.mode {
            BatchSizeSearch::Power => Ok(found),
            BatchSizeSearch::Binsearch => Ok(((found as f64 * (1.0 - self.margin)) as usize).max(1)),
        }
    }

    /// The size to try next, from the largest that fits and the smallest that does not.
    fn next(&self, fits: Option<usize>, fails: Option<usize>) -> Option<usize> {
        match (fits, fails) {
            (Some(fits), None) => Some(fits.saturating_mul(2).min(self.max_val)).filter(|next| *next > fits),
            (None, Some(fails)) => Some(fails / 2).filter(|next| *next > 0),
            (Some(fits), Some(fails)) if self.mode == BatchSizeSearch::Binsearch => {
                Some(fits.midpoint(fails)).filter(|next| *next > fits)
            }
            _ => None,
        }
    }
}

/// How a trial ended.
enum SizeTrial {
    Fits,
    /// It fits, and one batch takes all these samples.
    Covers(usize),
    /// Memory is used up.
    Fails,
}

impl Searcher<'_> {
    /// What the callback BatchSizeFinder asks for: the batch size of the loaders of a call.
    pub(crate) fn find_batch_size<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        stage: Stage,
        config: &BatchSizeFinderConfig,
    ) -> Result<Option<usize>> {
        if self.plan.fast_dev_run {
            tracing::warn!("fast_dev_run: no batch size is searched for");
            return Ok(None);
        }
        let found = self.scale_batch_size(module, data, stage, config)?;
        tracing::info!("{stage} with batches of {found}");
        Ok(Some(found))
    }

    /// See [`Trainer::scale_batch_size`](crate::trainer::Trainer::scale_batch_size).
    pub(crate) fn scale_batch_size<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        stage: Stage,
        config: &BatchSizeFinderConfig,
    ) -> Result<usize> {
        config.check()?;
        let steps = config.steps_per_trial;
        config.search(|size| {
            let change = |config: &mut TrainerConfig| {
                config.limit_train_batches = Some(Limit::Fraction(1.0));
                if stage == Stage::Validate {
                    config.limit_val_batches = Some(Limit::Batches(steps));
                }
            };
            let mut trial = self.trial("BatchSizeFinder", steps, &change, None)?;
            trial.options.batch_size = Some(size);
            let result = trial.run(module, data, stage);
            let samples = trial.run.facts.num_samples;
            trial.restore(module)?;
            match result {
                Ok(()) if samples <= size => Ok(SizeTrial::Covers(samples)),
                Ok(()) => Ok(SizeTrial::Fits),
                Err(error) if error.is_out_of_memory() => Ok(SizeTrial::Fails),
                Err(error) => Err(error),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes that are tried if `limit` fits, and what is found.
    fn tried(config: &BatchSizeFinderConfig, limit: usize, samples: usize) -> (Vec<usize>, Option<usize>) {
        let mut sizes = Vec::new();
        let found = config.search(|size| {
            sizes.push(size);
            Ok(match size {
                size if size > limit => SizeTrial::Fails,
                size if size >= samples => SizeTrial::Covers(samples),
                _ => SizeTrial::Fits,
            })
        });
        (sizes, found.ok())
    }

    #[test]
    fn sizes_are_doubled_and_then_halved() {
        let power = BatchSizeFinderConfig::default();
        assert_eq!(tried(&power, 20, 1000), (vec![2, 4, 8, 16, 32], Some(16)));
        assert_eq!(tried(&power, 100, 10), (vec![2, 4, 8, 16], Some(10)), "no more than there are samples");
        let binsearch =
            BatchSizeFinderConfig { mode: BatchSizeSearch::Binsearch, margin: 0.0, ..power.clone() };
        assert_eq!(tried(&binsearch, 20, 1000), (vec![2, 4, 8, 16, 32, 24, 20, 22, 21], Some(20)));
        let with_margin = BatchSizeFinderConfig { margin: 0.1, ..binsearch.clone() };
        assert_eq!(tried(&with_margin, 20, 1000).1, Some(18));
        let few = BatchSizeFinderConfig { max_trials: 2, ..power.clone() };
        assert_eq!(tried(&few, 20, 1000), (vec![2, 4], Some(4)));
        let small = BatchSizeFinderConfig { max_val: 6, ..power.clone() };
        assert_eq!(tried(&small, 20, 1000), (vec![2, 4, 6], Some(6)));
        // a first size that is too large goes down
        let large = BatchSizeFinderConfig { init_val: 64, ..power.clone() };
        assert_eq!(tried(&large, 20, 1000), (vec![64, 32, 16], Some(16)));
        assert_eq!(tried(&power, 0, 1000), (vec![2, 1], None));
    }
}
