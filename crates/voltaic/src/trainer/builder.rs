//! Builds a [`Trainer`]: the configuration key by key, and the parts that are code rather than data.

use std::path::PathBuf;
use std::sync::Arc;

use crate::accelerator::rng::global_seed;
use crate::accelerator::{Accelerator, AcceleratorChoice, Devices};
use crate::callback::{
    Callback, ModelCheckpoint, ModelCheckpointConfig, ModelSummary, ProgressBar, TimeSpan, Timer,
};
use crate::checkpoint::{AsyncCheckpointIo, CheckpointIo, FileCheckpointIo, HpuCheckpointIo};
use crate::distributed::World;
use crate::error::{ConfigError, ConfigProblem, Result};
use crate::ffi;
use crate::logger::{Logger, Loggers, RunFolders};
use crate::module::{MetricStore, Profiling, Progress, Requests, RunFacts};
use crate::optim::OptimizerConfig;
use crate::precision::{GradScaler, Precision};
use crate::profiler::{Profiler, ProfilerConfig};
use crate::strategy::{StrategyConfig, Votes};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::callbacks::CallbackConfig;
use crate::trainer::config::callbacks::is_a;
use crate::trainer::config::graph::{GraphMode, GraphReport};
use crate::trainer::config::optimizers::{LrSchedulerSettings, OptimizerOverride};
use crate::trainer::config::searches::{BatchSizeFinderConfig, LearningRateFinderConfig};
use crate::trainer::config::values::{
    Deterministic, FastDevRun, GradientClipAlgorithm, Limit, PluginConfig, ValCheckInterval,
};
use crate::trainer::join as ranks;
use crate::trainer::plan::contradictions;
use crate::trainer::plan::limits::minima_above_maxima;
use crate::trainer::plan::resolve;
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::before_trial::BeforeTrial;
use crate::trainer::session::run::Run;
use crate::trainer::state::find::run_folders;
use crate::trainer::trainer::Trainer;

/// Describes a trainer; see [`TrainerConfig`] for what each key means.
#[derive(Default)]
pub struct TrainerBuilder {
    config: TrainerConfig,
    /// In place of the one that the configuration names, whose name is this one's.
    accelerator: Option<Arc<dyn Accelerator>>,
    callbacks: Vec<Box<dyn Callback>>,
    loggers: Vec<Box<dyn Logger>>,
    checkpoint_io: Option<Box<dyn CheckpointIo>>,
    optimizers: Option<OptimizerOverride>,
    profiler: Option<Box<dyn Profiler>>,
    lr_finder: Option<LearningRateFinderConfig>,
    batch_size_finder: Option<BatchSizeFinderConfig>,
    counts_flops: bool,
    /// The loggers that the runs of this configuration have, if this trainer has none of them.
    loggers_of_runs: Option<Loggers>,
}

/// A setter per key of [`TrainerConfig`].
macro_rules! keys {
    ($($name:ident: $type:ty $(=> $wrap:ident)?;)*) => {$(
        #[doc = concat!("Sets [`TrainerConfig::", stringify!($name), "`].")]
        #[must_use]
        pub fn $name(mut self, $name: impl Into<$type>) -> Self {
            self.config.$name = $($wrap)?($name.into());
            self
        }
    )*};
}

impl TrainerBuilder {
    /// Replaces the whole configuration; keys set before are lost.
    #[must_use]
    pub fn config(mut self, config: TrainerConfig) -> Self {
        self.config = config;
        self.accelerator = None;
        self
    }

    /// Sets [`TrainerConfig::accelerator`]: a name, or a value such as [`HpuAccelerator`](crate::accelerator::HpuAccelerator)
    /// or an [`Accelerator`] of your own, whose name the configuration then holds.
    ///
    /// With several ranks each process makes its own value, as it runs the whole program.
    #[must_use]
    pub fn accelerator(mut self, accelerator: impl Into<AcceleratorChoice>) -> Self {
        (self.config.accelerator, self.accelerator) = match accelerator.into() {
            AcceleratorChoice::Name(name) => (name, None),
            AcceleratorChoice::Value(value) => (value.name().to_owned(), Some(value)),
        };
        self
    }

    /// Adds a plugin to [`TrainerConfig::plugins`].
    #[must_use]
    pub fn plugin(mut self, plugin: impl Into<PluginConfig>) -> Self {
        self.config.plugins.push(plugin.into());
        self
    }

    /// Sets [`TrainerConfig::plugins`].
    #[must_use]
    pub fn plugins<P: Into<PluginConfig>>(mut self, plugins: impl IntoIterator<Item = P>) -> Self {
        self.config.plugins = plugins.into_iter().map(Into::into).collect();
        self
    }

    /// Sets [`TrainerConfig::callbacks`], by their settings as in YAML: `.callbacks([BatchSizeFinderConfig::default()])`. They
    /// come after those that [`TrainerBuilder::callback`] adds.
    #[must_use]
    pub fn callbacks<C: Into<CallbackConfig>>(mut self, callbacks: impl IntoIterator<Item = C>) -> Self {
        self.config.callbacks = callbacks.into_iter().map(Into::into).collect();
        self
    }

    /// Adds a callback; they run in the order they are added.
    #[must_use]
    pub fn callback(mut self, callback: impl Callback + 'static) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Adds a logger in place of the default one. A `fast_dev_run` uses none.
    #[must_use]
    pub fn with_logger(mut self, logger: impl Logger + 'static) -> Self {
        self.loggers.push(Box::new(logger));
        self
    }

    /// Leaves out the loggers of the configuration, as for an evaluation that is only to be printed. `last` and `best` are
    /// still looked for in the runs that they have logged.
    #[must_use]
    pub fn without_logging(mut self) -> Self {
        self.loggers_of_runs = Some(self.config.loggers());
        self.config.logger = Some(Loggers::Flag(false));
        self
    }

    /// Saves and loads checkpoints through this.
    #[must_use]
    pub fn checkpoint_io(mut self, checkpoint_io: impl CheckpointIo + 'static) -> Self {
        self.checkpoint_io = Some(Box::new(checkpoint_io));
        self
    }

    /// Measures the run with this in place of [`TrainerConfig::profiler`].
    #[must_use]
    pub fn with_profiler(mut self, profiler: impl Profiler + 'static) -> Self {
        self.profiler = Some(Box::new(profiler));
        self
    }

    /// Uses this optimizer and schedule in place of the module's `configure_optimizers`, for all its parameters.
    #[must_use]
    pub fn optimizer(
        mut self,
        optimizer: OptimizerConfig,
        lr_scheduler: Option<LrSchedulerSettings>,
    ) -> Self {
        self.optimizers = Some(OptimizerOverride { optimizer, lr_scheduler });
        self
    }

    keys! {
        devices: Devices;
        num_nodes: u64;
        strategy: StrategyConfig;
        use_distributed_sampler: bool;
        sync_batchnorm: bool;
        max_restarts: u64;
        precision: serde_json::Value => Some;
        max_epochs: i64 => Some;
        min_epochs: u64 => Some;
        max_steps: i64;
        min_steps: u64 => Some;
        fast_dev_run: FastDevRun;
        limit_train_batches: Limit => Some;
        limit_val_batches: Limit => Some;
        limit_test_batches: Limit => Some;
        limit_predict_batches: Limit => Some;
        val_check_interval: ValCheckInterval => Some;
        check_val_every_n_epoch: Option<u64>;
        num_sanity_val_steps: i64 => Some;
        log_every_n_steps: u64 => Some;
        accumulate_grad_batches: u64;
        gradient_clip_val: f64 => Some;
        gradient_clip_algorithm: GradientClipAlgorithm => Some;
        logger: Loggers => Some;
        enable_checkpointing: bool => Some;
        enable_progress_bar: bool => Some;
        enable_model_summary: bool => Some;
        reload_dataloaders_every_n_epochs: u64;
        graph: GraphMode;
        overfit_batches: Limit;
        max_time: TimeSpan => Some;
        deterministic: Deterministic => Some;
        benchmark: bool => Some;
        inference_mode: bool;
        profiler: ProfilerConfig => Some;
        detect_anomaly: bool;
        barebones: bool;
        enable_autolog_hparams: bool;
        save_on_signal: bool;
        default_root_dir: PathBuf => Some;
    }

    /// Checks everything, joins the other ranks if there are any, and makes the trainer.
    ///
    /// With several ranks on this node and no launcher around it, the call starts them by running this program again with
    /// the same arguments, waits for them, and ends the process with their exit code: what follows it runs in the ranks.
    ///
    /// libtorch's memory comes from the host pool from now on ([`ffi::install_host_pool`]), and some of its kernels for
    /// the CPU are voltaic's ([`ffi::install_kernels`]).
    ///
    /// # Errors
    /// As [`ffi::check_libtorch`]; [`ConfigError`] with all problems of the configuration;
    /// [`SwitchError`](crate::error::SwitchError)
    /// if `VOLTAIC_HOST_POOL` or `VOLTAIC_CPU_KERNELS` has a value it cannot have.
    pub fn build(mut self) -> Result<Trainer> {
        ffi::check_libtorch()?;
        let (mut plan, accelerator) = self.resolve()?;
        let strategy = ranks::join(&self.config, &mut plan, accelerator.as_ref())?;
        let world = strategy.world().clone();
        self.add_displays(world.is_global_zero());
        accelerator.setup()?;
        ffi::install_host_pool()?;
        ffi::install_kernels()?;
        set_up_libtorch(&plan)?;
        let run_folders = self.run_folders(&plan);
        let facts = self.build_loggers(&plan, &world)?;
        let checkpoint_io = checkpoint_io(self.checkpoint_io, &self.config.plugins, accelerator.name());
        let run = Run {
            accelerator,
            checkpoint_io,
            callbacks: self.callbacks,
            loggers: self.loggers,
            progress: Progress::default(),
            metrics: MetricStore::of_ranks(world.group().cloned()).off_if(plan.barebones),
            profiling: self.profiler.map(Profiling::with).unwrap_or_default(),
            strategy,
            agreed: Votes::default(),
            requests: Requests::default(),
            facts,
            replaced: Vec::new(),
            run_folders,
            kept: BeforeTrial::default(),
            resumed_from: None,
            grad_scaler: (plan.precision == Precision::Fp16Mixed).then(GradScaler::default),
            seed: global_seed(),
            fits: 0,
        };
        Ok(Trainer {
            config: self.config,
            plan,
            run,
            optimizers: self.optimizers,
            lr_finder: self.lr_finder,
            batch_size_finder: self.batch_size_finder,
            counts_flops: self.counts_flops,
            ckpt_path: None,
            after_fit: None,
            drops_predictions: false,
            graphs: GraphReport::default(),
        })
    }

    /// Checks everything that can be known without the other ranks. Makes nothing, and says nothing in the log: that is
    /// for [`TrainerBuilder::build`].
    ///
    /// # Errors
    /// All problems of the configuration together.
    pub fn check(mut self) -> Result<(), ConfigError> {
        let silence = tracing::subscriber::NoSubscriber::default();
        tracing::subscriber::with_default(silence, || self.resolve()).map(drop)
    }

    /// The plan, with callbacks and profiler made, or all problems of the configuration.
    fn resolve(&mut self) -> Result<(TrainPlan, Arc<dyn Accelerator>), ConfigError> {
        let mut problems = Vec::new();
        let choice = match self.accelerator.take() {
            Some(value) => AcceleratorChoice::Value(value),
            None => AcceleratorChoice::from(self.config.accelerator.as_str()),
        };
        let accelerator = choice.resolve();
        let mut plan = match resolve(&self.config, accelerator.as_deref()) {
            Ok(plan) => Some(plan),
            Err(error) => {
                problems.extend(error.problems);
                None
            }
        };
        problems.extend(self.build_callbacks());
        if let Some(plan) = &mut plan {
            self.add_timer(plan);
        }
        if let Some(plan) = &plan {
            problems.extend(minima_above_maxima(&self.config, plan));
        }
        if self.config.barebones && !self.loggers.is_empty() {
            let what = "barebones=true switches logging off, but the builder was given a logger";
            problems.push(ConfigProblem::new("trainer.logger", what, "remove one of the two"));
        }
        problems.extend(self.build_profiler().err().into_iter().flat_map(|error| error.problems));
        if self.config.barebones {
            self.config.logger = Some(Loggers::Flag(false));
            self.config.enable_checkpointing = Some(false);
            self.config.enable_progress_bar = Some(false);
            self.config.enable_model_summary = Some(false);
        }
        problems.extend(contradictions::of_displays(&self.config, &self.callbacks));
        problems.extend(repeated_plugins(&self.config.plugins, self.checkpoint_io.is_some()));
        if let Err(error) = self.add_defaults() {
            problems.extend(error.problems);
        }
        problems.extend(same_state_keys(&self.callbacks));
        if self.loggers.is_empty() && !self.config.loggers().is_enabled() {
            problems.extend(without_logger(&self.callbacks));
        }
        if let Some(given) = &self.optimizers {
            problems.extend(given.problems());
        }
        match (plan, accelerator) {
            (Some(plan), Ok(accelerator)) if problems.is_empty() => Ok((plan, accelerator)),
            _ => Err(ConfigError { problems }),
        }
    }

    /// Makes a timer of `max_time`. A timer that is a callback takes the place of a limit of epochs.
    fn add_timer(&mut self, plan: &mut TrainPlan) {
        let has_timer = self.callbacks.iter().any(|callback| is_a::<Timer>(callback.as_ref()));
        if has_timer && !plan.fast_dev_run && self.config.max_epochs.is_none() {
            plan.max_epochs = None;
        }
        if let Some(limit) = plan.max_time {
            self.callbacks.insert(0, Box::new(Timer::new(limit)));
        }
    }

    /// Builds the callbacks of the configuration.
    fn build_callbacks(&mut self) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        for callback in self.config.callbacks.clone() {
            if let CallbackConfig::LearningRateFinder(config) = callback {
                problems.extend(config.check().err().into_iter().flat_map(|error| error.problems));
                self.lr_finder = Some(config);
                continue;
            }
            self.counts_flops |= matches!(&callback, CallbackConfig::ModelSummary(config) if config.flops);
            if let CallbackConfig::BatchSizeFinder(config) = callback {
                problems.extend(config.check().err().into_iter().flat_map(|error| error.problems));
                self.batch_size_finder = Some(config);
                continue;
            }
            match callback.build() {
                Ok(callback) => self.callbacks.push(callback),
                Err(error) => problems.extend(error.problems),
            }
        }
        problems
    }

    /// Builds the profiler of the configuration.
    fn build_profiler(&mut self) -> Result<(), ConfigError> {
        if self.config.barebones && self.profiler.is_some() {
            let what = "is set beside barebones=true, which switches it off";
            return Err(ConfigError::new("trainer.profiler", what, "remove one of the two"));
        }
        let Some(config) = &self.config.profiler else { return Ok(()) };
        if self.profiler.is_some() {
            let what = "is set, but the builder was given a profiler too";
            return Err(ConfigError::new("trainer.profiler", what, "give one of the two"));
        }
        self.profiler = Some(config.build()?);
        Ok(())
    }

    /// Where the runs of this configuration are, a short trial's too: it has no loggers.
    fn run_folders(&self, plan: &TrainPlan) -> Vec<PathBuf> {
        if !self.loggers.is_empty() {
            return run_folders(&self.loggers);
        }
        let loggers = self.loggers_of_runs.clone().unwrap_or_else(|| self.config.loggers());
        let built = loggers.list().into_iter();
        let built: Vec<_> = built.map(|logger| logger.build(&plan.default_root_dir)).collect();
        run_folders(&built)
    }

    /// Builds the loggers, on rank 0 only, and puts together what callbacks may know.
    ///
    /// # Collective
    /// All ranks learn where rank 0 logs.
    fn build_loggers(&mut self, plan: &TrainPlan, world: &World) -> Result<RunFacts> {
        if plan.fast_dev_run || !world.is_global_zero() {
            self.loggers.clear();
        }
        if world.is_global_zero() && self.loggers.is_empty() && !plan.fast_dev_run {
            let loggers = self.config.loggers().list().into_iter();
            self.loggers.extend(loggers.map(|logger| logger.build(&plan.default_root_dir)));
        }
        let mut folders = RunFolders::default();
        self.loggers.iter_mut().try_for_each(|logger| logger.begin(&mut folders))?;
        let first = self.loggers.first();
        let log_dir =
            first.and_then(|logger| logger.log_dir()).unwrap_or(&plan.default_root_dir).to_path_buf();
        let version = first.and_then(|logger| logger.version());
        let (log_dir, version, has_logger) = world.of_rank_zero((log_dir, version, first.is_some()))?;
        Ok(RunFacts {
            max_epochs: plan.max_epochs,
            check_val_every_n_epoch: plan.check_val_every_n_epoch,
            fast_dev_run: plan.fast_dev_run,
            log_dir,
            default_root_dir: plan.default_root_dir.clone(),
            validates_once_per_epoch: plan.val_check_interval == Limit::Fraction(1.0),
            has_logger,
            accumulate_grad_batches: plan.accumulate_grad_batches,
            automatic_optimization: true,
            log_every_n_steps: plan.log_every_n_steps,
            version,
            ..RunFacts::default()
        })
    }

    fn add_defaults(&mut self) -> Result<(), ConfigError> {
        let saves = self.callbacks.iter().any(|callback| callback.saves_checkpoints());
        let is_enabled = self.config.enable_checkpointing.unwrap_or(true);
        if saves && !is_enabled {
            let what = "false, but a callback saves checkpoints";
            return Err(ConfigError::new("trainer.enable_checkpointing", what, "remove one of the two"));
        }
        if !saves && is_enabled {
            self.callbacks.push(Box::new(ModelCheckpoint::new(ModelCheckpointConfig::default())?));
        }
        Ok(())
    }

    /// What one process shows for all.
    fn add_displays(&mut self, is_global_zero: bool) {
        let has_bar = self.callbacks.iter().any(|callback| is_a::<ProgressBar>(callback.as_ref()));
        if is_global_zero && self.config.enable_progress_bar.unwrap_or(true) && !has_bar {
            self.callbacks.push(Box::new(ProgressBar::default()));
        }
        let has_summary = self.callbacks.iter().any(|callback| is_a::<ModelSummary>(callback.as_ref()));
        if is_global_zero && self.config.enable_model_summary.unwrap_or(true) && !has_summary {
            self.callbacks.push(Box::new(ModelSummary::default()));
        }
    }
}

/// What the builder or the plugins ask for, around what the accelerator needs.
fn checkpoint_io(
    given: Option<Box<dyn CheckpointIo>>,
    plugins: &[PluginConfig],
    accelerator: &str,
) -> Box<dyn CheckpointIo> {
    let needs_host = accelerator == "hpu" || plugins.contains(&PluginConfig::HpuCheckpointIo);
    let own: Box<dyn CheckpointIo> =
        if needs_host { Box::new(HpuCheckpointIo) } else { Box::new(FileCheckpointIo) };
    let is_async = plugins.contains(&PluginConfig::AsyncCheckpointIo);
    let outer =
        given.or_else(|| is_async.then(|| Box::new(AsyncCheckpointIo::new()) as Box<dyn CheckpointIo>));
    match outer {
        Some(mut outer) => {
            outer.set_inner(own);
            outer
        }
        None => own,
    }
}

/// Plugins that would do the same thing twice.
fn repeated_plugins(plugins: &[PluginConfig], has_checkpoint_io: bool) -> Vec<ConfigProblem> {
    let kinds = [PluginConfig::AsyncCheckpointIo, PluginConfig::HpuCheckpointIo];
    let counts = kinds.map(|kind| plugins.iter().filter(|plugin| **plugin == kind).count());
    let mut problems = Vec::new();
    if counts.iter().any(|&count| count > 1) {
        problems.push(ConfigProblem::new("trainer.plugins", "a class is given twice", "give it once"));
    }
    if has_checkpoint_io && counts.iter().any(|&count| count > 0) {
        let what = "names a CheckpointIo, but the builder was given one too";
        problems.push(ConfigProblem::new("trainer.plugins", what, "give one of the two"));
    }
    problems
}

/// Callbacks that have nothing to do in a run without logger.
fn without_logger(callbacks: &[Box<dyn Callback>]) -> impl Iterator<Item = ConfigProblem> {
    callbacks.iter().filter(|callback| callback.needs_logger()).map(|callback| {
        let what = format!("false, but {} has to have a logger", callback.state_key());
        ConfigProblem::new("trainer.logger", what, "set trainer.logger=true, or remove the callback")
    })
}

/// Callbacks whose states would overwrite each other in a checkpoint.
fn same_state_keys(callbacks: &[Box<dyn Callback>]) -> Vec<ConfigProblem> {
    let keys: Vec<String> = callbacks
        .iter()
        .filter(|callback| callback.state_dict().is_some())
        .map(|callback| callback.state_key())
        .collect();
    let repeated = keys.iter().enumerate().filter(|(i, key)| keys[..*i].contains(key));
    repeated
        .map(|(_, key)| {
            let what = format!("two callbacks keep their state in checkpoints as {key}");
            let remedy = "remove one, or change one of the settings that this name tells; a callback of your own \
                          may tell more in Callback::state_key";
            ConfigProblem::new("trainer.callbacks", what, remedy)
        })
        .collect()
}

/// Sets what holds for the process.
fn set_up_libtorch(plan: &TrainPlan) -> Result<()> {
    if let Some(mode) = plan.deterministic {
        ffi::set_deterministic(mode)?;
    }
    if let Some(benchmark) = plan.benchmark {
        ffi::set_cudnn_benchmark(benchmark)?;
    }
    Ok(())
}
