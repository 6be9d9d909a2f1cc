//! [`Trainer`], and what can be done with it.

use std::path::PathBuf;

use tch::Tensor;

use crate::data::{DataModule, Loaders, Stage};
use crate::distributed::{World, collective_scope};
use crate::error::{ConfigError, Result};
use crate::graph::{Flops, ShownGraph};
use crate::module::{LightningModule, StepOutput};
use crate::nn::{ModuleExt, ModuleHooks};
use crate::precision::{GradScaler, LossScaler};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::graph::GraphReport;
use crate::trainer::config::optimizers::OptimizerOverride;
use crate::trainer::config::searches::{BatchSizeFinderConfig, LearningRateFinderConfig, Searches};
use crate::trainer::config::values::{CkptPath, InitialWeights};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::plan::{contradictions, deepspeed};
use crate::trainer::run::eval::{EvalLoaders, EvalMetrics};
use crate::trainer::search::lr_finder::LrFind;
use crate::trainer::search::trial::Searcher;
use crate::trainer::session::agree::agreed;
use crate::trainer::session::session::{CallOptions, Run, Session};
use crate::trainer::state::find::{or_of_failed_run, saved};
use crate::trainer::state::restart::or_of_requeued_job;
use crate::trainer::state::write::{as_on_rank_zero, save_weights};

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
    searches: Searches,
    /// By the last search.
    found_lr: Option<f64>,
    /// By the last search, for the loaders of a stage.
    found_batch_size: Option<(Stage, usize)>,
    /// For the next call only.
    ckpt_path: Option<CkptPath>,
    /// The next call of predict returns nothing.
    drops_predictions: bool,
    /// Settings of the strategy that have no effect were logged.
    has_said_notes: bool,
}

impl Trainer {
    /// A trainer of parts that belong together.
    pub(super) fn new(
        config: TrainerConfig,
        plan: TrainPlan,
        run: Run,
        optimizers: Option<OptimizerOverride>,
        searches: Searches,
    ) -> Self {
        Self {
            config,
            plan,
            run,
            optimizers,
            searches,
            found_lr: None,
            found_batch_size: None,
            ckpt_path: None,
            drops_predictions: false,
            has_said_notes: false,
        }
    }

    /// The configuration as it was written.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Makes the next call start from a checkpoint: a path, `best`, `last` or `hpc`. `fit` resumes exactly where the checkpoint was
    /// written; the others take its weights.
    ///
    /// `last` is the newest checkpoint that this trainer has saved, else the newest of the runs of this configuration: in
    /// the folders of its callbacks, and those of all runs below the folder and name of its loggers. `best` is what the
    /// newest checkpoint names as the best of its run. The next call fails if there is none, but for `fit` from `last`,
    /// which then starts from the beginning, with a warning. `hpc` is the newest that a run has saved in `default_root_dir`
    /// when Slurm gave notice.
    pub fn ckpt_path(&mut self, ckpt_path: impl Into<CkptPath>) -> &mut Self {
        self.ckpt_path = Some(ckpt_path.into());
        self
    }

    /// Makes the next call begin with the weights of a file, and a fit with the first epoch: a checkpoint of voltaic, Lightning or
    /// DeepSpeed, a safetensors file, a state dict of `torch.save`. The rest of a checkpoint is left where it is. A call with a
    /// checkpoint ([`Trainer::ckpt_path`], a run that is started again) has the checkpoint's, and says so.
    ///
    /// Unless `strict`, weights whose names are on one side only stay as they are; a warning names them. Shapes must be the same.
    ///
    /// Source: `torch.nn.Module.load_state_dict`.
    pub fn weights(&mut self, path: impl Into<PathBuf>, strict: bool) -> &mut Self {
        self.weights_renamed(path, strict, [])
    }

    /// [`Trainer::weights`] of a file whose names begin otherwise: `[("model.", "net.")]` renames `model.fc.weight` to
    /// `net.fc.weight`. Of several pairs the first counts that fits a name. Strategies that shard weights do not rename:
    /// `voltaic convert --rename` does.
    pub fn weights_renamed<const N: usize>(
        &mut self,
        path: impl Into<PathBuf>,
        strict: bool,
        rename: [(&str, &str); N],
    ) -> &mut Self {
        let rename = rename.map(|(from, to)| (from.to_owned(), to.to_owned())).into();
        self.begin_with(InitialWeights { path: path.into(), strict, rename })
    }

    pub(crate) fn begin_with(&mut self, weights: InitialWeights) -> &mut Self {
        self.run.weights = Some(weights);
        self
    }

    /// Whether the next call of [`Trainer::predict`] returns what it predicts, as it does by default. Without,
    /// predictions are not kept in memory: callbacks such as [`PredictionWriter`](crate::callback::PredictionWriter) take them.
    pub fn return_predictions(&mut self, returns: bool) -> &mut Self {
        self.drops_predictions = !returns;
        self
    }

    /// Trains `module` on the data's training loader, validating as configured.
    ///
    /// # Errors
    /// [`Error::Hook`](crate::Error::Hook) if user code fails or panics; [`Error::Interrupted`](crate::Error::Interrupted)
    /// on Ctrl-C, SIGTERM, SIGHUP or Slurm's notice, after the batch in progress; otherwise what the parts report. Checkpoints written before
    /// stay as they are.
    pub fn fit<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<()> {
        let ckpt_path = self.ckpt_path.take();
        if let Some(inference) = self.plan.ranks.strategy.inference() {
            return Err(inference.refuse_fit().into());
        }
        let ckpt_path = self.run.after_restart(ckpt_path)?;
        let ckpt_path = or_of_requeued_job(&self.run, ckpt_path)?;
        let ckpt_path = or_of_failed_run(&self.run, ckpt_path)?;
        if ckpt_path.is_none() {
            self.find_batch_size(module, data, Stage::Fit)?;
            if let Some(config) = &self.searches.lr {
                self.found_lr = self.searcher().find_lr(module, data, config)?.or(self.found_lr);
            }
        }
        if self.searches.counts_flops {
            self.run.facts.flops = self.searcher().flops_for_summary(module, data)?;
        }
        self.warn_ignored_options();
        let options = self.options(Stage::Fit, ckpt_path);
        let done = self.run.fit(&self.plan, module, data, &options);
        self.run.weights = None;
        done?;
        self.run.forget_note()
    }

    /// Runs the validation loaders once; returns their metrics.
    ///
    /// # Errors
    /// As [`Trainer::fit`].
    pub fn validate<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<EvalMetrics> {
        self.evaluate(module, data, Stage::Validate, |session, data| session.validate(data))
    }

    /// Runs the test loaders once; returns their metrics.
    ///
    /// # Errors
    /// As [`Trainer::fit`].
    pub fn test<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<EvalMetrics> {
        self.evaluate(module, data, Stage::Test, |session, data| session.test(data))
    }

    /// Runs the prediction loaders once; returns, for each loader, one tensor per batch, or none after
    /// [`Trainer::return_predictions`]`(false)`.
    ///
    /// # Errors
    /// As [`Trainer::fit`]; [`ConfigError`] if `predict_step` returned `ctx.no_prediction()`: see [`Trainer::predict_outputs`].
    pub fn predict<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<Vec<Vec<Tensor>>> {
        let outputs = self.predict_outputs(module, data)?;
        let returned = |output: StepOutput| {
            output.prediction.ok_or_else(|| {
                let remedy = "call Trainer::predict_outputs, or return_predictions(false) first";
                ConfigError::new("predict_step", "it returned no prediction for a batch", remedy).into()
            })
        };
        outputs.into_iter().map(|batches| batches.into_iter().map(returned).collect()).collect()
    }

    /// Runs the prediction loaders once; returns, for each loader, all that `predict_step` gave for each batch, what it gave
    /// by name included, or nothing after [`Trainer::return_predictions`]`(false)`.
    ///
    /// # Errors
    /// As [`Trainer::fit`].
    pub fn predict_outputs<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<Vec<Vec<StepOutput>>> {
        let returns = !std::mem::take(&mut self.drops_predictions);
        self.evaluate(module, data, Stage::Predict, |session, data| session.predict(data, returns))
    }

    /// Writes a full checkpoint of the last fit, which another can resume. One that was stopped within an epoch is saved
    /// as it was then, so that the epoch is finished. See [`Trainer::save_weights`] for the weights alone, which is
    /// Lightning's `weights_only=True`; within fit there is
    /// [`HookContext::request_checkpoint`](crate::module::HookContext::request_checkpoint).
    ///
    /// # Errors
    /// [`ConfigError`] if this trainer has not trained; as [`Trainer::save_weights`].
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn save_checkpoint<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        path: impl AsRef<std::path::Path>,
        storage_options: Option<&serde_json::Value>,
    ) -> Result<()> {
        if self.run.snapshot.is_none() {
            let what = "there is no training state: this trainer has not trained";
            let remedy = "fit first, or save the weights alone with save_weights";
            return Err(ConfigError::new("save_checkpoint", what, remedy).into());
        }
        let options = CallOptions::default();
        let result = self.run.begin_call(Stage::Fit).and_then(|()| {
            let snapshot = self.run.snapshot.take();
            let mut session =
                Session { snapshot, ..Session::new(&self.plan, &options, &mut self.run, module, data) };
            let done = session.write_after_fit(path.as_ref(), storage_options);
            session.run.snapshot = session.snapshot.take();
            done
        });
        self.run.engine.end_call();
        as_on_rank_zero(self.run.world(), result, path.as_ref())
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
        save_weights(&mut self.run, module, path.as_ref(), storage_options, &|_| true)
    }

    /// Unshards a module, on each rank, whose weights the last call of this trainer has left sharded over the ranks: with `zero3`
    /// if it was made within [`nn::init::deferred`](crate::nn::init::deferred), or if `gather_after_fit` is off. Others stay as they
    /// are. To write the weights it need not be unsharded: see [`Trainer::save_weights`].
    ///
    /// ```no_run
    /// # use voltaic::models::{Gpt, GptConfig};
    /// # use voltaic::nn::{ModuleExt, init};
    /// # fn train(trainer: &mut voltaic::trainer::Trainer, data: &mut voltaic::data::Loaders<(voltaic::Tensor, voltaic::Tensor)>)
    /// # -> voltaic::Result<()> {
    /// let mut net = init::deferred(|| Gpt::new(GptConfig::tiny()))?;
    /// trainer.fit(&mut net, data)?;
    /// trainer.test(&mut net, data)?; // with weights that are sharded
    /// trainer.save_weights(&net, "gpt.ckpt", None)?; // tensor by tensor
    /// trainer.gather_weights(&net)?;
    /// let weights = net.try_state_dict()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone; if memory is short.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn gather_weights<M: LightningModule>(&mut self, module: &M) -> Result<()> {
        let _named = collective_scope("gather_weights");
        self.run.engine.strategy.gather_weights(module.as_dyn())
    }

    /// The latest value of a metric, such as `val_loss`.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.run.log.metrics.callback_metric(name)
    }

    /// Names of all metrics that have a value.
    pub fn metric_names(&self) -> Vec<String> {
        self.run.log.metrics.callback_metric_names()
    }

    /// Epochs completed.
    pub fn current_epoch(&self) -> u64 {
        self.run.at.progress.current_epoch + u64::from(self.run.at.progress.epoch_ended)
    }

    /// Optimizer steps done.
    pub fn global_step(&self) -> u64 {
        self.run.at.progress.global_step
    }

    /// What graphs did in the last call of fit, validate, test or predict.
    pub fn graph_report(&self) -> &GraphReport {
        &self.run.graphs
    }

    /// What scales the loss with `precision=16-mixed`, and how many steps it left out so far.
    pub fn grad_scaler(&self) -> Option<&GradScaler> {
        self.run.engine.loss_scale.as_ref()?.grad_scaler()
    }

    /// What scales the loss where weights in 16 bits are kept in float32 by the strategy, and how many steps it left out so far.
    pub fn loss_scaler(&self) -> Option<&LossScaler> {
        self.run.engine.loss_scale.as_ref()?.loss_scaler()
    }

    /// Hooks of the calls of modules that this trainer runs: see [`HookContext::module_hooks`](crate::module::HookContext::module_hooks).
    pub fn module_hooks(&self) -> &ModuleHooks {
        &self.run.facts.module_hooks
    }

    /// What the profiler has measured, as text; `None` without a profiler.
    pub fn profiler_summary(&self) -> Option<String> {
        self.run.facts.profiling.summary()
    }

    /// The best checkpoint saved, if any.
    pub fn best_model_path(&self) -> Option<PathBuf> {
        saved(&self.run).into_iter().find_map(|paths| paths.best)
    }

    /// The newest checkpoint of the last fit, if a callback keeps it.
    pub fn last_model_path(&self) -> Option<PathBuf> {
        saved(&self.run).into_iter().find_map(|paths| paths.last)
    }

    /// Files of this run that a user will want to look at: metrics, pictures and predictions.
    pub fn files(&self) -> Vec<PathBuf> {
        let of_loggers = self.run.loggers.iter().flat_map(|logger| logger.files());
        of_loggers.chain(self.run.callbacks.iter().flat_map(|callback| callback.files())).collect()
    }

    /// Whether this process is the one of all ranks that prints and writes files.
    pub fn is_global_zero(&self) -> bool {
        self.run.world().is_global_zero()
    }

    /// The device of this rank: `trainer.strategy.root_device`.
    pub fn device(&self) -> crate::device::Device {
        self.plan.device
    }

    /// Ends all ranks if one of them could not write what belongs to the run.
    ///
    /// # Collective
    /// All ranks must call it.
    pub(crate) fn compare_written(&self, done: Result<()>) -> Result<()> {
        let _named = collective_scope("what a rank writes");
        agreed(self.world(), "write", &self.run.facts.log_dir, done)
    }

    /// The ranks of the run, and which of them this process is.
    pub fn world(&self) -> &World {
        self.run.world()
    }

    /// Name of the strategy, such as `ddp`.
    pub fn strategy(&self) -> &'static str {
        self.run.engine.strategy.name()
    }

    /// Folder of this run: where the first logger writes, else `default_root_dir`.
    pub fn log_dir(&self) -> &std::path::Path {
        &self.run.facts.log_dir
    }

    /// Once, on rank 0.
    fn warn_ignored_options(&mut self) {
        if self.config.max_epochs.is_none() && self.plan.max_epochs == Some(1000) && self.is_global_zero() {
            tracing::warn!(
                "trainer.max_epochs is not set: training ends after 1000 epochs; -1 is for no limit"
            );
        }
        if self.run.fits > 1 || !self.is_global_zero() {
            return;
        }
        if self.plan.fast_dev_run {
            tracing::info!("fast_dev_run: a short run that logs and saves nothing");
        }
        for note in contradictions::ignored_options(&self.config, &self.plan, self.run.facts.has_logger) {
            tracing::warn!("{note}");
        }
        self.say_notes_of_strategy();
    }

    /// Settings of the strategy that have no effect, once, on rank 0.
    fn say_notes_of_strategy(&mut self) {
        if !std::mem::replace(&mut self.has_said_notes, true) {
            deepspeed::say_notes(&self.config, &self.plan, self.is_global_zero());
        }
    }

    /// The options of a call that starts from `ckpt_path`.
    fn options(&self, stage: Stage, ckpt_path: Option<CkptPath>) -> CallOptions {
        let batch_size = self.found_batch_size.filter(|(of_stage, _)| *of_stage == stage);
        CallOptions {
            ckpt_path,
            optimizers: self.optimizers.clone(),
            lr: self.found_lr,
            batch_size: batch_size.map(|(_, size)| size),
            is_trial: false,
            is_own_loop: false,
        }
    }

    fn searcher(&self) -> Searcher<'_> {
        Searcher {
            config: &self.config,
            plan: &self.plan,
            run: &self.run,
            optimizers: self.optimizers.as_ref(),
        }
    }

    /// What the callback BatchSizeFinder asks for.
    fn find_batch_size<M: LightningModule>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        stage: Stage,
    ) -> Result<()> {
        if let Some(config) = &self.searches.batch_size {
            self.found_batch_size = None;
            let found = self.searcher().find_batch_size(module, data, stage, config)?;
            self.found_batch_size = found.map(|size| (stage, size));
        }
        Ok(())
    }

    fn evaluate<M: LightningModule, T>(
        &mut self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        stage: Stage,
        body: impl FnOnce(&mut Session<M>, &EvalLoaders<M::Batch>) -> Result<T>,
    ) -> Result<T> {
        self.find_batch_size(module, data, stage)?;
        if self.plan.ranks.strategy.inference().is_some() {
            self.say_notes_of_strategy();
        }
        let ckpt_path = self.ckpt_path.take();
        let options = self.options(stage, ckpt_path);
        let output = self.run.evaluate(&self.plan, module, data, (stage, &options), body);
        self.run.weights = None;
        output
    }
}

/// Searches before a fit.
impl Trainer {
    /// Trains for a few steps with a growing learning rate and gives the losses; weights, buffers and random numbers are
    /// as before then. Callbacks, loggers, validation and schedules take no part. Source: Lightning's `Tuner.lr_find`.
    ///
    /// # Errors
    /// As [`Trainer::fit`]; [`ConfigError`] if the configuration is not valid.
    pub fn lr_find<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        config: &LearningRateFinderConfig,
    ) -> Result<LrFind> {
        self.searcher().lr_find(module, data, config)
    }

    /// The learning rate that the callback LearningRateFinder has found, if the fit uses it (`update_attr`).
    pub fn found_lr(&self) -> Option<f64> {
        self.found_lr
    }

    /// Finds the largest batch size for which `stage` has room in memory, by running a few steps with each; weights,
    /// buffers, metrics and random numbers are as before then. Out of memory is an error of libtorch on every device, so
    /// that the search continues after it. Source: Lightning's `Tuner.scale_batch_size`.
    ///
    /// # Errors
    /// As [`Trainer::fit`]; [`ConfigError`] if the configuration is not valid, a loader gives batches that are made
    /// elsewhere, or not even one sample has room.
    pub fn scale_batch_size<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        stage: Stage,
        config: &BatchSizeFinderConfig,
    ) -> Result<usize> {
        self.searcher().scale_batch_size(module, data, stage, config)
    }

    /// The batch size that the callback BatchSizeFinder has found for the last call.
    pub fn found_batch_size(&self) -> Option<usize> {
        self.found_batch_size.map(|(_, size)| size)
    }

    /// Counts the floating-point operations of one training batch by running it; weights, buffers, metrics and random
    /// numbers are as before then. With manual optimization it is counted up to the end of its first backward pass.
    ///
    /// # Errors
    /// As [`Trainer::fit`]; [`ConfigError`] on a device whose operators cannot be recorded, and with several ranks.
    pub fn measure_flops<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<Flops> {
        self.searcher().measure_flops(module, data)
    }

    /// What a training step of the first batch consists of when it is compiled: the graphs of the step and of the update after it, before
    /// and after the passes. They are captured in a short run with `trainer.compile`, which is `hpu_backend` unless set; weights,
    /// buffers, metrics and random numbers are as before then.
    ///
    /// # Errors
    /// As [`Trainer::fit`]; [`ConfigError`] if the step cannot be compiled, with the reason, and with several ranks.
    pub fn show_graphs<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<Vec<ShownGraph>> {
        self.searcher().show_graphs(module, data)
    }
}

/// What Lightning calls `fit(model)`, without data beside it. Rust has no arguments that may be left out, hence the names.
impl Trainer {
    /// [`Trainer::fit`] with the module's own [`train_dataloader`](LightningModule::train_dataloader) and
    /// [`val_dataloader`](LightningModule::val_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no training loader.
    pub fn fit_module<M: LightningModule>(&mut self, module: &mut M) -> Result<()> {
        self.fit(module, &mut Loaders::new())
    }

    /// [`Trainer::validate`] with the module's own [`val_dataloader`](LightningModule::val_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no validation loader.
    pub fn validate_module<M: LightningModule>(&mut self, module: &mut M) -> Result<EvalMetrics> {
        self.validate(module, &mut Loaders::new())
    }

    /// [`Trainer::test`] with the module's own [`test_dataloader`](LightningModule::test_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no test loader.
    pub fn test_module<M: LightningModule>(&mut self, module: &mut M) -> Result<EvalMetrics> {
        self.test(module, &mut Loaders::new())
    }

    /// [`Trainer::predict`] with the module's own [`predict_dataloader`](LightningModule::predict_dataloader).
    ///
    /// # Errors
    /// As [`Trainer::fit`]; if the module has no prediction loader.
    pub fn predict_module<M: LightningModule>(&mut self, module: &mut M) -> Result<Vec<Vec<Tensor>>> {
        self.predict(module, &mut Loaders::new())
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
