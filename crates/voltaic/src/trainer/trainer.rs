//! [`Trainer`], and what can be done with it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::builder::TrainerBuilder;
use super::config::TrainerConfig;
use super::config::graph::GraphReport;
use super::config::optimizers::OptimizerOverride;
use super::config::searches::{BatchSizeFinderConfig, LearningRateFinderConfig};
use super::plan::contradictions;
use super::plan::train_plan::TrainPlan;
use super::run::eval::{EvalLoaders, EvalMetrics};
use super::run::loaders::LoaderSource;
use super::run::stages::{evaluate_session, fit_session};
use super::session::captured_optimizers::CapturedOptimizers;
use super::session::data_hooks::{Data, DataHooks};
use super::session::frozen::AfterFit;
use super::session::graphs::StepGraphs;
use super::session::run::Run;
use super::session::session::Session;
use super::session::signals::Signals;
use super::state::find as find_checkpoint;
use super::state::{collect, write};
use crate::accelerator::rng::global_seed;
use crate::data::{DataModule, Stage};
use crate::distributed::World;
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::module::{LightningModule, MetricStore, ProfiledRun, Progress, Requests};
use crate::nn::SyncBatchNorm;
use crate::precision::GradScaler;
use crate::strategy::Votes;

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
    pub(super) config: TrainerConfig,
    pub(super) plan: TrainPlan,
    pub(super) run: Run,
    /// Replaces the module's `configure_optimizers`.
    pub(super) optimizers: Option<OptimizerOverride>,
    /// There with the callback LearningRateFinder.
    pub(super) lr_finder: Option<LearningRateFinderConfig>,
    /// There with the callback BatchSizeFinder.
    pub(super) batch_size_finder: Option<BatchSizeFinderConfig>,
    /// The model summary shows operations.
    pub(super) counts_flops: bool,
    /// For the next call only: `best`, `last` or a path.
    pub(super) ckpt_path: Option<String>,
    /// What a checkpoint of the last fit goes on from.
    pub(super) after_fit: Option<AfterFit>,
    /// The next call of predict returns nothing.
    pub(super) drops_predictions: bool,
    /// Of the last fit.
    pub(super) graphs: GraphReport,
}

impl Trainer {
    /// A new builder.
    pub fn builder() -> TrainerBuilder {
        TrainerBuilder::default()
    }

    /// The configuration as it was written.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Makes the next call start from a checkpoint: a path, `best` or `last`. `fit` goes on exactly where the checkpoint was
    /// written; the others take its weights.
    ///
    /// `last` is the newest checkpoint that this trainer has saved, else the newest of the runs of this configuration: in
    /// the folders of its callbacks, and those of all runs below the folder and name of its loggers. `best` is what the
    /// newest checkpoint names as the best of its run. The next call fails if there is none, but for `fit` from `last`,
    /// which then starts from the beginning, with a warning.
    pub fn ckpt_path(&mut self, ckpt_path: impl Into<String>) -> &mut Self {
        self.ckpt_path = Some(ckpt_path.into());
        self
    }

    /// Whether the next call of [`Trainer::predict`] returns what it predicts, as it does unless told otherwise. Without,
    /// predictions are not kept in memory: callbacks such as [`PredictionWriter`](crate::callback::PredictionWriter) take them.
    pub fn return_predictions(&mut self, returns: bool) -> &mut Self {
        self.drops_predictions = !returns;
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
        let ckpt_path = self.run.after_restart(ckpt_path)?;
        let ckpt_path = find_checkpoint::or_of_failed_run(&self.run, ckpt_path)?;
        if ckpt_path.is_none() {
            self.find_batch_size(module, data, Stage::Fit)?;
            self.find_lr(module, data)?;
        }
        self.count_for_summary(module, data)?;
        // nothing of an earlier fit may show in this one
        self.run.requests = Requests::default();
        self.run.metrics =
            MetricStore::of_ranks(self.run.world().group().cloned()).off_if(self.plan.barebones);
        self.run.agreed = Votes::default();
        self.run.progress = Progress::default();
        self.after_fit = None;
        let optimizers = self.optimizers.clone();
        let ranks = self.run.world().group().cloned();
        let _sync = ranks.filter(|_| self.plan.ranks.sync_batchnorm).map(SyncBatchNorm::over);
        if self.config.max_epochs.is_none() && self.plan.max_epochs == Some(1000) && self.is_global_zero() {
            tracing::warn!(
                "trainer.max_epochs is not set: training ends after 1000 epochs; -1 is for no limit"
            );
        }
        self.say_what_has_no_effect();
        let mut data = Data(data);
        let mut session = self.session(module, &mut data, Stage::Fit)?;
        let result = fit_session(&mut session, optimizers, ckpt_path.as_deref());
        let result = session.conclude(result);
        let graphs = session.graphs.take_report();
        let after_fit = session.after_fit.take();
        drop(session);
        self.graphs = graphs;
        self.after_fit = after_fit;
        self.run.strategy.teardown();
        result?;
        self.run.forget_note()
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
        self.evaluate(module, data, Stage::Validate, &LoaderSource::VALIDATION, |session, data| {
            session.validate(data)
        })
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
        self.evaluate(module, data, Stage::Test, &LoaderSource::TEST, |session, data| session.test(data))
    }

    /// Runs the prediction loaders once; returns, for each loader, one tensor per batch, or none after
    /// [`Trainer::return_predictions`]`(false)`.
    ///
    /// # Errors
    /// As [`Trainer::fit`].
    pub fn predict<M, D>(&mut self, module: &mut M, data: &mut D) -> Result<Vec<Vec<Tensor>>>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let returns = !std::mem::take(&mut self.drops_predictions);
        self.evaluate(module, data, Stage::Predict, &LoaderSource::PREDICTION, |session, data| {
            session.predict(data, returns)
        })
    }

    /// Writes a full checkpoint of the last fit, from which another goes on. One that was stopped within an epoch is saved
    /// as it was then, so that the epoch is finished. See [`Trainer::save_weights`] for the weights alone, which is
    /// Lightning's `weights_only=True`; within fit there is
    /// [`HookContext::request_checkpoint`](crate::module::HookContext::request_checkpoint).
    ///
    /// # Errors
    /// [`ConfigError`] if this trainer has not trained; as [`Trainer::save_weights`].
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn save_checkpoint<M, D>(
        &mut self,
        module: &mut M,
        data: &mut D,
        path: impl AsRef<std::path::Path>,
        storage_options: Option<&serde_json::Value>,
    ) -> Result<()>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let Some(after_fit) = self.after_fit.take() else {
            let what = "there is no training state: this trainer has not trained";
            let remedy = "fit first, or save the weights alone with save_weights";
            return Err(ConfigError::new("save_checkpoint", what, remedy).into());
        };
        let mut data = Data(data);
        let mut session = self.bare_session(module, &mut data, Stage::Fit)?;
        let result = write::write_after_fit(&mut session, &after_fit, path.as_ref(), storage_options);
        drop(session);
        self.after_fit = Some(after_fit);
        result?;
        self.run.world().barrier()
    }

    /// Writes the weights and hyper-parameters of `module`.
    ///
    /// # Errors
    /// If the file cannot be written, or the trainer's [`CheckpointIo`](crate::checkpoint::CheckpointIo) does not know one of `storage_options`.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn save_weights<M: LightningModule>(
        &mut self,
        module: &M,
        path: impl AsRef<std::path::Path>,
        storage_options: Option<&serde_json::Value>,
    ) -> Result<()> {
        if self.is_global_zero() {
            let checkpoint = collect::weights(module, &self.run.progress);
            self.run.checkpoint_io.save_checkpoint(&checkpoint, path.as_ref(), storage_options)?;
            self.run.checkpoint_io.teardown()?;
        }
        self.run.world().barrier()
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

    /// What scales the loss with `precision=16-mixed`, and how many steps it left out so far.
    pub fn grad_scaler(&self) -> Option<&GradScaler> {
        self.run.grad_scaler.as_ref()
    }

    /// What the profiler has measured, as text; `None` without a profiler.
    pub fn profiler_summary(&self) -> Option<String> {
        self.run.profiling.summary()
    }

    /// The best checkpoint saved, if any.
    pub fn best_model_path(&self) -> Option<PathBuf> {
        find_checkpoint::saved(&self.run).into_iter().find_map(|paths| paths.best)
    }

    /// The newest checkpoint of the last fit, if a callback keeps it.
    pub fn last_model_path(&self) -> Option<PathBuf> {
        find_checkpoint::saved(&self.run).into_iter().find_map(|paths| paths.last)
    }

    /// Files of this run that a user will want to look at: metrics and pictures.
    pub fn files(&self) -> Vec<PathBuf> {
        self.run.loggers.iter().flat_map(|logger| logger.files()).collect()
    }

    /// Whether this process is the one of all ranks that prints and writes files.
    pub fn is_global_zero(&self) -> bool {
        self.run.world().is_global_zero()
    }

    /// The device of this rank: `trainer.strategy.root_device`.
    pub fn device(&self) -> crate::device::Device {
        self.plan.device
    }

    /// The ranks of the run, and which of them this process is.
    pub fn world(&self) -> &World {
        self.run.world()
    }

    /// Name of the strategy, such as `ddp`.
    pub fn strategy(&self) -> &'static str {
        self.run.strategy.name()
    }

    /// Folder of this run: where the first logger writes, else `default_root_dir`.
    pub fn log_dir(&self) -> &std::path::Path {
        &self.run.facts.log_dir
    }

    /// Once, on rank 0, and not in a trial, whose keys nobody has set.
    fn say_what_has_no_effect(&self) {
        if self.run.fits > 1 || self.plan.drops_schedulers || !self.is_global_zero() {
            return;
        }
        if self.plan.fast_dev_run {
            tracing::info!("fast_dev_run: a trial that logs and saves nothing");
        }
        for note in contradictions::without_effect(&self.config, &self.plan, self.run.facts.has_logger) {
            tracing::warn!("{note}");
        }
    }

    fn session<'a, M: LightningModule>(
        &'a mut self,
        module: &'a mut M,
        data: &'a mut dyn DataHooks<M::Batch>,
        stage: Stage,
    ) -> Result<Session<'a, M>> {
        self.run.seed = global_seed();
        let world = self.run.world();
        self.run.profiling.setup(|| ProfiledRun {
            stage,
            rank: world.rank,
            world_size: world.world_size,
            log_dir: self.run.facts.log_dir.clone(),
        })?;
        self.bare_session(module, data, stage)
    }

    /// A session that no profiler looks at.
    fn bare_session<'a, M: LightningModule>(
        &'a mut self,
        module: &'a mut M,
        data: &'a mut dyn DataHooks<M::Batch>,
        stage: Stage,
    ) -> Result<Session<'a, M>> {
        Ok(Session {
            plan: &self.plan,
            run: &mut self.run,
            module,
            data,
            optimizers: Vec::new(),
            schedulers: Vec::new(),
            accumulate_grad_batches: self.plan.accumulate_grad_batches,
            toggled: Vec::new(),
            captured_optimizers: CapturedOptimizers::default(),
            has_scaled: false,
            last_validation: Instant::now(),
            anomaly: None,
            signals: Arc::new(Signals::watch()?),
            stage,
            is_sanity_check: false,
            is_ending_epoch: false,
            has_begun: false,
            frozen: None,
            after_fit: None,
            undo: None,
            graphs: StepGraphs::new(self.plan.graph),
        })
    }

    fn evaluate<M, D, T>(
        &mut self,
        module: &mut M,
        data: &mut D,
        stage: Stage,
        source: &LoaderSource<M>,
        body: impl FnOnce(&mut Session<M>, &EvalLoaders<M::Batch>) -> Result<T>,
    ) -> Result<T>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        self.find_batch_size(module, data, stage)?;
        let ckpt_path = self.ckpt_path.take();
        let mut data = Data(data);
        let mut session = self.session(module, &mut data, stage)?;
        let result = evaluate_session(&mut session, source, ckpt_path.as_deref(), body);
        session.conclude(result)
    }
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

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::Trainer;
    use crate::data::{DataLoader, Loaders, TensorDataset};
    use crate::metrics::MeanMetric;
    use crate::module::{LightningModule, LogValue, READS, StepContext};
    use crate::nn::{Module, Parameter};
    use crate::optim::{Optimizers, Sgd};

    /// Logs as if its tensors were on a device, where a read makes the host wait.
    #[derive(Module)]
    struct Net {
        weight: Parameter,
        mean: MeanMetric,
    }

    impl LightningModule for Net {
        type Batch = Tensor;

        fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
            let loss = (batch * self.weight.tensor()).f_mean(Kind::Float)?;
            ctx.log("loss", LogValue::Tensor(loss.f_detach()?)).on_epoch(true).prog_bar(true);
            ctx.log("other", LogValue::Tensor(loss.f_detach()?));
            self.mean.update(&loss, 1.0)?;
            ctx.log("mean", &self.mean).on_epoch(true);
            Ok(loss)
        }

        fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
            Sgd::new(0.1).into()
        }
    }

    #[test]
    fn logged_values_are_read_back_for_rows_and_at_the_end_of_an_epoch_only() {
        let root = tempfile::tempdir().unwrap();
        let reads_in = |every: u64| {
            let x = Tensor::ones([40, 2], (Kind::Float, tch::Device::Cpu));
            let mut data =
                Loaders::new().train(DataLoader::new(TensorDataset::new(x).unwrap()).build().unwrap());
            let mut trainer = Trainer::builder()
                .default_root_dir(root.path())
                .enable_progress_bar(false)
                .enable_model_summary(false)
                .enable_checkpointing(false)
                .max_epochs(1)
                .log_every_n_steps(every)
                .build()
                .unwrap();
            let weight = Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu)));
            let before = READS.get();
            trainer.fit(&mut Net { weight, mean: MeanMetric::new() }, &mut data).unwrap();
            READS.get() - before
        };
        let without_rows = reads_in(0);
        assert!(without_rows <= 15, "{without_rows} reads at the end of the epoch");
        assert_eq!(reads_in(10), without_rows + 3 * 4, "three values in each of four rows");
    }
}
