//! Finds a learning rate to start from: a short training in which it grows from step to step.

use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::callback::Callback;
use crate::data::{DataModule, Stage};
use crate::error::{ConfigError, Error, Result};
use crate::logger::plot_lr_find;
use crate::module::{HookContext, LightningModule};
use crate::nn::Module;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::searches::LearningRateFinderConfig;
use crate::trainer::search::trial::Searcher;

/// Learning rates that were tried, and the smoothed losses they gave.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LrFind {
    /// Learning rate of each step.
    pub lrs: Vec<f64>,
    /// Loss of each step, averaged over those before with weight 0.98.
    pub losses: Vec<f64>,
}

impl LrFind {
    /// Where the loss falls most steeply, without the first 10 steps and the last; `None` if there are fewer than two
    /// steps besides. Source: Lightning's `lr_find`.
    pub fn suggestion(&self) -> Option<f64> {
        self.suggestion_between(10, 1)
    }

    /// The same without the first `skip_begin` and the last `skip_end` steps.
    pub fn suggestion_between(&self, skip_begin: usize, skip_end: usize) -> Option<f64> {
        let end = self.lrs.len().checked_sub(skip_end)?;
        let points: Vec<(f64, f64)> = (skip_begin..end)
            .map(|step| (self.lrs[step], self.losses[step]))
            .filter(|(_, loss)| loss.is_finite())
            .collect();
        if points.len() < 2 {
            return None;
        }
        let slope = |a: usize, b: usize| (points[b].1 - points[a].1) / (points[b].0 - points[a].0);
        let last = points.len() - 1;
        // second order within, as torch.gradient does for points at unequal distances
        let gradient = |at: usize| {
            if at == 0 || at == last {
                return slope(at.saturating_sub(1), (at + 1).min(last));
            }
            let (before, after) = (points[at].0 - points[at - 1].0, points[at + 1].0 - points[at].0);
            (slope(at - 1, at) * after + slope(at, at + 1) * before) / (before + after)
        };
        let steepest = (0..=last).min_by(|&a, &b| gradient(a).total_cmp(&gradient(b)))?;
        Some(points[steepest].0)
    }

    /// Draws the losses over the learning rates, with the suggestion.
    ///
    /// # Errors
    /// If the picture cannot be written.
    pub fn plot(&self, png_path: &Path) -> Result<()> {
        plot_lr_find(&self.lrs, &self.losses, self.suggestion(), png_path)
    }
}

/// Sets the learning rates and notes the losses.
struct Probe {
    config: LearningRateFinderConfig,
    found: Arc<Mutex<LrFind>>,
    average: f64,
    best: f64,
    /// Optimizer steps whose loss is noted: one of an accumulation window, as in Lightning.
    noted: u64,
}

const BETA: f64 = 0.98;

impl Callback for Probe {
    fn on_train_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        let lr = self.config.lr(ctx.global_step());
        for optimizer in ctx.optimizers_mut() {
            optimizer.param_groups_mut().iter_mut().for_each(|group| group.lr = lr);
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let step = ctx.global_step();
        if step == std::mem::replace(&mut self.noted, step) {
            return Ok(()); // the window is open
        }
        let loss = ctx.loss().map_or(f64::NAN, |loss| loss.f_double_value(&[]).unwrap_or(f64::NAN));
        self.average = BETA * self.average + (1.0 - BETA) * loss;
        let smoothed = self.average / (1.0 - BETA.powf((step + 1) as f64));
        let limit = self.config.early_stop_threshold.map_or(f64::INFINITY, |threshold| threshold * self.best);
        if step > 1 && smoothed > limit {
            ctx.request_stop(format!("the loss diverges at step {step} of the search for a learning rate"));
        }
        if smoothed < self.best || step <= 1 {
            self.best = smoothed;
        }
        if let Ok(mut found) = self.found.lock() {
            found.lrs.push(self.config.lr(step.saturating_sub(1)));
            found.losses.push(smoothed);
        }
        Ok(())
    }
}

impl Searcher<'_> {
    /// What the callback LearningRateFinder asks for before a fit that starts from the beginning.
    pub(crate) fn find_lr<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        config: &LearningRateFinderConfig,
    ) -> Result<Option<f64>> {
        if self.plan.fast_dev_run {
            tracing::warn!("fast_dev_run: no learning rate is searched for");
            return Ok(None);
        }
        let found = self.lr_find(module, data, config)?;
        let Some(lr) = found.suggestion() else {
            let steps = found.lrs.len();
            let what = format!("{steps} steps gave too few finite losses to suggest a learning rate");
            let remedy = "use more num_training_steps, or a smaller max_lr";
            return Err(ConfigError::new("LearningRateFinder", what, remedy).into());
        };
        if !self.run.loggers.is_empty() {
            let folder = &self.run.facts.log_dir;
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
            found.plot(&folder.join("lr_find.png"))?;
        }
        tracing::info!("learning rate {lr:.3e} found in {} steps", found.lrs.len());
        Ok(config.update_attr.then_some(lr))
    }

    /// See [`Trainer::lr_find`](crate::trainer::Trainer::lr_find).
    pub(crate) fn lr_find<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        config: &LearningRateFinderConfig,
    ) -> Result<LrFind> {
        config.check()?;
        let found = Arc::new(Mutex::new(LrFind::default()));
        let (average, best, noted) = (0.0, f64::INFINITY, 0);
        let probe = Probe { config: config.clone(), found: found.clone(), average, best, noted };
        let steps = config.num_training_steps;
        let windows = |trial: &mut TrainerConfig| {
            trial.accumulate_grad_batches = self.config.accumulate_grad_batches;
        };
        let mut trial = self.trial("LearningRateFinder", steps, &windows, Some(Box::new(probe)))?;
        let result = trial.run(module, data, Stage::Fit);
        trial.restore(module)?;
        result?;
        let found = found.lock().map(|found| found.clone()).unwrap_or_default();
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suggestion_is_where_torch_finds_the_steepest_fall() {
        let config =
            LearningRateFinderConfig { num_training_steps: 20, ..LearningRateFinderConfig::default() };
        let lrs: Vec<f64> = (0..20).map(|step| config.lr(step)).collect();
        assert!((lrs[19] - 1.0).abs() < 1e-12 && lrs[0] == 1e-8);
        let losses: Vec<f64> = (0..20_i32).map(|step| 1.0 / f64::from(step + 1)).collect();
        let found = LrFind { lrs: lrs.clone(), losses };
        assert_eq!(
            found.suggestion(),
            Some(lrs[10]),
            "the distance of the rates grows faster than the losses fall"
        );
        assert_eq!(LrFind { lrs: vec![0.1; 5], losses: vec![1.0; 5] }.suggestion(), None);
    }
}
