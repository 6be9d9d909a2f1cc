//! Builds a [`Trainer`]: the configuration key by key, and the parts that are code rather than data.

use std::path::PathBuf;

use crate::accelerator::{AcceleratorChoice, Devices};
use crate::callback::{Callback, TimeSpan};
use crate::checkpoint::CheckpointIo;
use crate::distributed::report_config_error;
use crate::error::{ConfigError, Result, print_log};
use crate::ffi;
use crate::graph::CompileConfig;
use crate::logger::{Logger, Loggers};
use crate::optim::OptimizerConfig;
use crate::profiler::{Profiler, ProfilerConfig};
use crate::strategy::{StrategyChoice, StrategyConfig};
use crate::trainer::assemble::{BuilderParts, Resolved, assemble, resolve};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::activations::ActivationCheckpointing;
use crate::trainer::config::callbacks::CallbackConfig;
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::optimizers::{LrSchedulerSettings, OptimizerOverride};
use crate::trainer::config::values::{
    Deterministic, FastDevRun, GradientClipAlgorithm, Limit, PluginConfig, ValCheckInterval,
};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::plan::{contradictions, deepspeed};
use crate::trainer::session::session::Run;
use crate::trainer::trainer::Trainer;

/// Describes a trainer; see [`TrainerConfig`] for what each key means.
#[derive(Default)]
pub struct TrainerBuilder {
    config: TrainerConfig,
    parts: BuilderParts,
}

impl Trainer {
    /// A new builder.
    pub fn builder() -> TrainerBuilder {
        TrainerBuilder::default()
    }
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
        self.parts.accelerator = None;
        self.parts.strategy = None;
        self
    }

    /// Sets [`TrainerConfig::accelerator`]: a name, or a value such as [`HpuAccelerator`](crate::accelerator::HpuAccelerator)
    /// or an [`Accelerator`](crate::accelerator::Accelerator) of your own, whose name the configuration then holds.
    ///
    /// With several ranks each process makes its own value, as it runs the whole program.
    #[must_use]
    pub fn accelerator(mut self, accelerator: impl Into<AcceleratorChoice>) -> Self {
        (self.config.accelerator, self.parts.accelerator) = match accelerator.into() {
            AcceleratorChoice::Name(name) => (name, None),
            AcceleratorChoice::Value(value) => (value.name().to_owned(), Some(value)),
        };
        self
    }

    /// Sets [`TrainerConfig::strategy`]: a name, settings such as [`DdpConfig`](crate::strategy::DdpConfig), or a value that
    /// makes a [`Strategy`](crate::strategy::Strategy) of your own; see [`BuildStrategy`](crate::strategy::BuildStrategy). With
    /// the latter the configuration holds `auto`.
    ///
    /// With several ranks each process makes its own value, as it runs the whole program.
    #[must_use]
    pub fn strategy(mut self, strategy: impl Into<StrategyChoice>) -> Self {
        (self.config.strategy, self.parts.strategy) = match strategy.into() {
            StrategyChoice::Config(config) => (config, None),
            StrategyChoice::Value(value) => (StrategyConfig::from("auto"), Some(value)),
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
        self.parts.callbacks.push(Box::new(callback));
        self
    }

    /// Adds a logger in place of the default one. A `fast_dev_run` uses none.
    #[must_use]
    pub fn with_logger(mut self, logger: impl Logger + 'static) -> Self {
        self.parts.loggers.push(Box::new(logger));
        self
    }

    /// Leaves out the loggers of the configuration, as for an evaluation that is only to be printed. `last` and `best` are
    /// still looked for in the runs that they have logged.
    #[must_use]
    pub fn without_logging(mut self) -> Self {
        self.parts.loggers_of_runs = Some(self.config.loggers());
        self.config.logger = Some(Loggers::Flag(false));
        self
    }

    /// Saves and loads checkpoints through this.
    #[must_use]
    pub fn checkpoint_io(mut self, checkpoint_io: impl CheckpointIo + 'static) -> Self {
        self.parts.checkpoint_io = Some(Box::new(checkpoint_io));
        self
    }

    /// Measures the run with this in place of [`TrainerConfig::profiler`].
    #[must_use]
    pub fn with_profiler(mut self, profiler: impl Profiler + 'static) -> Self {
        self.parts.profiler = Some(Box::new(profiler));
        self
    }

    /// Uses this optimizer and schedule in place of the module's `configure_optimizers`, for all its parameters.
    #[must_use]
    pub fn optimizer(
        mut self,
        optimizer: OptimizerConfig,
        lr_scheduler: Option<LrSchedulerSettings>,
    ) -> Self {
        self.parts.optimizers = Some(OptimizerOverride { optimizer, lr_scheduler });
        self
    }

    /// Lets an optimizer that the strategy's settings name count before the module's own, as on the command line, which has no
    /// `configure_optimizers` of the user.
    pub(crate) fn prefer_optimizer_of_settings(mut self) -> Self {
        self.parts.prefers_settings = true;
        self
    }

    keys! {
        devices: Devices;
        num_nodes: u64;
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
        compile: CompileConfig => Some;
        activation_checkpointing: ActivationCheckpointing => Some;
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
    /// Warnings go to standard error from now on, unless the program has set a `tracing` subscriber before; `RUST_LOG` says which lines do.
    ///
    /// libtorch's memory comes from the host pool from now on ([`ffi::install_host_pool`]), and some of its kernels for
    /// the CPU are voltaic's ([`ffi::install_kernels`]).
    ///
    /// # Errors
    /// As [`ffi::check_libtorch`]; [`ConfigError`] with all problems of the configuration;
    /// [`SwitchError`](crate::error::SwitchError)
    /// if `VOLTAIC_HOST_POOL` or `VOLTAIC_CPU_KERNELS` has a value it cannot have.
    pub fn build(mut self) -> Result<Trainer> {
        print_log("warn");
        ffi::check_libtorch()?;
        let Resolved { mut plan, accelerator, searches } = resolve(&mut self.config, &mut self.parts)?;
        if let Some(compile) = plan.compile {
            compile.backend.warn_if_deprecated();
        }
        let mut optimizers = self.parts.optimizers.clone();
        if self.parts.prefers_settings && optimizers.is_none() {
            let of_settings = plan.ranks.strategy.take_optimizer();
            optimizers = of_settings.map(|optimizer| OptimizerOverride { optimizer, lr_scheduler: None });
        }
        let assembled = assemble(&self.config, self.parts, plan, accelerator);
        let (plan, run) = assembled.inspect_err(report_config_error)?;
        Ok(Trainer::new(self.config, plan, run, optimizers, searches))
    }

    /// What [`TrainerBuilder::build`] does, without a trainer around it.
    pub(super) fn assemble(mut self) -> Result<(TrainPlan, Run)> {
        print_log("warn");
        ffi::check_libtorch()?;
        let Resolved { plan, accelerator, .. } = resolve(&mut self.config, &mut self.parts)?;
        let assembled = assemble(&self.config, self.parts, plan, accelerator);
        let (plan, run) = assembled.inspect_err(report_config_error)?;
        deepspeed::say_notes(&self.config, &plan, run.world().is_global_zero());
        Ok((plan, run))
    }

    /// Checks everything that can be known without the other ranks. Makes nothing, and says nothing in the log: that is
    /// for [`TrainerBuilder::build`].
    ///
    /// # Errors
    /// All problems of the configuration together.
    pub fn check(self) -> Result<(), ConfigError> {
        self.plan().map(drop)
    }

    /// [`TrainerBuilder::check`], and what only a fit cannot have.
    pub(crate) fn check_fit(self) -> Result<(), ConfigError> {
        self.plan().and_then(|plan| contradictions::refuse_steps(&plan))
    }

    fn plan(mut self) -> Result<TrainPlan, ConfigError> {
        let silence = tracing::subscriber::NoSubscriber::default();
        let resolved =
            tracing::subscriber::with_default(silence, || resolve(&mut self.config, &mut self.parts));
        resolved.map(|resolved| resolved.plan)
    }
}
