//! In which numbers a run counts.

use crate::accelerator::Accelerator;
use crate::error::{ConfigError, ConfigProblem, Error};
use crate::precision::fp8::Fp8Settings;
use crate::precision::{HpuPrecisionPlugin, NO_FLOAT8, NO_FLOAT16, OpLists, Precision, is_float8, is_hmp};
use crate::strategy::StrategyPlan;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::values::PluginConfig;
use crate::trainer::plan::deepspeed;
use crate::trainer::plan::problems::Problems;

/// The part of the plan that the precision or its plugin decides.
#[derive(Default)]
pub(crate) struct PrecisionPlan {
    pub precision: Precision,
    pub fp8: Option<Fp8Settings>,
    pub op_lists: Option<OpLists>,
    pub lists_are_default: bool,
    pub logs_casts: bool,
}

/// The precision, from its key or a plugin, and the lists of operators of an HPU.
pub(crate) fn resolve_precision(
    config: &TrainerConfig,
    accelerator: Option<&dyn Accelerator>,
    strategy: &StrategyPlan,
    problems: &mut Problems,
) -> PrecisionPlan {
    if config.strategy.is_deepspeed() {
        let (precision, fp8) = deepspeed::precision(config, strategy, accelerator, problems);
        return PrecisionPlan { precision, fp8, ..PrecisionPlan::default() };
    }
    if config.plugins.iter().any(is_deepspeed) {
        let what = "DeepSpeedPrecisionPlugin without a DeepSpeed strategy".to_owned();
        problems.add(
            "plugins",
            what,
            "set trainer.strategy=deepspeed; elsewhere HPUPrecisionPlugin or trainer.precision say the same",
        );
    }
    let plugins: Vec<&HpuPrecisionPlugin> = config
        .plugins
        .iter()
        .filter_map(|plugin| match plugin {
            PluginConfig::HpuPrecisionPlugin(plugin) => Some(plugin),
            _ => None,
        })
        .collect();
    let name = accelerator.map_or("cpu", |accelerator| accelerator.name());
    let (key, found) = match (&config.precision, &plugins[..]) {
        (None, []) => return PrecisionPlan::default(),
        (Some(value), []) => ("precision", precision_of(value, name)),
        (None, [plugin]) => ("plugins", plugin.resolve(name)),
        (precision, _) => {
            let key = if precision.is_some() { "precision" } else { "plugins" };
            problems.add(key, "is given twice".to_owned(), "give trainer.precision or one precision plugin");
            return PrecisionPlan::default();
        }
    };
    let asked = config.precision.as_ref().or_else(|| plugins.first().map(|plugin| &plugin.precision));
    let is_first_generation = accelerator.is_some_and(|it| !it.has_float16());
    if is_first_generation && asked.is_some_and(is_float8) {
        problems.add(key, NO_FLOAT8.to_owned(), "use bf16-mixed");
        return PrecisionPlan::default();
    }
    match found {
        Ok((precision, _)) if precision.has_float16() && is_first_generation => {
            let what = format!("{precision}: {NO_FLOAT16}");
            problems.add(key, what, "use bf16-mixed, or a Gaudi2");
            PrecisionPlan::default()
        }
        Ok((Precision::Fp16Mixed, _)) if name == "cpu" => {
            tracing::warn!(
                "`Trainer(accelerator='cpu', precision='16-mixed')`, but AMP with fp16 is not supported on CPU: using \
                 precision='bf16-mixed' instead"
            );
            PrecisionPlan { precision: Precision::Bf16Mixed, ..PrecisionPlan::default() }
        }
        Ok((precision, op_lists)) => PrecisionPlan {
            precision,
            // what the plugin says of it was checked with the rest
            fp8: match plugins.first() {
                Some(plugin) => plugin.fp8(precision).ok().flatten(),
                None => (precision == Precision::Fp8).then(Fp8Settings::default),
            },
            op_lists,
            lists_are_default: config.precision.as_ref().is_some_and(|value| !is_hmp(value)),
            logs_casts: plugins.iter().any(|plugin| plugin.verbose),
        },
        Err(Error::Config(error)) => {
            let index =
                config.plugins.iter().position(|it| matches!(it, PluginConfig::HpuPrecisionPlugin(_)));
            let place = format!("trainer.plugins.{}", index.unwrap_or(0));
            problems.0.extend(error.below(&place).problems);
            PrecisionPlan::default()
        }
        Err(error) => {
            let problem = error.into_problem("check its lists");
            problems.0.push(ConfigProblem::at(format!("trainer.{key}"), problem));
            PrecisionPlan::default()
        }
    }
}

fn is_deepspeed(plugin: &PluginConfig) -> bool {
    matches!(plugin, PluginConfig::DeepSpeedPrecisionPlugin(_) | PluginConfig::HpuDeepSpeedPrecisionPlugin(_))
}

/// What `trainer.precision` says; on an HPU it stands for the plugin with that precision.
fn precision_of(value: &serde_json::Value, accelerator: &str) -> Result<(Precision, Option<OpLists>), Error> {
    let precision = Precision::parse(value, accelerator)
        .map_err(|problem| ConfigError::at("trainer.precision", problem))?;
    let lists = match accelerator {
        "hpu" => HpuPrecisionPlugin::new(value.clone()).op_lists(precision)?,
        _ => None,
    };
    Ok((precision, lists))
}
