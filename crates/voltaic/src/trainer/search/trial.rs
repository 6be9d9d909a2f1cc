//! Short runs before the real one, after which everything is as it was.

use std::sync::{Arc, Mutex};

use tch::Tensor;

use crate::accelerator::rng;
use crate::callback::Callback;
use crate::data::{DataModule, Stage};
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::module::{HookContext, LightningModule};
use crate::nn::{Module, ModuleExt, Snapshot, SnapshotParts};
use crate::trainer::assemble::{BuilderParts, Resolved, assemble, resolve};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::optimizers::OptimizerOverride;
use crate::trainer::config::values::Limit;
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::session::{CallOptions, Run};

/// The trainer that something is searched for.
pub(crate) struct Searcher<'a> {
    pub config: &'a TrainerConfig,
    pub plan: &'a TrainPlan,
    pub run: &'a Run,
    /// In place of the module's optimizers.
    pub optimizers: Option<&'a OptimizerOverride>,
}

/// A short run.
pub(crate) struct Trial {
    plan: TrainPlan,
    pub run: Run,
    pub options: CallOptions,
    module: Arc<Mutex<Option<Snapshot>>>,
    rng: Vec<(String, Tensor)>,
}

impl Searcher<'_> {
    /// A run like that of the trainer of so many steps, or batches: no callbacks but `probe`, no loggers, files or
    /// schedules, and one batch per step unless `change` says otherwise. `change` may change its configuration.
    pub(crate) fn trial(
        &self,
        what: &str,
        steps: u64,
        change: &dyn Fn(&mut TrainerConfig),
        probe: Option<Box<dyn Callback>>,
    ) -> Result<Trial> {
        let world_size = self.run.world().world_size;
        if world_size > 1 {
            let remedy = "search with devices=1, and give what it finds to the run with several";
            return Err(ConfigError::new(what, format!("{world_size} ranks"), remedy).into());
        }
        let limit = Some(Limit::Batches(steps));
        let mut config = TrainerConfig {
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
        change(&mut config);
        let optimizer = self.optimizers.map(|given| given.optimizer.clone());
        let optimizers = optimizer.map(|optimizer| OptimizerOverride { optimizer, lr_scheduler: None });
        let module = Arc::new(Mutex::new(None));
        let mut callbacks: Vec<Box<dyn Callback>> = vec![Box::new(TakeSnapshot(module.clone()))];
        callbacks.extend(probe);
        let accelerator = Some(Arc::clone(&self.run.facts.hardware.accelerator));
        let mut parts = BuilderParts { accelerator, callbacks, ..BuilderParts::default() };
        let Resolved { plan, accelerator, .. } = resolve(&mut config, &mut parts)?;
        let (plan, run) = assemble(&config, parts, plan, accelerator)?;
        let rng = rng::states(plan.device)?;
        let options = CallOptions { optimizers, is_trial: true, ..CallOptions::default() };
        Ok(Trial { plan, run, options, module, rng })
    }
}

impl Trial {
    /// Runs one stage.
    pub(crate) fn run<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        stage: Stage,
    ) -> Result<()> {
        let (plan, call) = (&self.plan, (stage, &self.options));
        match stage {
            Stage::Fit => self.run.fit(plan, module, data, &self.options),
            Stage::Validate => {
                self.run.evaluate(plan, module, data, call, |session, data| session.validate(data)).map(drop)
            }
            Stage::Test => {
                self.run.evaluate(plan, module, data, call, |session, data| session.test(data)).map(drop)
            }
            Stage::Predict => self
                .run
                .evaluate(plan, module, data, call, |session, data| session.predict(data, false))
                .map(drop),
        }
    }

    /// Puts weights, buffers, metrics and random numbers back, and drops what the run keeps. Gradients are gone.
    pub(crate) fn restore<M: LightningModule>(self, module: &M) -> Result<()> {
        let Self { run, module: taken, rng, .. } = self;
        drop(run); // and with it what the optimizers keep
        let taken = taken.lock().ok().and_then(|mut taken| taken.take());
        taken.map_or(Ok(()), |taken| taken.restore(module))?;
        let parameters = module.parameters();
        ffi::clear_grads(parameters.iter().map(|parameter| parameter.leaf()))?;
        rng::set_states(&rng)
    }
}

/// Copies the module when it is complete, which it may become in `configure_model`, and before anything changes it.
struct TakeSnapshot(Arc<Mutex<Option<Snapshot>>>);

impl TakeSnapshot {
    fn take(&self, module: &dyn Module) -> anyhow::Result<()> {
        // on the host, so that the trial has the device's memory for itself
        let parts =
            SnapshotParts { parameters: true, buffers: true, metrics: true, on_host: true, grads: false };
        if let Ok(mut taken) = self.0.lock() {
            *taken = Some(Snapshot::of(module, parts)?);
        }
        Ok(())
    }
}

impl Callback for TakeSnapshot {
    fn on_fit_start(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.take(module)
    }

    fn on_validation_start(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.take(module)
    }

    fn on_test_start(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.take(module)
    }

    fn on_predict_start(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.take(module)
    }
}
