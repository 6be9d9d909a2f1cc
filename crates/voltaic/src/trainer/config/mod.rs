//! What the user writes about a run: the same struct behind the builder, YAML, the command line and `--help`.

pub(super) mod activations;
pub(super) mod callbacks;
pub(super) mod graph;
pub(super) mod optimizers;
pub(super) mod searches;
pub(super) mod values;

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use voltaic_macros::Defaults;

use crate::accelerator::{AcceleratorConfig, Devices};
use crate::callback::TimeSpan;
use crate::graph::CompileConfig;
use crate::logger::Loggers;
use crate::profiler::ProfilerConfig;
use crate::strategy::StrategyConfig;
use crate::trainer::config::activations::ActivationCheckpointing;
use crate::trainer::config::callbacks::CallbackConfig;
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::values::{
    Deterministic, FastDevRun, GradientClipAlgorithm, Limit, PluginConfig, ValCheckInterval,
};

/// Keys of Lightning 1's trainer, with what they are now.
fn refused() -> serde_json::Value {
    let old = |remedy: &str| serde_json::json!({"what": "Lightning has had it in version 1 only", "remedy": remedy, "unless_off": true});
    let devices = old("set trainer.accelerator and trainer.devices");
    serde_json::json!({
        "gpus": devices,
        "tpu_cores": devices,
        "ipus": devices,
        "num_processes": devices,
        "auto_select_gpus": devices,
        "resume_from_checkpoint": old("give ckpt_path=FILE, beside trainer"),
        "checkpoint_callback": old("set trainer.enable_checkpointing"),
        "weights_summary": old("set trainer.enable_model_summary, or ModelSummary in trainer.callbacks"),
        "progress_bar_refresh_rate": old("set trainer.enable_progress_bar"),
        "replace_sampler_ddp": old("set trainer.use_distributed_sampler"),
        "track_grad_norm": serde_json::json!({"what": "Lightning has had it in version 1 only",
            "remedy": "log the norm in on_before_optimizer_step", "unless_off": -1}),
        "auto_lr_find": old("name LearningRateFinder in trainer.callbacks"),
        "auto_scale_batch_size": old("name BatchSizeFinder in trainer.callbacks"),
        "terminate_on_nan": old("set check_finite of EarlyStopping, or trainer.detect_anomaly"),
        "amp_backend": old("set trainer.precision"),
        "amp_level": old("set trainer.precision"),
    })
}

/// Switches of a run, with Lightning's names and defaults.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = refused(), "x-no-effect" = serde_json::json!({"model_registry": "models are not uploaded"})))]
pub struct TrainerConfig {
    /// Kind of hardware: `cpu`, `hpu`, `cuda`, or `auto` for the best there is (never an emulated one). A class such as
    /// `HPUAccelerator` is read as its name.
    #[serde(deserialize_with = "AcceleratorConfig::name")]
    #[schemars(with = "AcceleratorConfig")]
    #[default("auto".to_owned())]
    pub accelerator: String,
    /// How many devices: a number, or `auto`.
    #[default(Devices::Text("auto".to_owned()))]
    pub devices: Devices,
    /// Nodes, on each of which the same command is started; 1 unless set.
    #[default(1)]
    pub num_nodes: u64,
    /// How training is spread over ranks: `auto`, `single_device`, `hpu_single`, `ddp`, `hpu_ddp`, `hpu_parallel`, `zero1`, `zero2`,
    /// `zero3`, `deepspeed`, `hpu_deepspeed` (also with `_stage_1`, `_stage_2` or `_stage_3`), or a class with settings.
    #[default(StrategyConfig::Name("auto".to_owned()))]
    pub strategy: StrategyConfig,
    /// Divide the samples of loaders among the ranks.
    #[default(true)]
    pub use_distributed_sampler: bool,
    /// Batch normalisation over the batches of all ranks.
    pub sync_batchnorm: bool,
    /// How often all ranks are started again from the last checkpoint after one has failed.
    pub max_restarts: u64,
    /// Number format of the computation: `32-true`, `bf16-mixed`, `16-mixed`, `fp8`, `bf16-true`, `16-true`, `64-true`; also
    /// written `32`, `bf16`, `16`, `64`.
    pub precision: Option<serde_json::Value>,
    /// Stop after so many epochs; -1 for no limit. 1000 if neither this nor `max_steps` is set.
    pub max_epochs: Option<i64>,
    /// Train at least so many epochs, whatever asks to stop.
    pub min_epochs: Option<u64>,
    /// Stop after so many optimizer steps; -1 for no limit.
    #[default(-1)]
    pub max_steps: i64,
    /// Train at least so many optimizer steps, whatever asks to stop.
    pub min_steps: Option<u64>,
    /// Run a few batches of everything to try it out: `true` for one, or a number. Saves nothing.
    #[default(FastDevRun::Flag(false))]
    pub fast_dev_run: FastDevRun,
    /// Training batches per epoch: a number, or a fraction of all.
    pub limit_train_batches: Option<Limit>,
    /// Validation batches: a number, or a fraction of all.
    pub limit_val_batches: Option<Limit>,
    /// Test batches: a number, or a fraction of all.
    pub limit_test_batches: Option<Limit>,
    /// Prediction batches: a number, or a fraction of all.
    pub limit_predict_batches: Option<Limit>,
    /// Validate every so many training batches, after this fraction of an epoch, or whenever so much time has passed
    /// (`DD:HH:MM:SS` or `{minutes: 10}`); 1.0 unless set.
    pub val_check_interval: Option<ValCheckInterval>,
    /// Validate every so many epochs; null counts `val_check_interval` across epochs.
    #[default(Some(1))]
    pub check_val_every_n_epoch: Option<u64>,
    /// Validation batches run before training to find mistakes early; -1 for all. 2 unless set.
    pub num_sanity_val_steps: Option<i64>,
    /// Optimizer steps between two rows of the loggers; 0 for none. 50 unless set.
    pub log_every_n_steps: Option<u64>,
    /// Batches whose gradients are added up before an optimizer step.
    #[default(1)]
    pub accumulate_grad_batches: u64,
    /// Limit for the gradients; none unless set.
    pub gradient_clip_val: Option<f64>,
    /// What the limit holds for: `norm` (of all gradients together) or `value` (of each element).
    pub gradient_clip_algorithm: Option<GradientClipAlgorithm>,
    /// Capture training steps and replay them, on cpu and emulated HPUs: `off`, `step` for forward and backward of
    /// `training_step` as one graph for each shape of batch, or `modules` for the modules that a step calls by `ctx.graphed`. What
    /// cannot be captured is reported, and runs as usual.
    pub graph: GraphMode,
    /// Compile training steps, on cpu and emulated HPUs: `hpu_backend`, or its older names `aot_hpu_training_backend` and, without
    /// grad, `aot_hpu_inference_backend`; or `backend` with `options` and `recompile_limit`. Captured as with `graph`, then changed by
    /// passes. Not together with `graph`. Off unless set.
    pub compile: Option<CompileConfig>,
    /// Modules whose activations are computed again in backward rather than kept, by type or fqn: `[Block]`, `[transformer.h.*]`. Their
    /// calls are checkpointed as by `checkpoint(&module, &x)`. With settings also: offloaded to the host, or kept within a budget.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    /// Where metrics go: `true` for a `CSVLogger`, `false` for nothing, or loggers by class name; `true` unless set.
    pub logger: Option<Loggers>,
    /// Callbacks by class name.
    #[serde(deserialize_with = "null_for_none")]
    #[schemars(with = "Option<Vec<CallbackConfig>>")]
    pub callbacks: Vec<CallbackConfig>,
    /// Parts of the trainer by class name: `HpuPrecisionPlugin`, `AsyncCheckpointIo`, `HpuCheckpointIo`,
    /// `SlurmEnvironment`.
    #[serde(deserialize_with = "null_for_none")]
    #[schemars(with = "Option<Vec<PluginConfig>>")]
    pub plugins: Vec<PluginConfig>,
    /// Save checkpoints, with a default `ModelCheckpoint` unless one is given; `true` unless set.
    pub enable_checkpointing: Option<bool>,
    /// Show a progress bar, or lines if standard error is not a terminal; `true` unless set.
    pub enable_progress_bar: Option<bool>,
    /// Print the module's children and numbers of parameters before training; `true` unless set.
    pub enable_model_summary: Option<bool>,
    /// Ask the data module for new loaders every so many epochs; 0 for never.
    pub reload_dataloaders_every_n_epochs: u64,
    /// Train and validate on these batches only, a number or a fraction: the same in each epoch, without shuffling, and with
    /// the same random crops and transforms; 0 for no.
    #[default(Limit::Fraction(0.0))]
    pub overfit_batches: Limit,
    /// Stop after so much time: `DD:HH:MM:SS` or `{hours: 12}`.
    pub max_time: Option<TimeSpan>,
    /// Refuse operations without a deterministic kernel: `true`, `false` or `warn`. For the whole process.
    pub deterministic: Option<Deterministic>,
    /// Whether cuDNN tries its kernels out to find the fastest. For the whole process.
    pub benchmark: Option<bool>,
    /// Run validate, test and predict in inference mode rather than only without grad; never on an HPU.
    #[default(true)]
    pub inference_mode: bool,
    /// Measure how long each part of the run takes: `simple` for the time of each action, `advanced` for how it is spread and
    /// nested, or a class with settings. Nothing unless set.
    pub profiler: Option<ProfilerConfig>,
    /// End the run at a loss or gradient that is not finite, naming the operation that made it. Slow.
    pub detect_anomaly: bool,
    /// Switch off everything that costs time beside training: checkpoints, logger, progress bar, summary, sanity check
    /// and `log`.
    pub barebones: bool,
    /// Give the module's hyper-parameters to the loggers.
    #[default(true)]
    pub enable_autolog_hparams: bool,
    /// On SIGTERM and Ctrl-C, save `on_signal.ckpt` beside the checkpoints before the run ends.
    pub save_on_signal: bool,
    /// Folder for logs and checkpoints; the current one unless set.
    pub default_root_dir: Option<PathBuf>,
}

/// An empty list may be written as null, as Lightning does.
fn null_for_none<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl TrainerConfig {
    /// Which loggers the run has.
    pub(crate) fn loggers(&self) -> Loggers {
        self.logger.clone().unwrap_or(Loggers::Flag(true))
    }
}
