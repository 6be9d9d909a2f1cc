//! The trainer: from configuration to plan, then fit, validate, test or predict.
//!
//! Start with `fit.rs`: it holds the whole training step in reading order.

mod builder;
mod checkpointing;
mod config;
mod eval;
mod fit;
mod graphed;
mod guard;
mod optimizers;
mod plan;
mod schedule;
mod seed;
mod session;
mod signals;

use std::path::PathBuf;
use std::sync::Arc;

use tch::Tensor;

use crate::checkpoint::Checkpoint;
use crate::data::{DataLoader, DataModule, Stage};
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::module::{LightningModule, MetricStore, Progress, Requests};
use crate::nn::{ModuleExt, set_training};
use crate::optim::Optimizers;

pub use crate::accelerator::Devices;
pub use builder::TrainerBuilder;
pub use config::{CallbackConfig, FastDevRun, GradientClipAlgorithm, Limit, TrainerConfig};
pub use graphed::{GraphMode, GraphReport};
pub use optimizers::LrSchedulerSettings;
pub use seed::{global_seed, seed_everything};

/// Metrics of an evaluation, by name, in the order they were first logged.
pub type EvalMetrics = Vec<(String, f64)>;

use eval::EvalLoaders;
use fit::FitLoaders;
use graphed::StepGraphs;
use guard::guarded;
use optimizers::OptimizerOverride;
use plan::{FitPlan, TrainPlan, limit_batches};
use schedule::ActiveScheduler;
use session::{Run, Session, call_hook, hook_error};
use signals::Signals;

/// Trains, validates, tests and predicts with any [`LightningModule`].
///
/// ```no_run
/// # use voltaic::prelude::*;
/// # fn run<M: LightningModule, D: DataModule<Batch = M::Batch>>(net: &mut M, data: &mut D) -> voltaic::Result<()> {
/// let mut trainer = Trainer::builder().max_epochs(3).gradient_clip_val(1.0).build()?;
/// trainer.fit(net, data)?;
/// let metrics = trainer.test(net, data)?;
/// # Ok(()) }
/// ```
pub struct Trainer {
    config: TrainerConfig,
    plan: TrainPlan,
    run: Run,
    /// Replaces the module's `configure_optimizers`.
    optimizers: Option<OptimizerOverride>,
    /// For the next call only: `best`, `last` or a path.
    ckpt_path: Option<String>,
    /// Of the last fit.
    graphs: GraphReport,
}

impl Trainer {
    /// Starts to describe a trainer.
    pub fn builder() -> TrainerBuilder {
        TrainerBuilder::default()
    }

    /// The configuration as it was written.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Makes the next call start from a checkpoint: a path, `best` or `last` (of this trainer's runs, else the newest
    /// below `lightning_logs`). `fit` goes on exactly where the checkpoint was written; the others take its weights.
    pub fn ckpt_path(&mut self, ckpt_path: impl Into<String>) -> &mut Self {
        self.ckpt_path = Some(ckpt_path.into());
        self
    }

    /// Trains `module` on the data's training loader, validating as configured.
    ///
    /// # Errors
    /// [`Error::Hook`](crate::Error::Hook) if user code fails or panics; [`Error::Interrupted`](crate::Error::Interrupted)
    /// on Ctrl-C or SIGTERM, after the batch in progress; otherwise what the parts report. Checkpoints written before
    /// stay as they are.
    pub fn fit<M, D>(&mut self, module: &mut M, data: &mut D) -> Result<()>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let _engine = SingleThreadedEngine::enter()?;
        let ckpt_path = self.ckpt_path.take();
        // nothing of an earlier fit may show in this one
        self.run.requests = Requests::default();
        self.run.metrics = MetricStore::default();
        self.run.progress = Progress::default();
        self.setup(module, data, Stage::Fit)?;
        let mut loaders = self.fit_loaders(data)?;
        let optimizers = self.optimizers.clone();
        let mut session = self.session(module, Stage::Fit)?;
        let result = fit_session(&mut session, &mut loaders, optimizers, ckpt_path.as_deref());
        if let Err(error) = &result {
            session.on_exception(error);
        }
        let graphs = std::mem::take(&mut session.graphs.report);
        drop(session);
        self.graphs = graphs;
        result?;
        self.finish(module, data, Stage::Fit)
    }

    /// Runs the validation loaders once; returns their metrics.
    ///
    /// # Errors
    /// As [`Trainer::fit`].
    pub fn validate<M, D>(&mut self, module: &mut M, data: &mut D) -> Result<EvalMetrics>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let limit = self.plan.limit_val;
        let loaders = |data: &mut D| {
            (guarded(|| data.val_dataloaders()), "val_dataloaders", "limit_val_batches", limit)
        };
        self.evaluate(module, data, Stage::Validate, loaders, |session, data| session.validate(data))
    }

    /// Runs the test loaders once; returns their metrics.
    ///
    /// # Errors
    /// As [`Trainer::fit`].
    pub fn test<M, D>(&mut self, module: &mut M, data: &mut D) -> Result<EvalMetrics>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let limit = self.plan.limit_test;
        let loaders = |data: &mut D| {
            (guarded(|| data.test_dataloaders()), "test_dataloaders", "limit_test_batches", limit)
        };
        self.evaluate(module, data, Stage::Test, loaders, |session, data| session.test(data))
    }

    /// Runs the prediction loaders once; returns, for each loader, one tensor per batch.
    ///
    /// # Errors
    /// As [`Trainer::fit`].
    pub fn predict<M, D>(&mut self, module: &mut M, data: &mut D) -> Result<Vec<Vec<Tensor>>>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let limit = self.plan.limit_predict;
        let loaders = |data: &mut D| {
            (guarded(|| data.predict_dataloaders()), "predict_dataloaders", "limit_predict_batches", limit)
        };
        self.evaluate(module, data, Stage::Predict, loaders, |session, data| session.predict(data))
    }

    /// The latest value of a metric, such as `val_loss`.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.run.metrics.callback_metric(name)
    }

    /// Names of all metrics that have a value.
    pub fn metric_names(&self) -> Vec<String> {
        self.run.metrics.callback_metric_names()
    }

    /// Epochs completed.
    pub fn current_epoch(&self) -> u64 {
        self.run.progress.current_epoch + u64::from(self.run.progress.epoch_ended)
    }

    /// Optimizer steps done.
    pub fn global_step(&self) -> u64 {
        self.run.progress.global_step
    }

    /// What graphs did in the last fit, with `trainer.graph` on.
    pub fn graph_report(&self) -> &GraphReport {
        &self.graphs
    }

    /// The best checkpoint saved, if any.
    pub fn best_model_path(&self) -> Option<PathBuf> {
        self.run.callbacks.iter().find_map(|callback| callback.checkpoint_paths()?.best)
    }

    /// Files of this run that a user will want to look at: metrics and pictures.
    pub fn files(&self) -> Vec<PathBuf> {
        self.run.loggers.iter().flat_map(|logger| logger.files()).collect()
    }

    /// Folder of this run: where the first logger writes, else `default_root_dir`.
    pub fn log_dir(&self) -> &std::path::Path {
        &self.run.facts.log_dir
    }

    fn session<'a, M: LightningModule>(
        &'a mut self,
        module: &'a mut M,
        stage: Stage,
    ) -> Result<Session<'a, M>> {
        Ok(Session {
            plan: &self.plan,
            run: &mut self.run,
            module,
            optimizers: Vec::new(),
            schedulers: Vec::new(),
            signals: Arc::new(Signals::watch()?),
            stage,
            is_sanity_check: false,
            graphs: StepGraphs::new(self.plan.graph),
        })
    }

    /// `prepare_data`, then `setup` of data, callbacks and module, then the module goes to its device.
    fn setup<M, D>(&mut self, module: &mut M, data: &mut D, stage: Stage) -> Result<()>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let fail = |hook| move |source| hook_error(hook, 0, source);
        guarded(|| data.prepare_data()).map_err(fail("prepare_data"))?;
        guarded(|| data.setup(stage)).map_err(fail("setup of the data module"))?;
        for callback in &mut self.run.callbacks {
            guarded(|| callback.setup(stage, module)).map_err(fail("setup of a callback"))?;
        }
        guarded(|| module.setup(stage)).map_err(fail("setup"))?;
        module.to_device(self.plan.device)?;
        match self.plan.precision.true_dtype() {
            Some(dtype) => module.to_dtype(dtype),
            None => Ok(()),
        }
    }

    fn finish<M, D>(&mut self, module: &mut M, data: &mut D, stage: Stage) -> Result<()>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let fail = |hook| move |source| hook_error(hook, 0, source);
        guarded(|| data.teardown(stage)).map_err(fail("teardown of the data module"))?;
        for callback in &mut self.run.callbacks {
            guarded(|| callback.teardown(stage, module)).map_err(fail("teardown of a callback"))?;
        }
        guarded(|| module.teardown(stage)).map_err(fail("teardown"))?;
        self.run.loggers.iter_mut().try_for_each(|logger| logger.finalize(true))
    }

    fn fit_loaders<B, D>(&mut self, data: &mut D) -> Result<FitLoaders<B>>
    where
        B: crate::data::Batch,
        D: DataModule<Batch = B> + ?Sized,
    {
        let fail = |hook| move |source| hook_error(hook, 0, source);
        let train = guarded(|| data.train_dataloader()).map_err(fail("train_dataloader"))?;
        let Some(mut train) = train else {
            let remedy = "implement DataModule::train_dataloader, or give Loaders a train loader";
            return Err(ConfigError::new("data", "there is no training loader", remedy).into());
        };
        let mut val = guarded(|| data.val_dataloaders()).map_err(fail("val_dataloaders"))?;
        self.run.seed = global_seed();
        train.set_seed(self.run.seed);
        val.iter_mut().for_each(|loader| loader.set_seed(self.run.seed));
        let available: Vec<usize> = val.iter().map(DataLoader::num_batches).collect();
        let plan = FitPlan::new(&self.plan, train.num_batches(), &available)?;
        let facts = &mut self.run.facts;
        facts.num_training_batches = plan.num_training_batches;
        facts.train_batch_size = train.batch_size();
        facts.num_eval_batches = plan.num_val_batches.iter().sum();
        facts.validates_at_epoch_end = plan.val_check_batch == plan.num_training_batches;
        Ok(FitLoaders { train, val, plan })
    }

    fn evaluate<M, D, T>(
        &mut self,
        module: &mut M,
        data: &mut D,
        stage: Stage,
        loaders: impl FnOnce(
            &mut D,
        )
            -> (anyhow::Result<Vec<DataLoader<M::Batch>>>, &'static str, &'static str, Limit),
        body: impl FnOnce(&mut Session<M>, &EvalLoaders<M::Batch>) -> Result<T>,
    ) -> Result<T>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let ckpt_path = self.ckpt_path.take();
        self.setup(module, data, stage)?;
        if let Some(path) = ckpt_path.map(|path| checkpointing::find(&self.run, &path)).transpose()?.flatten()
        {
            module.load_state_dict(&Checkpoint::load(&path)?.weights, true)?;
        }
        let (loaders, method, limit_key, limit) = loaders(data);
        let mut loaders = loaders.map_err(|source| hook_error(method, 0, source))?;
        if loaders.is_empty() {
            let what = format!("there is no loader to {stage}");
            return Err(ConfigError::new("data", what, format!("implement DataModule::{method}")).into());
        }
        loaders.iter_mut().for_each(|loader| loader.set_seed(global_seed()));
        let available: Vec<usize> = loaders.iter().map(DataLoader::num_batches).collect();
        let num_batches = limit_batches(limit_key, limit, &available)?;
        self.run.facts.num_eval_batches = num_batches.iter().sum();
        let mut session = self.session(module, stage)?;
        let data_of_stage = EvalLoaders { loaders: &loaders, num_batches: &num_batches };
        let result = body(&mut session, &data_of_stage)
            .and_then(|output| session.write_checkpoints().map(|()| output));
        if let Err(error) = &result {
            session.on_exception(error);
        }
        drop(session);
        let output = result?;
        self.finish(module, data, stage)?;
        Ok(output)
    }
}

/// The whole of fit once data and module are set up.
fn fit_session<M: LightningModule>(
    session: &mut Session<M>,
    loaders: &mut FitLoaders<M::Batch>,
    optimizers: Option<OptimizerOverride>,
    ckpt_path: Option<&str>,
) -> Result<()> {
    set_training(session.module, true);
    configure_optimizers(session, optimizers)?;
    let mut rng = Vec::new();
    if let Some(path) = ckpt_path.map(|path| checkpointing::find(session.run, path)).transpose()?.flatten() {
        rng = checkpointing::restore_training(session, loaders, Checkpoint::load(&path)?, &path)?;
        tracing::info!("resumed {} at global_step {}", path.display(), session.run.progress.global_step);
    }
    call_hook!(session, on_fit_start, Train, Denied)?;
    let hyper_parameters = session.module.hyper_parameters();
    if !hyper_parameters.is_null() {
        session.run.loggers.iter_mut().try_for_each(|logger| logger.log_hyperparams(&hyper_parameters))?;
    }
    session.sanity_check(&loaders.val, &loaders.plan.num_val_batches)?;
    seed::set_rng_states(&rng)?;
    session.train(loaders)?;
    call_hook!(session, on_fit_end, Train, Denied)?;
    session.write_checkpoints()
}

fn configure_optimizers<M: LightningModule>(
    session: &mut Session<M>,
    replacement: Option<OptimizerOverride>,
) -> Result<()> {
    let configured: Optimizers = match replacement {
        Some(replacement) => replacement.into(),
        None => guarded(|| session.module.configure_optimizers())
            .map_err(|source| hook_error("configure_optimizers", 0, source))?,
    };
    for (index, built) in configured.build(session.module)?.into_iter().enumerate() {
        session.optimizers.push(built.optimizer);
        session
            .schedulers
            .extend(built.scheduler.map(|configured| ActiveScheduler { optimizer: index, configured }));
    }
    if session.optimizers.len() == 1 {
        return Ok(());
    }
    let what = format!("{} optimizers with automatic optimization", session.optimizers.len());
    Err(ConfigError::new("configure_optimizers", what, "return exactly one, with several groups if need be")
        .into())
}

/// Backward runs on the calling thread while this lives: the hop to the engine's device threads costs more than it
/// saves on one device.
struct SingleThreadedEngine {
    was_multithreaded: bool,
}

impl SingleThreadedEngine {
    fn enter() -> Result<Self> {
        let was_multithreaded = ffi::engine_multithreading()?;
        ffi::set_engine_multithreading(false)?;
        Ok(Self { was_multithreaded })
    }
}

impl Drop for SingleThreadedEngine {
    fn drop(&mut self) {
        if let Err(error) = ffi::set_engine_multithreading(self.was_multithreaded) {
            tracing::warn!("autograd's threads could not be switched back: {error}");
        }
    }
}
