//! A DeepSpeed strategy once its name and its settings are understood.

use std::time::Duration;

use super::config::{DeepSpeedStrategy, Read};
use super::inference::InferencePlan;
use super::settings::DeepSpeedSettings;
use crate::error::{ConfigError, ConfigProblem};
use crate::optim::{Interval, LrSchedulerSpec, Optimizers};
use crate::precision::Precision;
use crate::strategy::zero::config::{ZeroConfig, ZeroStage};

/// What a DeepSpeed strategy is to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DeepSpeedPlan {
    /// Its name, such as `deepspeed`.
    pub name: &'static str,
    pub settings: DeepSpeedSettings,
    pub timeout: Duration,
    /// After a call the module is whole on each rank.
    pub gather_after_fit: bool,
    /// Frozen parameters are left out of checkpoints.
    pub exclude_frozen_parameters: bool,
    /// Keys of what may differ between ranks.
    pub allow_differences: Vec<String>,
    /// `key=value` of arguments that say how the loss is scaled.
    loss_scale_arguments: Vec<String>,
}

/// What settings turn out to be for.
pub(crate) enum Understood {
    Training(Box<DeepSpeedPlan>),
    Inference(Box<InferencePlan>),
}

impl DeepSpeedPlan {
    /// Reads and checks the settings; this node has so many devices.
    pub(crate) fn resolve(
        name: &'static str,
        given: &DeepSpeedStrategy,
        accelerator: &str,
        devices: usize,
    ) -> Result<Understood, ConfigError> {
        let mut problems = given.check_others(accelerator, devices);
        let timeout = Duration::try_from_secs_f64(given.timeout_secs).unwrap_or_default();
        if timeout.is_zero() || given.timeout_secs > 365.0 * 86_400.0 {
            let what = format!("{} is not a time to wait", given.timeout_secs);
            let remedy = "use a positive number of seconds, at most a year (31536000)";
            problems.push(ConfigProblem::new("trainer.strategy.timeout_secs", what, remedy));
        }
        match given.read() {
            Ok(Read::Inference(settings)) if problems.is_empty() => {
                let allow_differences = given.allow_differences.clone();
                Ok(Understood::Inference(Box::new(InferencePlan {
                    name,
                    settings,
                    timeout,
                    allow_differences,
                })))
            }
            Ok(Read::Training(settings)) if problems.is_empty() => {
                let allow_differences = given.allow_differences.clone();
                let gather_after_fit = given.gather_after_fit;
                let loss_scale_arguments = given.loss_scale_arguments();
                Ok(Understood::Training(Box::new(Self {
                    name,
                    settings: *settings,
                    timeout,
                    gather_after_fit,
                    exclude_frozen_parameters: given.exclude_frozen_parameters,
                    allow_differences,
                    loss_scale_arguments,
                })))
            }
            Ok(_) => Err(ConfigError { problems }),
            Err(error) => {
                problems.extend(error.problems);
                Err(ConfigError { problems })
            }
        }
    }
}

/// The settings of a strategy's name, in lower case.
pub(crate) fn of_name(name: &str) -> Option<(&'static str, DeepSpeedStrategy)> {
    let offloads = |stage, parameters| DeepSpeedStrategy {
        offload_optimizer: true,
        offload_parameters: parameters,
        ..DeepSpeedStrategy::stage(stage)
    };
    let to_nvme = || DeepSpeedStrategy {
        remote_device: Some("nvme".to_owned()),
        offload_params_device: "nvme".to_owned(),
        offload_optimizer_device: "nvme".to_owned(),
        ..offloads(3, true)
    };
    Some(match name {
        "deepspeed" => ("deepspeed", DeepSpeedStrategy::default()),
        "deepspeed_stage_1" => ("deepspeed_stage_1", DeepSpeedStrategy::stage(1)),
        "deepspeed_stage_2" => ("deepspeed_stage_2", DeepSpeedStrategy::stage(2)),
        "deepspeed_stage_2_offload" => ("deepspeed_stage_2_offload", offloads(2, false)),
        "deepspeed_stage_3" => ("deepspeed_stage_3", DeepSpeedStrategy::stage(3)),
        "deepspeed_stage_3_offload" => ("deepspeed_stage_3_offload", offloads(3, true)),
        "deepspeed_stage_3_offload_nvme" => ("deepspeed_stage_3_offload_nvme", to_nvme()),
        "hpu_deepspeed" => ("hpu_deepspeed", DeepSpeedStrategy::default()),
        "hpu_deepspeed_stage_1" => ("hpu_deepspeed_stage_1", DeepSpeedStrategy::stage(1)),
        "hpu_deepspeed_stage_2" => ("hpu_deepspeed_stage_2", DeepSpeedStrategy::stage(2)),
        "hpu_deepspeed_stage_2_offload" => ("hpu_deepspeed_stage_2_offload", offloads(2, false)),
        "hpu_deepspeed_stage_3" => ("hpu_deepspeed_stage_3", DeepSpeedStrategy::stage(3)),
        "hpu_deepspeed_stage_3_offload" => ("hpu_deepspeed_stage_3_offload", offloads(3, true)),
        "hpu_deepspeed_stage_3_offload_nvme" => ("hpu_deepspeed_stage_3_offload_nvme", to_nvme()),
        _ => return None,
    })
}

/// What the trainer is set to, beside its strategy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Beside {
    pub gradient_clip_val: Option<f64>,
    pub clips_by_value: bool,
    pub accumulate_grad_batches: u64,
    pub num_ranks: usize,
}

impl DeepSpeedPlan {
    /// The limit of the norm of the gradients: of the settings, or the trainer's.
    pub(crate) fn clip_norm(&self, trainer: Option<f64>) -> Option<f64> {
        self.settings.gradient_clipping.or(trainer).filter(|limit| *limit > 0.0)
    }

    /// What does not fit the trainer's other keys.
    pub(crate) fn check_beside(&self, beside: Beside) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        if beside.clips_by_value {
            let what = "DeepSpeed does not support clipping gradients by value";
            problems.push(ConfigProblem::new("trainer.gradient_clip_algorithm", what, "use norm"));
        }
        let batch = self.settings.batch();
        // without sizes there is nothing to check, and with one of them the loader's is taken for the other
        if batch.train_batch_size.is_some() {
            let ranks = beside.num_ranks as u64;
            if let Err(error) = batch.resolve(beside.accumulate_grad_batches.max(1), ranks, None) {
                problems.extend(error.problems);
            }
        }
        problems
    }

    /// Checks the sizes of the settings beside the batch size of the training loader, which is the micro batch unless they give one.
    ///
    /// # Errors
    /// With the three numbers, if `train_batch_size` is not their product.
    pub(crate) fn check_loader(
        &self,
        batch_size: usize,
        accumulation: u64,
        ranks: usize,
    ) -> Result<(), ConfigError> {
        let (sizes, of_loader) = (self.settings.batch(), batch_size as u64);
        match sizes.train_micro_batch_size_per_gpu {
            Some(micro) if micro != of_loader => {
                tracing::warn!(
                    "train_micro_batch_size_per_gpu is {micro}, but the training loader gives batches of {of_loader}, \
                     which is what is trained with"
                );
                Ok(())
            }
            None if sizes.train_batch_size.is_some() => {
                sizes.resolve(accumulation, ranks as u64, Some(of_loader)).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Keys that have no effect beside the trainer's, a sentence each. `written` is how the user calls the precision.
    pub(crate) fn notes(&self, beside: Beside, precision: Precision, written: &str) -> Vec<String> {
        let mut notes = self.settings.notes.clone();
        if let (Some(own), Some(trainer)) = (self.settings.gradient_clipping, beside.gradient_clip_val)
            && own != trainer
        {
            notes.push(format!("trainer.gradient_clip_val has no effect: gradient_clipping is {own}"));
        }
        if !precision.has_float16() && !self.settings.names_precision {
            let why = format!("the precision is {written}, and the loss is scaled with 16-true only");
            let idle = self.loss_scale_arguments.iter();
            notes.extend(idle.map(|argument| format!("trainer.strategy.{argument} has no effect: {why}")));
        }
        notes
    }

    /// The settings of the engine.
    pub(crate) fn zero(&self) -> ZeroConfig {
        let settings = &self.settings;
        let stage = match settings.zero.stage {
            0 | 1 => ZeroStage::One, // a file without ZeRO has master weights, its optimizer, precision and clipping, too
            2 => ZeroStage::Two,
            _ => ZeroStage::Three,
        };
        let size = |elements: u64| usize::try_from(elements).unwrap_or(usize::MAX);
        ZeroConfig {
            reduce_bucket_size: size(settings.zero.reduce_bucket_size),
            timeout: self.timeout,
            allow_untested_optimizer: settings.zero_allow_untested_optimizer || settings.zero.stage == 0,
            communication_dtype: settings.communication_data_type,
            param_persistence_threshold: size(settings.zero.param_persistence_threshold),
            grad_accum_dtype: settings.data_types.grad_accum_dtype,
            gradient_reduction: settings.gradient_reduction(),
            master_weights: !settings.has_16_bit_masters(),
            float32_states: settings.has_16_bit_masters()
                && (settings.fp16.enabled || !settings.bf16.bf16_optimizer_states),
            fp16: settings.fp16.scaler,
            check_grad_overflow: settings.bf16.check_grad_overflow,
            prefetch_bucket_size: size(settings.zero.prefetch_bucket_size),
            max_live_parameters: size(settings.zero.max_live_parameters),
            max_reuse_distance: size(settings.zero.max_reuse_distance),
            gather_after_fit: self.gather_after_fit,
            exclude_frozen_parameters: self.exclude_frozen_parameters,
            leaf_modules: settings.zero.leaf_module.all(),
            allow_differences: self.allow_differences.clone(),
            sub_group_size: size(settings.zero.sub_group_size),
            offload_optimizer: settings.zero.offload_optimizer.clone(),
            offload_param: settings.zero.offload_param.clone(),
            aio: settings.aio.clone(),
            ..ZeroConfig::of_stage(stage)
        }
    }
}

impl DeepSpeedPlan {
    /// The precision that the settings name, if they do.
    pub(crate) fn precision(&self) -> Option<Precision> {
        let settings = &self.settings;
        match (settings.names_precision, settings.bf16.enabled, settings.fp16.enabled) {
            (false, ..) => None,
            (true, true, _) => Some(Precision::Bf16True),
            (true, false, true) => Some(Precision::Fp16True),
            (true, false, false) => Some(Precision::Full),
        }
    }

    /// The optimizers of a run: the module's, or those of the settings if the module has none. A schedule of the settings is
    /// stepped after each optimizer step, unless the module has one.
    ///
    /// # Errors
    /// More than one optimizer, or none at all.
    pub(crate) fn optimizers(&self, of_module: Optimizers) -> Result<Optimizers, ConfigError> {
        let settings = &self.settings;
        let refuse =
            |what: &str, remedy: &'static str| Err(ConfigError::new("configure_optimizers", what, remedy));
        let optimizers = match (of_module.len(), &settings.optimizer) {
            (0, Some(optimizer)) => Optimizers::new(optimizer.clone()),
            (0, None) => {
                return refuse(
                    "it gave no optimizer, and DeepSpeed's settings name none",
                    "return an optimizer, or give the settings an optimizer",
                );
            }
            (1, of_settings) => {
                if of_settings.is_some() {
                    tracing::info!(
                        "the optimizer of configure_optimizers is used, not that of DeepSpeed's settings"
                    );
                }
                of_module
            }
            _ => {
                return refuse(
                    "DeepSpeed currently only supports single optimizer, single optional scheduler",
                    "return one optimizer, with several groups if need be",
                );
            }
        };
        Ok(match &settings.scheduler {
            Some(_) if optimizers.has_scheduler() => {
                tracing::info!(
                    "the schedule of configure_optimizers is used, not that of DeepSpeed's settings"
                );
                optimizers
            }
            Some(schedule) => {
                optimizers.scheduler(LrSchedulerSpec::new(schedule.clone()).interval(Interval::Step))
            }
            None => optimizers,
        })
    }
}
