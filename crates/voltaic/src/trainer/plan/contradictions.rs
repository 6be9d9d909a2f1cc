//! Keys that contradict each other, which is refused, and keys that others leave without effect, which is said in the log.

use crate::callback::{Callback, ModelSummary, ProgressBar};
use crate::device::Device;
use crate::error::{ConfigError, ConfigProblem};
use crate::logger::Loggers;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::callbacks::is_a;
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::values::{Deterministic, Limit};
use crate::trainer::plan::problems::Problems;
use crate::trainer::plan::train_plan::TrainPlan;

/// What cannot be meant together.
pub(crate) fn refuse(config: &TrainerConfig, problems: &mut Problems) {
    if let (Some(algorithm), None) = (config.gradient_clip_algorithm, config.gradient_clip_val) {
        let what =
            format!("{algorithm:?} without gradient_clip_val, so that nothing is clipped").to_lowercase();
        problems.add("gradient_clip_algorithm", what, "set trainer.gradient_clip_val, or remove it");
    }
}

/// What asks for something that `barebones` switches off.
pub(crate) fn refuse_beside_barebones(config: &TrainerConfig, problems: &mut Problems) {
    let asked = [
        ("fast_dev_run", config.fast_dev_run.batches().is_some()),
        ("detect_anomaly", config.detect_anomaly),
        ("log_every_n_steps", config.log_every_n_steps.is_some_and(|steps| steps > 0)),
        ("num_sanity_val_steps", config.num_sanity_val_steps.is_some_and(|steps| steps != 0)),
        ("save_on_signal", config.save_on_signal),
        ("profiler", config.profiler.is_some()),
        ("logger", config.logger.as_ref().is_some_and(Loggers::is_enabled)),
        ("enable_checkpointing", config.enable_checkpointing == Some(true)),
        ("enable_progress_bar", config.enable_progress_bar == Some(true)),
        ("enable_model_summary", config.enable_model_summary == Some(true)),
    ];
    for (key, _) in asked.iter().filter(|(_, is_asked)| *is_asked) {
        problems.add(
            key,
            "is set beside barebones=true, which switches it off".to_owned(),
            "remove one of the two",
        );
    }
}

/// Displays that are switched off, but given as callbacks, and bars that would draw over each other.
pub(crate) fn of_displays(config: &TrainerConfig, callbacks: &[Box<dyn Callback>]) -> Vec<ConfigProblem> {
    let count = |is_one: fn(&dyn Callback) -> bool| {
        callbacks.iter().filter(|callback| is_one(callback.as_ref())).count()
    };
    let bars = count(is_a::<ProgressBar>);
    let displays = [
        ("enable_progress_bar", config.enable_progress_bar, bars, "ProgressBar"),
        ("enable_model_summary", config.enable_model_summary, count(is_a::<ModelSummary>), "ModelSummary"),
    ];
    let is_off = |enabled: Option<bool>| enabled == Some(false) || config.barebones;
    let mut problems: Vec<ConfigProblem> = displays
        .into_iter()
        .filter(|(_, enabled, count, _)| is_off(*enabled) && *count > 0)
        .map(|(key, _, _, name)| {
            let what = format!("false, but the callback {name} is given");
            ConfigProblem::new(format!("trainer.{key}"), what, "remove one of the two")
        })
        .collect();
    if bars > 1 {
        let what = format!("{bars} callbacks of type ProgressBar");
        problems.push(ConfigProblem::new("trainer.callbacks", what, "give one"));
    }
    problems
}

/// What was set and has no effect in a fit beside the other keys, a sentence each.
pub(crate) fn ignored_options(config: &TrainerConfig, plan: &TrainPlan, has_logger: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |key: &str, why: String| notes.push(format!("trainer.{key} has no effect: {why}"));
    if plan.fast_dev_run {
        let set = [
            ("max_epochs", config.max_epochs.is_some()),
            ("max_steps", config.max_steps != -1),
            ("overfit_batches", plan.overfits),
        ];
        for (key, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
            note(key, "fast_dev_run sets the limits".to_owned());
        }
    } else {
        idle_limits(config, plan, &mut note);
        if config.log_every_n_steps.is_some_and(|steps| steps > 0) && !has_logger {
            note("log_every_n_steps", "there is no logger".to_owned());
        }
    }
    if config.benchmark == Some(true) {
        if !matches!(plan.device, Device::Cuda(_)) {
            note("benchmark", format!("cuDNN runs on cuda only, not on {}", plan.device));
        } else if matches!(config.deterministic, Some(Deterministic::Flag(true))) {
            notes.push(
                "trainer.benchmark=true with deterministic=true: cuDNN may choose another kernel in each run"
                    .to_owned(),
            );
        }
    }
    notes
}

/// The same of limits and of when validation is due.
fn idle_limits(config: &TrainerConfig, plan: &TrainPlan, note: &mut impl FnMut(&str, String)) {
    if plan.overfits {
        let limits = [
            ("limit_train_batches", config.limit_train_batches),
            ("limit_val_batches", config.limit_val_batches),
        ];
        for (key, _) in limits.into_iter().filter(|(_, limit)| limit.is_some()) {
            note(key, "overfit_batches sets the limit".to_owned());
        }
    }
    if plan.limit_val.is_none() {
        let set = [
            ("val_check_interval", config.val_check_interval.is_some()),
            ("check_val_every_n_epoch", config.check_val_every_n_epoch.is_some_and(|every| every > 1)),
            ("num_sanity_val_steps", config.num_sanity_val_steps.is_some_and(|steps| steps != 0)),
        ];
        for (key, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
            note(key, "limit_val_batches=0 switches validation off".to_owned());
        }
    } else if let (Some(every), Some(epochs)) = (config.check_val_every_n_epoch, plan.max_epochs)
        && every > epochs
        && plan.limit_train != Limit::Batches(0)
        && epochs > 0
    {
        note(
            "check_val_every_n_epoch",
            format!("{every} is above max_epochs={epochs}: nothing is validated"),
        );
    }
}

/// Keys that ask for training steps which the rest of the plan cannot have. Calls that train nothing take the same plan.
pub(crate) fn refuse_steps(plan: &TrainPlan) -> Result<(), ConfigError> {
    let refuse =
        |key: &str, what: String, remedy| Err(ConfigError::new(format!("trainer.{key}"), what, remedy));
    let has_ranks = plan.ranks.strategy.is_distributed();
    match plan.compile.map(|compile| compile.backend) {
        Some(backend) if !backend.trains() => {
            let what = format!("{backend} in a fit, for which it has no gradients");
            let remedy = "use hpu_backend; aot_hpu_inference_backend is for validate, test and predict";
            return refuse("compile", what, remedy);
        }
        Some(backend) if has_ranks => {
            let what = format!(
                "compile={backend} with a strategy of ranks: a compiled step would not average their gradients"
            );
            let remedy = "leave trainer.compile out, or set strategy=auto on one device";
            return refuse("compile", what, remedy);
        }
        _ => {}
    }
    if plan.graph == GraphMode::Step && has_ranks {
        let what = "graph=step with a strategy of ranks: a replay would not average their gradients";
        let remedy = "set trainer.graph=modules or off, or strategy=auto on one device";
        return refuse("graph", what.to_owned(), remedy);
    }
    Ok(())
}

/// Keys that ask the trainer for what a module with manual optimization does itself.
pub(crate) fn refuse_beside_manual(plan: &TrainPlan) -> Result<(), ConfigError> {
    let mut problems = Vec::new();
    let mut refuse = |key: &str, what: String, remedy: &'static str| {
        problems.push(ConfigProblem::new(format!("trainer.{key}"), what, remedy));
    };
    if plan.accumulate_grad_batches != 1 {
        let what = format!("{} with manual optimization", plan.accumulate_grad_batches);
        refuse("accumulate_grad_batches", what, "step the optimizer every so many batches in training_step");
    }
    if let Some(clip) = plan.clip {
        let what = format!("{clip:?} with manual optimization");
        refuse("gradient_clip_val", what, "call clip_grad_norm between backward and step in training_step");
    }
    if let Some(compile) = plan.compile {
        let what =
            format!("{} with manual optimization, where training_step runs backward itself", compile.backend);
        refuse("compile", what, "leave trainer.compile out, and compile modules (voltaic::compile)");
    }
    if plan.graph == GraphMode::Step {
        let what = "step with manual optimization, where training_step runs backward and optimizers itself";
        let remedy = "set trainer.graph=modules or off, or capture parts of the step by hand (HpuGraph)";
        refuse("graph", what.to_owned(), remedy);
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
}
