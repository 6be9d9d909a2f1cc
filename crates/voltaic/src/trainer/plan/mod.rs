//! From the configuration as written to a plan without `auto`: pure functions, all problems reported together.

pub(super) mod contradictions;
pub(super) mod deepspeed;
pub(super) mod facts;
pub(super) mod limits;
pub(super) mod precision;
pub(super) mod problems;
pub(super) mod ranks;
pub(super) mod train_plan;

use std::path::PathBuf;

use crate::accelerator::Accelerator;
use crate::config::{expand_home, parse_size};
use crate::device::Device;
use crate::distributed::RequeueSignal;
use crate::error::{ConfigError, DeviceError, Problem};
use crate::ffi::DeterministicMode;
use crate::nn::{CheckpointPolicy, CheckpointSettings, Treatment};
use crate::optim::GradientClip;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::activations::{
    ActivationCheckpointing, ActivationCheckpointingConfig, ActivationMode, MemorySize,
};
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::values::{Deterministic, GradientClipAlgorithm, PluginConfig};
use crate::trainer::plan::limits::fast_dev_run;
use crate::trainer::plan::limits::resolve_val_check;
use crate::trainer::plan::precision::{PrecisionPlan, resolve_precision};
use crate::trainer::plan::problems::Problems;
use crate::trainer::plan::ranks::RankPlan;
use crate::trainer::plan::train_plan::{ActivationPlan, TrainPlan};

/// What queues a Slurm job again.
fn requeue_signal(plugins: &[PluginConfig]) -> Option<RequeueSignal> {
    let settings = plugins.iter().find_map(|plugin| match plugin {
        PluginConfig::SlurmEnvironment(settings) => Some(*settings),
        _ => None,
    });
    let settings = settings.unwrap_or_default();
    settings.auto_requeue.then(|| settings.requeue_signal.unwrap_or(RequeueSignal::SigUsr1))
}

/// Checks the configuration and resolves what is `auto`. A timer among the callbacks takes the place of a limit of epochs.
pub(crate) fn resolve(
    config: &TrainerConfig,
    accelerator: Result<&dyn Accelerator, &DeviceError>,
    has_timer: bool,
) -> Result<TrainPlan, ConfigError> {
    let mut problems = Problems(Vec::new());
    let ranks = RankPlan::resolve(config, accelerator, &mut problems);
    let device = ranks.devices[0];
    let max_steps = problems.count("max_steps", config.max_steps);
    let max_epochs = match config.max_epochs {
        Some(max_epochs) => problems.count("max_epochs", max_epochs),
        None if max_steps.is_some() || config.max_time.is_some() || has_timer => None,
        None => Some(1000),
    };
    if config.accumulate_grad_batches == 0 {
        problems.add("accumulate_grad_batches", "0 batches make no step".to_owned(), "use 1 or more");
    }
    let clip = config.gradient_clip_val.and_then(|value| resolve_clip(config, value, &mut problems));
    let (val_check_interval, val_check_time) = resolve_val_check(config, &mut problems);
    let max_time = config.max_time.as_ref().and_then(|span| problems.time("max_time", span));
    let num_sanity_val_steps =
        problems.count("num_sanity_val_steps", config.num_sanity_val_steps.unwrap_or(2));
    let name = accelerator.map_or("cpu", |accelerator| accelerator.name());
    check_graph(config, name, &mut problems);
    check_compile(config, name, &mut problems);
    let PrecisionPlan { precision, fp8, op_lists, lists_are_default, logs_casts } =
        resolve_precision(config, accelerator.ok(), &ranks.strategy, &mut problems);
    let mut plan = TrainPlan {
        device,
        ranks,
        precision,
        fp8,
        op_lists,
        lists_are_default,
        logs_casts,
        max_epochs,
        min_epochs: config.min_epochs.unwrap_or(u64::from(config.min_steps.is_some())),
        max_steps,
        min_steps: config.min_steps.unwrap_or(0),
        limit_train: problems.limit("limit_train_batches", config.limit_train_batches),
        limit_val: problems.limit("limit_val_batches", config.limit_val_batches),
        limit_test: problems.limit("limit_test_batches", config.limit_test_batches),
        limit_predict: problems.limit("limit_predict_batches", config.limit_predict_batches),
        val_check_interval: problems.limit("val_check_interval", val_check_interval),
        val_check_time,
        max_time,
        overfits: false,
        deterministic: config.deterministic.map(mode_of),
        benchmark: match (config.benchmark, config.deterministic) {
            (None, Some(Deterministic::Flag(true))) => Some(false),
            (benchmark, _) => benchmark,
        },
        inference_mode: config.inference_mode && !matches!(device, Device::Hpu(_)),
        detect_anomaly: config.detect_anomaly,
        barebones: config.barebones,
        enable_autolog_hparams: config.enable_autolog_hparams,
        save_on_signal: config.save_on_signal,
        requeue_signal: requeue_signal(&config.plugins),
        check_val_every_n_epoch: config.check_val_every_n_epoch,
        num_sanity_val_steps: num_sanity_val_steps.map(|steps| steps as usize),
        log_every_n_steps: config.log_every_n_steps.unwrap_or(50),
        accumulate_grad_batches: config.accumulate_grad_batches,
        clip,
        reload_dataloaders_every_n_epochs: config.reload_dataloaders_every_n_epochs,
        graph: config.graph,
        compile: config.compile,
        activations: resolve_activations(config, &mut problems),
        checkpoints: CheckpointSettings::default(),
        fast_dev_run: false,
        default_root_dir: config.default_root_dir.as_ref().map_or_else(|| PathBuf::from("."), expand_home),
    };
    if config.barebones {
        contradictions::refuse_beside_barebones(config, &mut problems);
        (plan.num_sanity_val_steps, plan.log_every_n_steps) = (Some(0), 0);
    }
    deepspeed::resolve(config, &mut plan, &mut problems);
    contradictions::refuse(config, &mut problems);
    let overfit = problems.limit("overfit_batches", Some(config.overfit_batches));
    if !overfit.is_none() {
        plan = TrainPlan { limit_train: overfit, limit_val: overfit, overfits: true, ..plan };
    }
    if let Some(batches) = config.fast_dev_run.batches() {
        plan = fast_dev_run(plan, batches);
    }
    if problems.0.is_empty() { Ok(plan) } else { Err(ConfigError { problems: problems.0 }) }
}

fn mode_of(deterministic: Deterministic) -> DeterministicMode {
    match deterministic {
        Deterministic::Flag(false) => DeterministicMode::Off,
        Deterministic::Flag(true) => DeterministicMode::Error,
        Deterministic::Warn(_) => DeterministicMode::Warn,
    }
}

fn resolve_activations(config: &TrainerConfig, problems: &mut Problems) -> ActivationPlan {
    let given = config.activation_checkpointing.as_ref().map(ActivationCheckpointing::settings);
    let ActivationCheckpointingConfig { modules, mode, save, budget } = given.unwrap_or_default();
    let bytes = match &budget {
        Some(MemorySize::Bytes(bytes)) => Some(*bytes),
        Some(MemorySize::Text(text)) => match parse_size(text) {
            Some(bytes) => Some(bytes as u64),
            None => {
                let what = format!("`{text}` is not a size of memory");
                problems.add(
                    "activation_checkpointing.budget",
                    what,
                    "use a number of bytes, or such as 512MiB",
                );
                None
            }
        },
        None => None,
    };
    if bytes.is_some() && mode == ActivationMode::Offload {
        let what = "a budget with mode=offload, which moves what all modules save".to_owned();
        problems.add("activation_checkpointing.budget", what, "leave it out, or use mode=recompute");
    }
    if modules.is_empty()
        && matches!(config.activation_checkpointing, Some(ActivationCheckpointing::Settings(_)))
    {
        let what = "no module is named".to_owned();
        problems.add(
            "activation_checkpointing.modules",
            what,
            "name modules by type or fqn, or leave the key out",
        );
    }
    if !save.is_empty() && mode == ActivationMode::Offload {
        let what = "operators to save with mode=offload, which computes nothing again".to_owned();
        problems.add("activation_checkpointing.save", what, "leave it out, or use mode=recompute");
    }
    let treatment = match (mode, CheckpointPolicy::of(save)) {
        (ActivationMode::Offload, _) => Treatment::Offload,
        (ActivationMode::Recompute, Ok(policy)) => Treatment::Recompute(policy),
        (ActivationMode::Recompute, Err(Problem { what, remedy })) => {
            problems.add("activation_checkpointing.save", what, remedy);
            Treatment::Offload
        }
    };
    ActivationPlan { modules, treatment, budget: bytes }
}

/// What graphs cannot be combined with in any call; in a fit there is more: [`contradictions::refuse_steps`].
fn check_graph(config: &TrainerConfig, accelerator: &str, problems: &mut Problems) {
    if config.graph != GraphMode::Off && accelerator == "cuda" {
        let what =
            format!("graph={} on cuda: operators are recorded on cpu and emulated HPUs only", config.graph);
        problems.add("graph", what, "set trainer.graph=off, or accelerator=cpu");
    }
    if config.graph != GraphMode::Off && config.detect_anomaly {
        let what = format!("graph={} with detect_anomaly: a replay runs no checks", config.graph);
        problems.add("graph", what, "set trainer.graph=off, or trainer.detect_anomaly=false");
    }
}

/// The same of compiled steps and modules.
fn check_compile(config: &TrainerConfig, accelerator: &str, problems: &mut Problems) {
    let Some(backend) = config.compile.map(|compile| compile.backend) else { return };
    if config.graph != GraphMode::Off {
        let what = format!(
            "compile={backend} with graph={}: HPU graphs with torch.compile are not supported",
            config.graph
        );
        problems.add("compile", what, "leave out trainer.compile or trainer.graph");
    }
    if accelerator == "cuda" {
        let what = format!("compile={backend} on cuda: operators are recorded on cpu and emulated HPUs only");
        problems.add("compile", what, "leave trainer.compile out, or set accelerator=cpu");
    }
    if config.detect_anomaly {
        let what = format!("compile={backend} with detect_anomaly: a compiled step runs no checks");
        problems.add("compile", what, "leave trainer.compile out, or set trainer.detect_anomaly=false");
    }
}

fn resolve_clip(config: &TrainerConfig, value: f64, problems: &mut Problems) -> Option<GradientClip> {
    if !(0.0..=f64::from(f32::MAX)).contains(&value) {
        let what = format!("{value} is not a limit");
        problems.add("gradient_clip_val", what, "use a positive number, or 0 to clip nothing");
    }
    (value > 0.0).then(|| match config.gradient_clip_algorithm.unwrap_or_default() {
        GradientClipAlgorithm::Norm => GradientClip::Norm(value),
        GradientClipAlgorithm::Value => GradientClip::Value(value),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::{CpuAccelerator, accelerator};
    use crate::trainer::config::values::{FastDevRun, Limit, ValCheckInterval};
    use crate::trainer::plan::limits::FitPlan;
    use crate::trainer::plan::limits::limit_batches;

    /// On the CPU, as on a machine without anything else.
    fn resolve_on_cpu(config: &TrainerConfig) -> Result<TrainPlan, ConfigError> {
        resolve(config, Ok(&CpuAccelerator), false)
    }

    #[test]
    fn all_problems_are_reported_together_with_key_and_remedy() {
        let config = TrainerConfig {
            accelerator: "tpu".to_owned(),
            max_epochs: Some(-2),
            limit_train_batches: Some(Limit::Fraction(1.5)),
            accumulate_grad_batches: 0,
            check_val_every_n_epoch: None,
            val_check_interval: Some(Limit::Fraction(0.5).into()),
            ..TrainerConfig::default()
        };
        let problems =
            resolve(&config, accelerator("tpu").as_deref(), false).expect_err("five mistakes").problems;
        let mut keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            [
                "trainer.accelerator",
                "trainer.accumulate_grad_batches",
                "trainer.limit_train_batches",
                "trainer.max_epochs",
                "trainer.val_check_interval"
            ]
        );
        assert!(problems.iter().all(|problem| !problem.problem.remedy.is_empty()));
    }

    #[test]
    fn limits_round_down_and_refuse_nothing() {
        assert_eq!(Limit::Fraction(0.5).of(7), 3);
        assert_eq!(Limit::Batches(10).of(7), 7);
        assert_eq!(limit_batches("limit_val_batches", Limit::Fraction(0.0), &[5]), Ok(vec![0]));
        let error = limit_batches("limit_val_batches", Limit::Fraction(0.1), &[5]).expect_err("no batch");
        assert!(error.to_string().contains("use at least 0.2000"), "{error}");
    }

    #[test]
    fn validation_interval_is_counted_in_batches() {
        let plan_of = |interval: Option<Limit>, every, limit| {
            let config = TrainerConfig {
                val_check_interval: interval.map(ValCheckInterval::Batches),
                check_val_every_n_epoch: every,
                limit_val_batches: Some(Limit::Batches(limit)),
                ..TrainerConfig::default()
            };
            FitPlan::new(&resolve_on_cpu(&config)?, 10, &[4]).map(|plan| plan.val_check_batch)
        };
        let plan = |interval, every| plan_of(interval, every, 4);
        assert_eq!(plan(None, Some(1)), Ok(10));
        assert_eq!(plan(Some(Limit::Fraction(0.25)), Some(1)), Ok(2));
        assert_eq!(plan(Some(Limit::Batches(4)), Some(1)), Ok(4));
        assert_eq!(plan(Some(Limit::Batches(40)), None), Ok(40));
        assert!(plan(Some(Limit::Batches(40)), Some(1)).is_err());
        assert!(plan_of(Some(Limit::Batches(0)), Some(1), 4).is_err());
        // validation is off
        for interval in [Limit::Batches(40), Limit::Batches(0), Limit::Fraction(0.5)] {
            for every in [Some(1), Some(0), None] {
                assert!(plan_of(Some(interval), every, 0).is_ok(), "{interval:?} {every:?}");
            }
        }
    }

    #[test]
    fn fast_dev_run_limits_everything() {
        let config = TrainerConfig { fast_dev_run: FastDevRun::Batches(3), ..TrainerConfig::default() };
        let plan = resolve_on_cpu(&config).expect("valid");
        assert_eq!((plan.max_epochs, plan.max_steps, plan.limit_val), (Some(1), Some(3), Limit::Batches(3)));
    }
}
