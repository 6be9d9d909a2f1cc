//! How a DeepSpeed strategy and the trainer's other keys go together.

use tch::Kind;

use crate::accelerator::Accelerator;
use crate::error::{ConfigError, ConfigProblem};
use crate::optim::GradientClip;
use crate::precision::fp8::Fp8Settings;
use crate::precision::{NO_FLOAT8, NO_FLOAT16, Precision, as_written, is_float8};
use crate::strategy::{Beside, DeepSpeedPlan, StrategyPlan};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::values::{GradientClipAlgorithm, PluginConfig};
use crate::trainer::plan::problems::Problems;
use crate::trainer::plan::train_plan::TrainPlan;

fn beside(config: &TrainerConfig, num_ranks: usize) -> Beside {
    Beside {
        gradient_clip_val: config.gradient_clip_val,
        clips_by_value: config.gradient_clip_algorithm == Some(GradientClipAlgorithm::Value)
            && config.gradient_clip_val.is_some_and(|limit| limit > 0.0),
        accumulate_grad_batches: config.accumulate_grad_batches,
        num_ranks,
    }
}

/// Checks the strategy's settings beside the trainer's, and takes over those that the strategy decides.
pub(crate) fn resolve(config: &TrainerConfig, plan: &mut TrainPlan, problems: &mut Problems) {
    let num_ranks = plan.ranks.devices.len() * plan.ranks.num_nodes;
    if let Some(inference) = plan.ranks.strategy.inference()
        && inference.settings.config.enable_cuda_graph
    {
        plan.graph = GraphMode::Modules;
    }
    let StrategyPlan::DeepSpeed(deepspeed) = &plan.ranks.strategy else { return };
    let num_ranks = num_ranks / deepspeed.settings.tp_size(); // with other batches
    let mut found = deepspeed.check_beside(beside(config, num_ranks));
    plan.clip = deepspeed.clip_norm(config.gradient_clip_val).map(GradientClip::Norm);
    plan.checkpoints = deepspeed.settings.checkpoints();
    if !found.is_empty() {
        found.extend(deepspeed.settings.unknown_keys.iter().cloned());
    }
    problems.0.extend(found);
}

/// Settings of the strategy that have no effect, in the log of rank 0.
pub(crate) fn say_notes(config: &TrainerConfig, plan: &TrainPlan, is_global_zero: bool) {
    notes(config, plan).iter().filter(|_| is_global_zero).for_each(|note| tracing::warn!("{note}"));
}

/// Settings of the strategy that have no effect, a sentence each.
fn notes(config: &TrainerConfig, plan: &TrainPlan) -> Vec<String> {
    match &plan.ranks.strategy {
        StrategyPlan::DeepSpeed(deepspeed) => {
            let written = config.precision.as_ref().map_or_else(|| plan.precision.to_string(), as_written);
            deepspeed.notes(beside(config, 1), plan.precision, &written)
        }
        StrategyPlan::Inference(inference) => {
            let mut notes = inference.settings.notes.clone();
            notes.extend(idle_precision(config, plan));
            notes
        }
        _ => Vec::new(),
    }
}

/// A precision beside the `dtype` of inference, which wins.
fn idle_precision(config: &TrainerConfig, plan: &TrainPlan) -> Option<String> {
    let dtype = plan.ranks.strategy.inference()?.settings.config.dtype?;
    let given = given_precision(config, "cpu", false, None).ok()??;
    let (key, written) = (given.key, given.written);
    let why = format!("the weights of inference are in dtype {dtype:?}");
    (given.precision != plan.precision).then(|| format!("trainer.{key} ({written}) has no effect: {why}"))
}

/// The precision with a DeepSpeed strategy: of the trainer or its plugin, and of the strategy's settings.
pub(crate) fn precision(
    config: &TrainerConfig,
    strategy: &StrategyPlan,
    accelerator: Option<&dyn Accelerator>,
    problems: &mut Problems,
) -> (Precision, Option<Fp8Settings>) {
    let dtype = strategy.inference().and_then(|inference| inference.settings.config.dtype);
    let of_dtype = dtype.map(|dtype| match dtype {
        Kind::Half => Precision::Fp16True,
        Kind::BFloat16 => Precision::Bf16True,
        _ => Precision::Full,
    });
    let of_file = of_dtype.or_else(|| strategy.deepspeed().and_then(DeepSpeedPlan::precision));
    let name = accelerator.map_or("cpu", |accelerator| accelerator.name());
    let lacks_float16 = accelerator.is_some_and(|it| !it.has_float16());
    let given = match given_precision(config, name, lacks_float16, of_file) {
        Ok(given) => given,
        Err(error) => {
            problems.0.extend(error.problems);
            return (Precision::default(), None);
        }
    };
    if let (Some(of_file), Some(given)) = (of_file, &given)
        && dtype.is_none()
        && of_file != given.precision
        && !(given.fp8.is_some() && of_file == Precision::Bf16True)
    {
        let what = format!("{}, but DeepSpeed's settings say {of_file}", given.written);
        problems.add(given.key, what, "remove one of the two");
    }
    let precision = of_file.or(given.as_ref().map(|given| given.precision)).unwrap_or_default();
    let fp8 = given.as_ref().filter(|_| dtype.is_none()).and_then(|given| given.fp8.clone());
    if dtype == Some(Kind::Half) && lacks_float16 {
        let what =
            format!("float16: DeepSpeed inference with float16 is not supported on Gaudi1 ({NO_FLOAT16})");
        problems.add("strategy.dtype", what, "use bf16 or float, or a Gaudi2");
    } else if precision.has_float16() && lacks_float16 {
        let (key, written) = match given {
            Some(given) => (given.key, given.written),
            None => ("strategy.config", precision.to_string()),
        };
        problems.add(key, format!("{written}: {NO_FLOAT16}"), "use bf16, or a Gaudi2");
    }
    (precision, fp8)
}

/// A precision that the trainer or a plugin names.
struct GivenPrecision {
    key: &'static str,
    /// Its name there; under DeepSpeed, `bf16-mixed` is `bf16-true`.
    written: String,
    precision: Precision,
    /// Layers compute in float8; weights in bfloat16 if the settings' file says so.
    fp8: Option<Fp8Settings>,
}

/// What the trainer or a plugin says. Under DeepSpeed, weights are of the lower dtype themselves.
fn given_precision(
    config: &TrainerConfig,
    accelerator: &str,
    lacks_float16: bool,
    of_file: Option<Precision>,
) -> Result<Option<GivenPrecision>, ConfigError> {
    let plugins = config.plugins.iter().enumerate().filter_map(|(index, plugin)| match plugin {
        PluginConfig::DeepSpeedPrecisionPlugin(plugin) => Some((index, "DeepSpeedPrecisionPlugin", plugin)),
        PluginConfig::HpuDeepSpeedPrecisionPlugin(plugin) => {
            Some((index, "HPUDeepSpeedPrecisionPlugin", plugin))
        }
        _ => None,
    });
    let plugins: Vec<_> = plugins.collect();
    let is_other = |plugin: &PluginConfig| matches!(plugin, PluginConfig::HpuPrecisionPlugin(_));
    if config.plugins.iter().any(is_other) {
        let what = "HpuPrecisionPlugin with a DeepSpeed strategy, which casts no operators";
        return Err(ConfigError::new("trainer.plugins", what, "use DeepSpeedPrecisionPlugin"));
    }
    let (key, value) = match (&config.precision, &plugins[..]) {
        (None, []) => return Ok(None),
        (Some(value), []) => ("precision", value),
        (None, [(_, name, plugin)]) => {
            if *name == "HPUDeepSpeedPrecisionPlugin" && accelerator != "hpu" {
                let what = format!("{name} with accelerator={accelerator}");
                return Err(ConfigError::new("trainer.plugins", what, "use DeepSpeedPrecisionPlugin"));
            }
            ("plugins", &plugin.precision)
        }
        (precision, _) => {
            let key = if precision.is_some() { "trainer.precision" } else { "trainer.plugins" };
            let what = "the precision is given twice";
            return Err(ConfigError::new(key, what, "give trainer.precision or one precision plugin"));
        }
    };
    let (at, written) = (format!("trainer.{key}"), as_written(value));
    if lacks_float16 && is_float8(value) {
        return Err(ConfigError::new(at, NO_FLOAT8, "use bf16-mixed"));
    }
    let precision = Precision::parse(value, accelerator)
        .map_err(|problem| ConfigError { problems: vec![ConfigProblem::at(at.clone(), problem)] })?;
    let precision = match precision {
        Precision::Bf16Mixed | Precision::Bf16True => Precision::Bf16True,
        Precision::Fp16Mixed if accelerator == "cpu" && of_file != Some(Precision::Fp16True) => {
            tracing::warn!("{at}: 16-mixed on a CPU is bf16-mixed; 16-true has weights in float16");
            Precision::Bf16True
        }
        Precision::Fp16Mixed | Precision::Fp16True => Precision::Fp16True,
        Precision::Full => Precision::Full,
        Precision::Fp8 => Precision::Fp8,
        Precision::Double => {
            let what = format!("{written} with a DeepSpeed strategy");
            return Err(ConfigError::new(at, what, "use bf16-mixed, 16-true or 32-true"));
        }
    };
    let fp8 = match plugins.first() {
        Some((index, _, plugin)) => {
            plugin.fp8(precision).map_err(|error| error.below(&format!("trainer.plugins.{index}")))?
        }
        None => (precision == Precision::Fp8).then(Fp8Settings::default),
    };
    Ok(Some(GivenPrecision { key, written, precision, fp8 }))
}
