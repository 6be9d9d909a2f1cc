//! What is known of a run and of a batch before the step or hook.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::output::StepOutput;
use crate::accelerator::{Accelerator, CpuAccelerator};
use crate::device::Device;
use crate::distributed::World;
use crate::graph::Flops;
use crate::nn::ModuleHooks;
use crate::profiler::Profiling;

/// Fixed facts of a run.
#[derive(Debug, Clone, Default)]
pub struct RunFacts {
    /// Last epoch + 1; `None` if the number of epochs is not limited.
    pub max_epochs: Option<u64>,
    /// Training batches of an epoch.
    pub num_training_batches: usize,
    /// Batches of the evaluation in progress or to come, over all its loaders.
    pub num_eval_batches: usize,
    /// Validation happens once, at the end of each epoch.
    pub validates_at_epoch_end: bool,
    /// `val_check_interval` is 1.0, or 1, which Lightning treats alike: validation is meant to happen once an epoch.
    pub validates_once_per_epoch: bool,
    /// Validation happens every so many epochs.
    pub check_val_every_n_epoch: Option<u64>,
    /// A short run to try everything out: nothing is saved.
    pub fast_dev_run: bool,
    /// Where the first logger writes, else the root folder of the run.
    pub log_dir: PathBuf,
    /// Samples in a training batch, if the loader has a batch size.
    pub train_batch_size: Option<usize>,
    /// Samples of the largest loader of the last request, on this rank.
    pub num_samples: usize,
    /// Operations of a training batch, if they were counted.
    pub flops: Option<Arc<Flops>>,
    /// The folder given as `default_root_dir`.
    pub default_root_dir: PathBuf,
    /// Whether there is a logger.
    pub has_logger: bool,
    /// Batches per optimizer step, as configured.
    pub accumulate_grad_batches: u64,
    /// The trainer runs backward and optimizers.
    pub automatic_optimization: bool,
    /// Epochs that a requested stop waits for.
    pub min_epochs: u64,
    /// Optimizer steps that a requested stop waits for.
    pub min_steps: u64,
    /// `log_every_n_steps`; 0 means never.
    pub log_every_n_steps: u64,
    /// The first logger's version label, such as `0`, shown in the progress bar.
    pub version: Option<String>,
    /// Sizes of inputs and outputs by fqn, if the module has an example of its inputs.
    pub(crate) example_sizes: Option<Arc<CallSizes>>,
    /// Hooks of the calls of modules.
    pub(crate) module_hooks: ModuleHooks,
    /// `trainer.graph` or `trainer.compile` with its value, if it captures something.
    pub(crate) graph: Option<String>,
    pub(crate) profiling: Profiling,
    pub(crate) hardware: Hardware,
    pub(crate) world: World,
}

/// Sizes of inputs and outputs of the first call of each module, by fqn.
pub(crate) type CallSizes = HashMap<String, [String; 2]>;

/// What a run computes on.
#[derive(Debug, Clone)]
pub(crate) struct Hardware {
    pub accelerator: Arc<dyn Accelerator>,
    /// The device of this process.
    pub device: Device,
}

impl Default for Hardware {
    fn default() -> Self {
        Self { accelerator: Arc::new(CpuAccelerator), device: Device::Cpu }
    }
}

/// Facts of the batch that a hook or a step is about.
#[derive(Clone, Copy)]
pub(crate) struct BatchFacts<'a> {
    pub batch_idx: usize,
    pub dataloader_idx: usize,
    pub batch_size: Option<usize>,
    pub batch_indices: &'a [usize],
    /// What the step gave; empty until it is done.
    pub output: &'a StepOutput,
    pub will_validate: bool,
    /// Step under which the loggers take rows of this batch, if they do.
    pub log_step: Option<u64>,
    /// Set if there are several loaders, so that metrics get a suffix.
    pub metric_suffix: Option<usize>,
}

impl Default for BatchFacts<'_> {
    fn default() -> Self {
        Self {
            batch_idx: 0,
            dataloader_idx: 0,
            batch_size: None,
            batch_indices: &[],
            output: StepOutput::NONE,
            will_validate: false,
            log_step: None,
            metric_suffix: None,
        }
    }
}
