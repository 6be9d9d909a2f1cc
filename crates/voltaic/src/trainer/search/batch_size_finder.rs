//! Finds the largest batch size that a device has memory for: short runs with batches that grow.

use crate::data::{DataModule, Stage};
use crate::error::{ConfigError, Result};
use crate::module::LightningModule;
use crate::trainer::config::searches::{BatchSizeFinderConfig, BatchSizeSearch};
use crate::trainer::session::before_trial::Before;
use crate::trainer::trainer::Trainer;

impl BatchSizeFinderConfig {
    /// The largest batch size for which `try_size` says that it fits.
    fn search(&self, mut try_size: impl FnMut(usize) -> Result<Trial>) -> Result<usize> {
        let (mut fits, mut fails): (Option<usize>, Option<usize>) = (None, None);
        let mut size = self.init_val;
        for _ in 0..self.max_trials {
            match try_size(size)? {
                Trial::Fits => {
                    tracing::info!("batch size {size} fits");
                    fits = Some(size);
                }
                Trial::Covers(samples) => {
                    tracing::info!("batch size {size} takes all {samples} samples");
                    fits = Some(size.min(samples));
                    break;
                }
                Trial::Fails => {
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
enum Trial {
    Fits,
    /// It fits, and one batch takes all these samples.
    Covers(usize),
    /// Memory is used up.
    Fails,
}

impl Trainer {
    /// What the callback BatchSizeFinder asks for: the batch size of the loaders of this call.
    pub(crate) fn find_batch_size<M, D>(&mut self, module: &mut M, data: &mut D, stage: Stage) -> Result<()>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let Some(config) = self.batch_size_finder.clone() else { return Ok(()) };
        if self.plan.fast_dev_run {
            tracing::warn!("fast_dev_run: no batch size is searched for");
            return Ok(());
        }
        self.plan.batch_size = None;
        let found = self.scale_batch_size(module, data, stage, &config)?;
        tracing::info!("{stage} with batches of {found}");
        self.plan.batch_size = Some((stage, found));
        Ok(())
    }

    /// Finds the largest batch size for which `stage` has room in memory, by running a few steps with each; weights,
    /// buffers, metrics and random numbers are as before then. Out of memory is an error of libtorch on every device, so
    /// that the search goes on after it. Source: Lightning's `Tuner.scale_batch_size`.
    ///
    /// # Errors
    /// As [`Trainer::fit`]; [`ConfigError`] if the configuration makes no sense, a loader gives batches that are made
    /// elsewhere, or not even one sample has room.
    pub fn scale_batch_size<M, D>(
        &self,
        module: &mut M,
        data: &mut D,
        stage: Stage,
        config: &BatchSizeFinderConfig,
    ) -> Result<usize>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        config.check()?;
        let mut kept: Option<Before> = None;
        config.search(|size| {
            let mut trainer = self.trial("BatchSizeFinder", config.steps_per_trial, |builder| {
                let builder = builder.limit_train_batches(1.0);
                if stage == Stage::Validate {
                    builder.limit_val_batches(config.steps_per_trial)
                } else {
                    builder
                }
            })?;
            trainer.plan.batch_size = Some((stage, size));
            let result = match stage {
                Stage::Fit => trainer.fit(module, data),
                Stage::Validate => trainer.validate(module, data).map(drop),
                Stage::Test => trainer.test(module, data).map(drop),
                Stage::Predict => trainer.return_predictions(false).predict(module, data).map(drop),
            };
            let samples = trainer.run.facts.num_samples;
            let first = trainer.take_kept();
            drop(trainer); // and with it what the optimizer keeps
            kept = kept.take().or(first);
            kept.as_ref().map_or(Ok(()), |kept| kept.restore(module))?;
            match result {
                Ok(()) if samples <= size => Ok(Trial::Covers(samples)),
                Ok(()) => Ok(Trial::Fits),
                Err(error) if error.is_out_of_memory() => Ok(Trial::Fails),
                Err(error) => Err(error),
            }
        })
    }

    /// The batch size that the callback BatchSizeFinder has found for the last call.
    pub fn found_batch_size(&self) -> Option<usize> {
        self.plan.batch_size.map(|(_, size)| size)
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
                size if size > limit => Trial::Fails,
                size if size >= samples => Trial::Covers(samples),
                _ => Trial::Fits,
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
