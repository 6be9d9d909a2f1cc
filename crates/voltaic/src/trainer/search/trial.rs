//! Short runs before the real one, after which everything is as it was.

use std::sync::Arc;

use crate::accelerator::rng;
use crate::error::{ConfigError, Result};
use crate::trainer::builder::TrainerBuilder;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::values::Limit;
use crate::trainer::session::before_trial::{Before, BeforeTrial};
use crate::trainer::trainer::Trainer;

impl Trainer {
    /// A trainer like this one for a short run of so many steps, or batches: no callbacks, loggers, files or schedules,
    /// and one batch per step.
    pub(crate) fn trial(
        &self,
        what: &str,
        steps: u64,
        build: impl FnOnce(TrainerBuilder) -> TrainerBuilder,
    ) -> Result<Self> {
        if self.run.world().world_size > 1 {
            let ranks = format!("{} ranks", self.run.world().world_size);
            let remedy = "search with devices=1, and give what it finds to the run with several";
            return Err(ConfigError::new(what, ranks, remedy).into());
        }
        let limit = Some(Limit::Batches(steps));
        let config = TrainerConfig {
            callbacks: Vec::new(),
            profiler: None,
            max_epochs: Some(-1),
            min_epochs: None,
            min_steps: None,
            max_time: None,
            max_steps: steps as i64,
            accumulate_grad_batches: 1,
            limit_val_batches: Some(Limit::Batches(0)),
            limit_test_batches: limit,
            limit_predict_batches: limit,
            overfit_batches: Limit::Fraction(0.0),
            barebones: true,
            logger: None,
            enable_checkpointing: None,
            enable_progress_bar: None,
            enable_model_summary: None,
            log_every_n_steps: None,
            num_sanity_val_steps: None,
            save_on_signal: false,
            detect_anomaly: false,
            ..self.config.clone()
        };
        let accelerator = Arc::clone(&self.run.accelerator);
        let mut builder = build(TrainerBuilder::default().config(config).accelerator(accelerator));
        if let Some(given) = &self.optimizers {
            builder = builder.optimizer(given.optimizer.clone(), None);
        }
        let mut trainer = builder.build()?;
        trainer.plan.drops_schedulers = true;
        trainer.run.kept = BeforeTrial::First(rng::states(self.plan.device)?);
        Ok(trainer)
    }

    /// Of a trial that has run: what its module was before; nothing if it came to an end before the module was complete.
    pub(crate) fn take_kept(&mut self) -> Option<Before> {
        match std::mem::take(&mut self.run.kept) {
            BeforeTrial::Done(kept) => Some(*kept),
            BeforeTrial::Nothing | BeforeTrial::First(_) => None,
        }
    }
}
