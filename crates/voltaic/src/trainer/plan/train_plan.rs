//! A run as it will be done.

use std::path::PathBuf;
use std::time::Duration;

use crate::device::Device;
use crate::distributed::RequeueSignal;
use crate::error::Result;
use crate::ffi::DeterministicMode;
use crate::graph::CompileConfig;
use crate::nn::{CheckpointSettings, Treatment};
use crate::optim::GradientClip;
use crate::precision::fp8::Fp8Settings;
use crate::precision::{OpLists, Precision, PrecisionRegion};
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::values::Limit;
use crate::trainer::plan::ranks::RankPlan;

/// A run as it will be done. Immutable; nothing is `auto`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TrainPlan {
    /// The device of this process.
    pub device: Device,
    pub ranks: RankPlan,
    pub precision: Precision,
    /// Layers of the transformer engine compute in float8.
    pub fp8: Option<Fp8Settings>,
    /// Which operators cast; none means the default lists.
    pub op_lists: Option<OpLists>,
    /// The lists come from the environment only.
    pub lists_are_default: bool,
    /// Log each kind of cast when it is first done.
    pub logs_casts: bool,
    /// `None` means no limit.
    pub max_epochs: Option<u64>,
    pub min_epochs: u64,
    /// `None` means no limit.
    pub max_steps: Option<u64>,
    pub min_steps: u64,
    pub limit_train: Limit,
    pub limit_val: Limit,
    pub limit_test: Limit,
    pub limit_predict: Limit,
    pub val_check_interval: Limit,
    /// In place of `val_check_interval`.
    pub val_check_time: Option<Duration>,
    pub max_time: Option<Duration>,
    pub overfits: bool,
    pub deterministic: Option<DeterministicMode>,
    pub benchmark: Option<bool>,
    pub inference_mode: bool,
    pub detect_anomaly: bool,
    pub barebones: bool,
    pub enable_autolog_hparams: bool,
    pub save_on_signal: bool,
    /// What saves the run in a Slurm job and queues it again; `None` if nothing does.
    pub requeue_signal: Option<RequeueSignal>,
    pub check_val_every_n_epoch: Option<u64>,
    /// `None` means all batches.
    pub num_sanity_val_steps: Option<usize>,
    /// 0 means never.
    pub log_every_n_steps: u64,
    pub accumulate_grad_batches: u64,
    pub clip: Option<GradientClip>,
    /// 0 means never.
    pub reload_dataloaders_every_n_epochs: u64,
    pub graph: GraphMode,
    pub compile: Option<CompileConfig>,
    pub activations: ActivationPlan,
    pub checkpoints: CheckpointSettings,
    pub fast_dev_run: bool,
    pub default_root_dir: PathBuf,
}

/// What becomes of what modules save for the backward pass.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ActivationPlan {
    /// The modules by type or fqn.
    pub modules: Vec<String>,
    pub treatment: Treatment,
    /// Bytes that may be kept after all.
    pub budget: Option<u64>,
}

impl TrainPlan {
    /// The key that the user has set the limit of a fit's loaders by.
    pub fn key_of_limit(&self, key: &'static str) -> &'static str {
        if self.overfits { "overfit_batches" } else { key }
    }
}

impl TrainPlan {
    /// A region in which its precision holds.
    ///
    /// # Errors
    /// If the device has not got it.
    pub fn enter_precision(&self) -> Result<PrecisionRegion> {
        let recipe = self.fp8.as_ref().map(|fp8| &fp8.recipe);
        PrecisionRegion::enter(self.device, self.precision, recipe)
    }
}
