//! From the configuration as written to a plan without `auto`: pure functions, all problems reported together.

pub(super) mod contradictions;

use std::path::PathBuf;
use std::time::Duration;

use crate::accelerator::Accelerator;
use crate::callback::TimeSpan;
use crate::data::Stage;
use crate::device::Device;
use crate::error::{ConfigError, ConfigProblem, DeviceError, Error};
use crate::ffi::DeterministicMode;
use crate::optim::GradientClip;
use crate::precision::{HpuPrecisionPlugin, OpLists, Precision, is_float8, is_hmp};
use crate::strategy::StrategyPlan;
use crate::trainer::config::{
    Deterministic, GradientClipAlgorithm, Limit, PluginConfig, TrainerConfig, ValCheckInterval,
};
use crate::trainer::join::RankPlan;
use crate::trainer::run::graphs::step::GraphMode;

/// A run as it will be done. Immutable; nothing is `auto`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TrainPlan {
    /// The device of this process.
    pub device: Device,
    pub ranks: RankPlan,
    pub precision: Precision,
    /// Which operators cast; none means the default lists.
    pub op_lists: Option<OpLists>,
    /// The lists come from the environment only.
    pub lists_are_default: bool,
    /// Log each sort of cast when it is first done.
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
    /// Learning rates are set by a search.
    pub drops_schedulers: bool,
    /// What a search has found.
    pub found_lr: Option<f64>,
    /// The same for the loaders of a stage.
    pub batch_size: Option<(Stage, usize)>,
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
    pub fast_dev_run: bool,
    pub default_root_dir: PathBuf,
}

impl TrainPlan {
    /// The key that the user has set the limit of a fit's loaders by.
    pub fn key_of_limit(&self, key: &'static str) -> &'static str {
        if self.overfits { "overfit_batches" } else { key }
    }
}

/// Batches of the loaders of a fit, known once they are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FitPlan {
    pub num_training_batches: usize,
    /// One entry per validation loader.
    pub num_val_batches: Vec<usize>,
    /// Any rank has some.
    pub has_val_batches: bool,
    /// Validate each time so many training batches are done; counted within the epoch, or across epochs if
    /// `check_val_every_n_epoch` is null.
    pub val_check_batch: usize,
}

pub(crate) struct Problems(pub Vec<ConfigProblem>);

impl Problems {
    pub(crate) fn add(&mut self, key: &str, what: String, remedy: &str) {
        self.0.push(ConfigProblem::new(format!("trainer.{key}"), what, remedy));
    }

    /// The accelerator that the configuration names is not there; its reason ends with the remedy.
    pub(crate) fn accelerator(&mut self, error: &DeviceError) {
        let text = error.to_string();
        let (what, remedy) = text.split_once("; ").unwrap_or((&text, "use cpu"));
        self.add("accelerator", what.to_owned(), remedy);
    }

    fn limit(&mut self, key: &str, limit: Option<Limit>) -> Limit {
        match limit {
            Some(Limit::Fraction(f)) if !(0.0..=1.0).contains(&f) => {
                let remedy = "use a fraction from 0.0 to 1.0, or a whole number of batches";
                self.add(key, format!("{f} is neither a fraction nor a number of batches"), remedy);
                Limit::Fraction(1.0)
            }
            Some(limit) => limit,
            None => Limit::Fraction(1.0),
        }
    }

    fn time(&mut self, key: &str, span: &TimeSpan) -> Option<Duration> {
        span.duration(&format!("trainer.{key}")).map_err(|error| self.0.extend(error.problems)).ok()
    }

    /// -1 means no limit.
    fn count(&mut self, key: &str, value: i64) -> Option<u64> {
        if value < -1 {
            self.add(key, format!("{value} is below -1"), "use -1 for no limit, or a number from 0");
        }
        u64::try_from(value).ok()
    }
}

/// Checks the configuration and resolves what is `auto`.
pub(crate) fn resolve(
    config: &TrainerConfig,
    accelerator: Result<&dyn Accelerator, &DeviceError>,
) -> Result<TrainPlan, ConfigError> {
    let mut problems = Problems(Vec::new());
    let ranks = RankPlan::resolve(config, accelerator, &mut problems);
    let device = ranks.devices[0];
    let max_steps = problems.count("max_steps", config.max_steps);
    let max_epochs = match config.max_epochs {
        Some(max_epochs) => problems.count("max_epochs", max_epochs),
        None if max_steps.is_some() || config.max_time.is_some() => None,
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
    check_graph(config, name, &ranks, &mut problems);
    let PrecisionPlan { precision, op_lists, lists_are_default, logs_casts } =
        resolve_precision(config, accelerator.ok(), &mut problems);
    let mut plan = TrainPlan {
        device,
        ranks,
        precision,
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
        drops_schedulers: false,
        found_lr: None,
        batch_size: None,
        check_val_every_n_epoch: config.check_val_every_n_epoch,
        num_sanity_val_steps: num_sanity_val_steps.map(|steps| steps as usize),
        log_every_n_steps: config.log_every_n_steps.unwrap_or(50),
        accumulate_grad_batches: config.accumulate_grad_batches,
        clip,
        reload_dataloaders_every_n_epochs: config.reload_dataloaders_every_n_epochs,
        graph: config.graph,
        fast_dev_run: false,
        default_root_dir: config.default_root_dir.clone().unwrap_or_else(|| PathBuf::from(".")),
    };
    if config.barebones {
        contradictions::refuse_beside_barebones(config, &mut problems);
        (plan.num_sanity_val_steps, plan.log_every_n_steps) = (Some(0), 0);
    }
    contradictions::refuse(config, &mut problems);
    let overfit = problems.limit("overfit_batches", Some(config.overfit_batches));
    if !overfit.is_none() {
        plan = TrainPlan { limit_train: overfit, limit_val: overfit, overfits: true, ..plan };
    }
    if let Some(batches) = config.fast_dev_run.batches() {
        plan = trial(plan, batches);
    }
    if problems.0.is_empty() { Ok(plan) } else { Err(ConfigError { problems: problems.0 }) }
}

/// When validation is due: after so many batches or part of an epoch, or after so much time.
fn resolve_val_check(config: &TrainerConfig, problems: &mut Problems) -> (Option<Limit>, Option<Duration>) {
    let (val_check_interval, val_check_time) = match &config.val_check_interval {
        Some(ValCheckInterval::Batches(limit)) => (Some(*limit), None),
        Some(ValCheckInterval::Time(span)) => (None, problems.time("val_check_interval", span)),
        None => (None, None),
    };
    if let (Some(Limit::Fraction(f)), None) = (val_check_interval, config.check_val_every_n_epoch) {
        let what = format!("the fraction {f} of an epoch cannot be counted across epochs");
        problems.add(
            "val_check_interval",
            what,
            "use a number of batches, or set trainer.check_val_every_n_epoch=1",
        );
    }
    if config.check_val_every_n_epoch == Some(0) {
        problems.add(
            "check_val_every_n_epoch",
            "0 epochs".to_owned(),
            "use 1 or more, or limit_val_batches=0",
        );
    }
    if val_check_interval == Some(Limit::Batches(0)) {
        problems.add("val_check_interval", "0 batches".to_owned(), "use 1 or more, or limit_val_batches=0");
    }
    (val_check_interval, val_check_time)
}

/// What graphs cannot be combined with.
fn check_graph(config: &TrainerConfig, accelerator: &str, ranks: &RankPlan, problems: &mut Problems) {
    if config.graph != GraphMode::Off && accelerator == "cuda" {
        let what =
            format!("graph={} on cuda: operators are recorded on cpu and emulated HPUs only", config.graph);
        problems.add("graph", what, "set trainer.graph=off, or accelerator=cpu");
    }
    if config.graph != GraphMode::Off && config.detect_anomaly {
        let what = format!("graph={} with detect_anomaly: a replay runs no checks", config.graph);
        problems.add("graph", what, "set trainer.graph=off, or trainer.detect_anomaly=false");
    }
    if config.graph == GraphMode::Step && ranks.strategy != StrategyPlan::SingleDevice {
        let what =
            format!("graph={} with several ranks: a replay would not average their gradients", config.graph);
        problems.add("graph", what, "set trainer.graph=modules or off, or train on one device");
    }
}

fn mode_of(deterministic: Deterministic) -> DeterministicMode {
    match deterministic {
        Deterministic::Flag(false) => DeterministicMode::Off,
        Deterministic::Flag(true) => DeterministicMode::Error,
        Deterministic::Warn(_) => DeterministicMode::Warn,
    }
}

/// The plan of `fast_dev_run`: so many batches of everything.
fn trial(plan: TrainPlan, batches: u64) -> TrainPlan {
    let limit = Limit::Batches(batches);
    TrainPlan {
        max_epochs: Some(1),
        max_steps: Some(batches),
        limit_train: limit,
        limit_val: limit,
        limit_test: limit,
        limit_predict: limit,
        val_check_interval: Limit::Fraction(1.0),
        val_check_time: None,
        check_val_every_n_epoch: Some(1),
        num_sanity_val_steps: Some(0),
        log_every_n_steps: 1,
        fast_dev_run: true,
        ..plan
    }
}

/// The part of the plan that the precision or its plugin decides.
#[derive(Default)]
struct PrecisionPlan {
    precision: Precision,
    op_lists: Option<OpLists>,
    lists_are_default: bool,
    logs_casts: bool,
}

/// The precision, from its key or a plugin, and the lists of operators of an HPU.
fn resolve_precision(
    config: &TrainerConfig,
    accelerator: Option<&dyn Accelerator>,
    problems: &mut Problems,
) -> PrecisionPlan {
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
        let what = "fp8 not supported: FP8 not supported on Gaudi, Gaudi2 or higher required".to_owned();
        problems.add(key, what, "use bf16-mixed");
        return PrecisionPlan::default();
    }
    match found {
        Ok((precision, _)) if precision.has_float16() && is_first_generation => {
            let what = format!(
                "{precision}: fp16 not supported: FP16 not supported on Gaudi, Gaudi2 or higher required"
            );
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
            op_lists,
            lists_are_default: config.precision.as_ref().is_some_and(|value| !is_hmp(value)),
            logs_casts: plugins.iter().any(|plugin| plugin.verbose),
        },
        Err(Error::Config(error)) => {
            problems.0.extend(error.problems);
            PrecisionPlan::default()
        }
        Err(error) => {
            let text = error.to_string();
            let (what, remedy) = text.split_once("; ").unwrap_or((&text, "check its lists"));
            problems.add(key, what.to_owned(), remedy);
            PrecisionPlan::default()
        }
    }
}

/// What `trainer.precision` says; on an HPU it stands for the plugin with that precision.
fn precision_of(value: &serde_json::Value, accelerator: &str) -> Result<(Precision, Option<OpLists>), Error> {
    let precision = Precision::parse(value, accelerator).map_err(|message| {
        let (what, remedy) = message.split_once("; ").unwrap_or((&message, "use 32-true"));
        ConfigError::new("trainer.precision", what, remedy)
    })?;
    let lists = match accelerator {
        "hpu" => HpuPrecisionPlugin::new(value.clone()).op_lists(precision)?,
        _ => None,
    };
    Ok((precision, lists))
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

impl Limit {
    /// Whether it leaves no batch at all.
    pub(crate) fn is_none(self) -> bool {
        matches!(self, Self::Batches(0)) || self == Self::Fraction(0.0)
    }

    /// How many of `available` batches.
    pub(crate) fn of(self, available: usize) -> usize {
        match self {
            Self::Batches(batches) => available.min(usize::try_from(batches).unwrap_or(usize::MAX)),
            Self::Fraction(fraction) => (available as f64 * fraction).floor() as usize,
        }
    }
}

/// How many batches each loader gives under a limit; a fraction that leaves none is a mistake.
pub(crate) fn limit_batches(key: &str, limit: Limit, available: &[usize]) -> Result<Vec<usize>, ConfigError> {
    available
        .iter()
        .map(|&batches| match (limit, limit.of(batches)) {
            (Limit::Fraction(fraction), 0) if fraction > 0.0 && batches > 0 => Err(ConfigError::new(
                format!("trainer.{key}"),
                format!("{fraction} of {batches} batches is less than one"),
                format!("use at least {:.4}, or a whole number of batches", 1.0 / batches as f64),
            )),
            (_, batches) => Ok(batches),
        })
        .collect()
}

impl FitPlan {
    /// Batches and validation times for loaders with so many batches.
    pub(crate) fn new(plan: &TrainPlan, train: usize, val: &[usize]) -> Result<Self, ConfigError> {
        let num_training_batches =
            limit_batches(plan.key_of_limit("limit_train_batches"), plan.limit_train, &[train])?
                .first()
                .copied()
                .unwrap_or(0);
        let num_val_batches = limit_batches(plan.key_of_limit("limit_val_batches"), plan.limit_val, val)?;
        let val_check_batch = match plan.val_check_interval {
            _ if plan.val_check_time.is_some() => usize::MAX,
            Limit::Fraction(fraction) => ((num_training_batches as f64 * fraction) as usize).max(1),
            Limit::Batches(batches) => {
                let batches = usize::try_from(batches).unwrap_or(usize::MAX);
                if batches > num_training_batches
                    && plan.check_val_every_n_epoch.is_some()
                    && num_training_batches > 0
                {
                    return Err(ConfigError::new(
                        "trainer.val_check_interval",
                        format!("{batches} batches are more than the {num_training_batches} of an epoch"),
                        "use a smaller number, or check_val_every_n_epoch=null to count across epochs",
                    ));
                }
                batches
            }
        };
        let has_val_batches = num_val_batches.iter().any(|&batches| batches > 0);
        Ok(Self { num_training_batches, num_val_batches, has_val_batches, val_check_batch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::{CpuAccelerator, accelerator};

    /// On the CPU, as on a machine without anything else.
    fn resolve_on_cpu(config: &TrainerConfig) -> Result<TrainPlan, ConfigError> {
        resolve(config, Ok(&CpuAccelerator))
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
        let problems = resolve(&config, accelerator("tpu").as_deref()).expect_err("five mistakes").problems;
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
        assert!(problems.iter().all(|problem| !problem.remedy.is_empty()));
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
        let plan = |interval: Option<Limit>, every| {
            let config = TrainerConfig {
                val_check_interval: interval.map(ValCheckInterval::Batches),
                check_val_every_n_epoch: every,
                ..TrainerConfig::default()
            };
            FitPlan::new(&resolve_on_cpu(&config).expect("valid"), 10, &[4]).map(|plan| plan.val_check_batch)
        };
        assert_eq!(plan(None, Some(1)), Ok(10));
        assert_eq!(plan(Some(Limit::Fraction(0.25)), Some(1)), Ok(2));
        assert_eq!(plan(Some(Limit::Batches(4)), Some(1)), Ok(4));
        assert_eq!(plan(Some(Limit::Batches(40)), None), Ok(40));
        assert!(plan(Some(Limit::Batches(40)), Some(1)).is_err());
    }

    #[test]
    fn fast_dev_run_limits_everything() {
        let config = TrainerConfig { fast_dev_run: FastDevRun::Batches(3), ..TrainerConfig::default() };
        let plan = resolve_on_cpu(&config).expect("valid");
        assert_eq!((plan.max_epochs, plan.max_steps, plan.limit_val), (Some(1), Some(3), Limit::Batches(3)));
    }

    use crate::trainer::config::FastDevRun;
}
