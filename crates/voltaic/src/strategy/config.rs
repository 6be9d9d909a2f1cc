//! The `strategy` key.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use voltaic_macros::Defaults;

use super::deepspeed::config::DeepSpeedStrategy;
use super::deepspeed::inference::{InferencePlan, check_ranks};
use super::deepspeed::plan::{DeepSpeedPlan, Understood, of_name as deepspeed_of_name};
use super::zero::config::{ZeroConfig, ZeroStage};
use crate::config::conversions;
use crate::device::Device;
use crate::error::{ConfigError, ConfigProblem};

/// A TiB; a larger bucket is one for all gradients.
const MAX_BUCKET_MB: u64 = 1 << 20;
const MAX_TIMEOUT_SECS: f64 = 365.0 * 86_400.0;

/// A strategy by name, or by class with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum StrategyConfig {
    /// `auto`, `single_device`, `hpu_single`, `ddp`, `ddp_find_unused_parameters_true`, `hpu_ddp`, `hpu_parallel`, `zero1`, `zero2`, `zero3`,
    /// `deepspeed`, `deepspeed_stage_1` to `_3`, `deepspeed_stage_2_offload`, `deepspeed_stage_3_offload`,
    /// `deepspeed_stage_3_offload_nvme`, or the same with `hpu_` before them.
    Name(String),
    /// With settings.
    Class(StrategyClass),
}

/// A strategy by class name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum StrategyClass {
    /// Averages gradients over ranks.
    DDPStrategy(DdpConfig),
    /// `DDPStrategy` on HPUs.
    HPUDDPStrategy(DdpConfig),
    /// `DDPStrategy` on HPUs, as `hpu_parallel`.
    HPUParallelStrategy(DdpConfig),
    /// Shards optimizer states and more among ranks, with DeepSpeed's settings.
    DeepSpeedStrategy(Box<DeepSpeedStrategy>),
    /// `DeepSpeedStrategy` on HPUs.
    HPUDeepSpeedStrategy(Box<DeepSpeedStrategy>),
    /// Divides layers among ranks, and averages gradients over those that have the same slices.
    ModelParallelStrategy(ModelParallelStrategy),
    /// One process, as `single_device`.
    SingleDeviceStrategy(SingleDeviceConfig),
    /// One process on an HPU, as `hpu_single`.
    SingleHPUStrategy(SingleDeviceConfig),
}

/// Settings of training in one process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = refused_by_all()))]
pub struct SingleDeviceConfig {
    /// The device, which must be the one that `trainer.accelerator` and `trainer.devices` mean: `hpu`, `cuda:0`. That one unless
    /// set.
    pub device: Option<String>,
}

/// Arguments of Lightning's strategies that are the trainer's own here, with what to do instead.
fn refused_by_all() -> Value {
    json!({
        "accelerator": refused("the trainer has one accelerator", "set trainer.accelerator"),
        "checkpoint_io": refused("the trainer stores checkpoints", "name a class in trainer.plugins"),
        "precision_plugin": refused(
            "the trainer has one precision",
            "set trainer.precision, or name a class in trainer.plugins",
        ),
    })
}

fn refused(what: &str, remedy: &str) -> Value {
    json!({"what": what, "remedy": remedy})
}

/// The same of its strategies for several ranks.
fn refused_by_ddp() -> Value {
    let mut all = refused_by_all();
    all["parallel_devices"] =
        refused("the trainer counts its devices", "set trainer.devices to their number");
    all["cluster_environment"] = refused("the launcher is known by the variables that it sets", "remove it");
    all["ddp_comm_hook"] =
        refused("a function of Python", "set gradient_compression=bf16 for bf16_compress_hook");
    for key in ["ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"] {
        all[key] = refused("goes with ddp_comm_hook, a function of Python", "remove it");
    }
    all["timeout"] = refused("is given in seconds here", "set timeout_secs");
    all["start_method"] = refused("ranks are started in one way, by running the program again", "remove it");
    all["gradient_as_bucket_view"] = refused("where gradients lie is not for choice", "remove it");
    all
}

/// A size of the mesh: a number, or `auto`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum MeshSize {
    /// So many ranks.
    Ranks(u64),
    /// `auto`.
    Text(String),
}

impl Default for MeshSize {
    fn default() -> Self {
        Self::Text("auto".to_owned())
    }
}

/// Settings of training with layers divided among ranks, with the names of Lightning's `ModelParallelStrategy`. The module says how it is
/// divided ([`Module::parallel_plan`](crate::nn::Module::parallel_plan)), or DeepSpeed's rules for names do.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = refused_by_all()))]
pub struct ModelParallelStrategy {
    /// Ranks with other batches: a number, or `auto` for the number of nodes.
    pub data_parallel_size: MeshSize,
    /// Ranks with slices of the same layers: a number, or `auto` for the devices of a node.
    pub tensor_parallel_size: MeshSize,
    /// Seconds that ranks wait for each other, at the start and in each operation.
    #[default(crate::distributed::DEFAULT_TIMEOUT.as_secs_f64())]
    pub timeout_secs: f64,
    /// Library of the collectives, which must be the accelerator's. That one unless set.
    pub process_group_backend: Option<String>,
    /// What may differ between ranks; as in [`DdpConfig`].
    pub allow_differences: Vec<String>,
}

impl ModelParallelStrategy {
    /// Layers divided among so many ranks; the others are replicas.
    pub fn tensor_parallel_size(ranks: u64) -> Self {
        Self { tensor_parallel_size: MeshSize::Ranks(ranks), ..Self::default() }
    }

    /// For so many ranks, of which so many are on a node.
    fn resolve(&self, num_ranks: usize, num_devices: usize) -> Result<StrategyPlan, ConfigError> {
        let size = |key: &str, size: &MeshSize| match size {
            MeshSize::Ranks(ranks) if *ranks > 0 => Ok(usize::try_from(*ranks).ok()),
            MeshSize::Text(text) if text == "auto" => Ok(None),
            MeshSize::Ranks(ranks) => refuse(format!("{key} is {ranks}"), "use a number from 1 on, or auto"),
            MeshSize::Text(text) => refuse(format!("{key} is `{text}`"), "use a number from 1 on, or auto"),
        };
        let dp = size("data_parallel_size", &self.data_parallel_size)?;
        let tp = size("tensor_parallel_size", &self.tensor_parallel_size)?;
        let (dp, tp) = match (dp, tp) {
            (Some(dp), Some(tp)) => (dp, tp),
            (Some(dp), None) => (dp, num_ranks / dp.min(num_ranks)),
            (None, Some(tp)) => (num_ranks / tp.min(num_ranks), tp),
            (None, None) => (num_ranks / num_devices.clamp(1, num_ranks), num_devices),
        };
        if dp.checked_mul(tp) != Some(num_ranks) {
            let what =
                format!("data_parallel_size={dp} x tensor_parallel_size={tp} with {num_ranks} rank(s)");
            return refuse(
                what,
                "use sizes whose product is the number of ranks (trainer.devices x trainer.num_nodes)",
            );
        }
        let config = DdpConfig {
            timeout_secs: self.timeout_secs,
            process_group_backend: self.process_group_backend.clone(),
            allow_differences: self.allow_differences.clone(),
            ..DdpConfig::default()
        };
        match config.resolve("model_parallel")? {
            StrategyPlan::Ddp { name, config, .. } => Ok(StrategyPlan::Ddp { name, config, tp }),
            plan => Ok(plan),
        }
    }
}

/// In which dtype gradients travel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GradientCompression {
    /// Their own.
    #[default]
    None,
    /// bfloat16, in which they are also added (PyTorch's `bf16_compress_hook`).
    Bf16,
}

/// Settings of data-parallel training, with the names of PyTorch's `DistributedDataParallel`.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-refused" = refused_by_ddp()))]
pub struct DdpConfig {
    /// Most MiB of gradients that travel together; the first bucket holds at most 1 MiB, so that it starts early.
    #[default(25)]
    pub bucket_cap_mb: u64,
    /// Some parameters take no part in some losses. Costs a walk through the graph in each step.
    pub find_unused_parameters: bool,
    /// The same parameters take part in every loss, so that one walk through the graph is enough.
    pub static_graph: bool,
    /// Buffers such as running means become rank 0's before each training step.
    #[default(true)]
    pub broadcast_buffers: bool,
    /// In which dtype gradients travel: `none` for their own, or `bf16`.
    pub gradient_compression: GradientCompression,
    /// Seconds that ranks wait for each other, at the start and in each operation.
    #[default(crate::distributed::DEFAULT_TIMEOUT.as_secs_f64())]
    pub timeout_secs: f64,
    /// Library of the collectives, which must be the accelerator's: `gloo` of the cpu, `nccl` of cuda, `hccl` of hpu
    /// (emulated ones have Gloo in its place). That one unless set.
    pub process_group_backend: Option<String>,
    /// What may differ between ranks, by the keys that the error of a difference names; a key stands for those below it, too:
    /// `seed`, `trainer.max_time`, `module.hyper_parameters`.
    pub allow_differences: Vec<String>,
    /// Leaves frozen parameters out of checkpoints.
    pub exclude_frozen_parameters: bool,
}

impl DdpConfig {
    fn resolve(&self, name: &'static str) -> Result<StrategyPlan, ConfigError> {
        if !(1..=MAX_BUCKET_MB).contains(&self.bucket_cap_mb) {
            let what = format!("bucket_cap_mb is {}", self.bucket_cap_mb);
            return refuse(what, "use a number from 1 to 1048576; 25 is the default");
        }
        if !(self.timeout_secs > 0.0 && self.timeout_secs <= MAX_TIMEOUT_SECS) {
            let what = format!("timeout_secs is {}", self.timeout_secs);
            return refuse(what, "use a positive number of seconds, at most a year (31536000)");
        }
        Ok(StrategyPlan::Ddp { name, config: self.clone(), tp: 1 })
    }

    /// [`DdpConfig::timeout_secs`].
    pub fn timeout(&self) -> std::time::Duration {
        std::time::Duration::try_from_secs_f64(self.timeout_secs)
            .unwrap_or(crate::distributed::DEFAULT_TIMEOUT)
    }
}

/// A library of the collectives must be the accelerator's own.
fn check_backend(given: &Option<String>, class: &str, accelerator: &str) -> Result<(), ConfigError> {
    let own = match accelerator {
        "hpu" => "hccl",
        "cuda" => "nccl",
        _ => "gloo",
    };
    match given {
        Some(given) if given != own => refuse(
            format!(
                "{class}.process_group_backend is {given}, but the collectives of {accelerator} are {own}'s"
            ),
            "leave it out",
        ),
        _ => Ok(()),
    }
}

/// The text of Lightning's assertion.
fn check_hpu(name: &str, accelerator: &str) -> Result<(), ConfigError> {
    if accelerator == "hpu" {
        return Ok(());
    }
    let what = format!("HPUDeepSpeedStrategy requires HPUAccelerator: {name} with accelerator={accelerator}");
    let other = name.replace("HPUDeep", "Deep").replace("hpu_deep", "deep");
    refuse(what, format!("set trainer.accelerator=hpu, or use {other}"))
}

impl SingleDeviceConfig {
    fn check(&self, class: &str, accelerator: &str, device: Device) -> Result<(), ConfigError> {
        match &self.device {
            Some(given) if *given != accelerator && *given != device.to_string() => refuse(
                format!("{class}.device is {given}, but the run is on {device}"),
                "set trainer.accelerator, or leave it out",
            ),
            _ => Ok(()),
        }
    }
}

/// What a strategy is once its name is understood.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum StrategyPlan {
    #[default]
    SingleDevice,
    Ddp {
        name: &'static str,
        config: DdpConfig,
        /// Ranks that have slices of the same layers.
        tp: usize,
    },
    DeepSpeed(Box<DeepSpeedPlan>),
    /// Of DeepSpeed's, too.
    Inference(Box<InferencePlan>),
    Zero(Box<ZeroConfig>),
}

const KNOWN: &str = "use auto, single_device, hpu_single, ddp, ddp_find_unused_parameters_true, hpu_ddp, hpu_parallel, zero1, zero2, zero3, \
                     deepspeed or hpu_deepspeed (with _stage_1, _stage_2, _stage_3, _stage_2_offload, _stage_3_offload or \
                     _stage_3_offload_nvme), or a class: DDPStrategy, HPUDDPStrategy, \
                     HPUParallelStrategy, DeepSpeedStrategy, HPUDeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy or \
                     SingleHPUStrategy";

fn refuse<T>(what: String, remedy: impl Into<Cow<'static, str>>) -> Result<T, ConfigError> {
    Err(ConfigError::new("trainer.strategy", what, remedy))
}

impl StrategyConfig {
    /// Whether it is one of DeepSpeed's, by name or class.
    pub(crate) fn is_deepspeed(&self) -> bool {
        match self {
            Self::Name(name) => deepspeed_of_name(&name.to_lowercase()).is_some(),
            Self::Class(class) => {
                matches!(class, StrategyClass::DeepSpeedStrategy(_) | StrategyClass::HPUDeepSpeedStrategy(_))
            }
        }
    }

    /// Whether it may shard the weights, so that a module should be made without memory for all of them.
    pub(crate) fn may_shard_weights(&self) -> bool {
        match self {
            Self::Name(name) => ["zero3", "stage_3"].iter().any(|part| name.to_lowercase().contains(part)),
            Self::Class(class) => {
                self.is_deepspeed() || matches!(class, StrategyClass::ModelParallelStrategy(_))
            }
        }
    }

    /// The strategy for `num_ranks` ranks of an accelerator, whose first device is given.
    pub(crate) fn resolve(
        &self,
        accelerator: &str,
        device: Device,
        num_ranks: usize,
        num_devices: usize,
    ) -> Result<StrategyPlan, ConfigError> {
        use StrategyClass as Class;
        if let Self::Class(Class::HPUDeepSpeedStrategy(_)) = self {
            check_hpu("HPUDeepSpeedStrategy", accelerator)?;
        }
        let deepspeed = |name, given| -> Result<StrategyPlan, ConfigError> {
            match DeepSpeedPlan::resolve(name, given, accelerator, num_devices)? {
                Understood::Training(plan) => {
                    let tp_size = plan.settings.tp_size();
                    if !num_ranks.is_multiple_of(tp_size) {
                        let what = format!(
                            "tensor_parallel.autotp_size is {tp_size}, but there are {num_ranks} rank(s)"
                        );
                        return refuse(what, "use a number of ranks that it divides");
                    }
                    Ok(StrategyPlan::DeepSpeed(plan))
                }
                Understood::Inference(plan) => {
                    check_ranks(&plan.settings.config, num_ranks)?;
                    Ok(StrategyPlan::Inference(plan))
                }
            }
        };
        let (name, plan) = match self {
            Self::Class(Class::DDPStrategy(config)) => ("DDPStrategy", config.resolve("ddp")?),
            Self::Class(Class::HPUDDPStrategy(config)) => ("HPUDDPStrategy", config.resolve("hpu_ddp")?),
            Self::Class(Class::HPUParallelStrategy(config)) => {
                ("HPUParallelStrategy", config.resolve("hpu_parallel")?)
            }
            Self::Class(Class::ModelParallelStrategy(given)) => {
                ("ModelParallelStrategy", given.resolve(num_ranks, num_devices)?)
            }
            Self::Class(Class::SingleDeviceStrategy(_)) => {
                ("SingleDeviceStrategy", StrategyPlan::SingleDevice)
            }
            Self::Class(Class::SingleHPUStrategy(_)) => ("SingleHPUStrategy", StrategyPlan::SingleDevice),
            Self::Class(Class::DeepSpeedStrategy(given)) => {
                ("DeepSpeedStrategy", deepspeed("deepspeed", given)?)
            }
            Self::Class(Class::HPUDeepSpeedStrategy(given)) => {
                ("HPUDeepSpeedStrategy", deepspeed("hpu_deepspeed", given)?)
            }
            Self::Name(name) => match deepspeed_of_name(&name.to_lowercase()) {
                Some((known, given)) => {
                    if known.starts_with("hpu") {
                        check_hpu(name, accelerator)?;
                    }
                    (known, deepspeed(known, &given).map_err(|error| by_name(name, error))?)
                }
                None => (name.as_str(), of_name(name, accelerator, num_ranks)?),
            },
        };
        if plan == StrategyPlan::SingleDevice && num_ranks > 1 {
            let what = format!("`{name}` with {num_ranks} ranks");
            return refuse(what, "use ddp or auto, or trainer.devices=1 and trainer.num_nodes=1");
        }
        let is_of_hpu = name.to_lowercase().starts_with("hpu") || name == "SingleHPUStrategy";
        if is_of_hpu && accelerator != "hpu" {
            let what = format!("{name} needs accelerator=hpu, not {accelerator}");
            let other = if plan == StrategyPlan::SingleDevice { "single_device" } else { "ddp" };
            return refuse(what, format!("use {other}, or trainer.accelerator=hpu"));
        }
        match self {
            Self::Class(Class::SingleDeviceStrategy(config) | Class::SingleHPUStrategy(config)) => {
                config.check(name, accelerator, device)?;
            }
            Self::Class(
                Class::DDPStrategy(config)
                | Class::HPUDDPStrategy(config)
                | Class::HPUParallelStrategy(config),
            ) => check_backend(&config.process_group_backend, name, accelerator)?,
            Self::Class(Class::ModelParallelStrategy(config)) => {
                check_backend(&config.process_group_backend, name, accelerator)?;
            }
            Self::Class(Class::DeepSpeedStrategy(config) | Class::HPUDeepSpeedStrategy(config)) => {
                check_backend(&config.process_group_backend, name, accelerator)?;
            }
            Self::Name(_) => {}
        }
        Ok(plan)
    }
}

/// Replaces the keys of arguments, which the user has not typed, by the strategy's name that stands for them.
fn by_name(name: &str, error: ConfigError) -> ConfigError {
    let stage = name.split("_offload").next().unwrap_or(name);
    let mut problems: Vec<ConfigProblem> = Vec::new();
    for mut problem in error.problems {
        if problem.key.starts_with("trainer.strategy.") {
            let what = format!("`{name}`: {}", problem.problem.what);
            problem = ConfigProblem::new("trainer.strategy", what, format!("use {stage}"));
        }
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
    ConfigError { problems }
}

/// The strategy of a name.
fn of_name(name: &str, accelerator: &str, num_ranks: usize) -> Result<StrategyPlan, ConfigError> {
    let defaults = DdpConfig::default();
    match name.to_lowercase().as_str() {
        "auto" if num_ranks == 1 => Ok(StrategyPlan::SingleDevice),
        "auto" if accelerator == "hpu" => defaults.resolve("hpu_parallel"),
        "auto" | "ddp" | "ddp_find_unused_parameters_false" => defaults.resolve("ddp"),
        "ddp_find_unused_parameters_true" => {
            DdpConfig { find_unused_parameters: true, ..defaults }.resolve("ddp")
        }
        "hpu_ddp" => defaults.resolve("hpu_ddp"),
        "hpu_parallel" => defaults.resolve("hpu_parallel"),
        "single_device" | "hpu_single" => Ok(StrategyPlan::SingleDevice),
        other => match ZeroStage::of_name(other) {
            Some(stage) => Ok(StrategyPlan::Zero(Box::new(ZeroConfig::of_stage(stage)))),
            None => refuse(format!("`{name}` is not a strategy"), KNOWN),
        },
    }
}

/// [`DeepSpeedStrategy`] for HPUs only.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HpuDeepSpeedStrategy(pub DeepSpeedStrategy);

conversions! { StrategyConfig:
    &str => |name| Self::Name(name.to_owned()),
    String => |name| Self::Name(name),
    StrategyClass => |class| Self::Class(class),
    DeepSpeedStrategy => |config| Self::Class(StrategyClass::DeepSpeedStrategy(Box::new(config))),
    HpuDeepSpeedStrategy => |HpuDeepSpeedStrategy(config)| Self::Class(StrategyClass::HPUDeepSpeedStrategy(Box::new(config))),
    ModelParallelStrategy => |config| Self::Class(StrategyClass::ModelParallelStrategy(config)),
    DdpConfig => |config| Self::Class(StrategyClass::DDPStrategy(config)),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ranks_choose_a_strategy() {
        let name = |name: &str, accelerator, ranks| match StrategyConfig::from(name).resolve(
            accelerator,
            Device::Cpu,
            ranks,
            ranks,
        ) {
            Ok(StrategyPlan::SingleDevice) => "single".to_owned(),
            Ok(StrategyPlan::Ddp { name, .. }) => name.to_owned(),
            Ok(StrategyPlan::DeepSpeed(plan)) => format!("{} {}", plan.name, plan.settings.zero.stage),
            Ok(StrategyPlan::Inference(plan)) => format!("{} by {}", plan.name, plan.settings.key),
            Ok(StrategyPlan::Zero(config)) => config.stage.name().to_owned(),
            Err(error) => error.to_string(),
        };
        for (given, accelerator, ranks, expected) in [
            ("auto", "cpu", 1, "single"),
            ("auto", "cpu", 2, "ddp"),
            ("auto", "hpu", 8, "hpu_parallel"),
            ("ddp", "cpu", 1, "ddp"),
            ("DDP", "cpu", 2, "ddp"),
            ("hpu_single", "hpu", 1, "single"),
            ("hpu_ddp", "hpu", 2, "hpu_ddp"),
            ("hpu_parallel", "cpu", 2, "needs accelerator=hpu"),
            ("single_device", "cpu", 2, "with 2 ranks"),
            ("deepspeed", "cpu", 2, "deepspeed 2"),
            ("deepspeed_stage_3", "cuda", 2, "deepspeed_stage_3 3"),
            ("HPU_DeepSpeed_stage_1", "hpu", 8, "hpu_deepspeed_stage_1 1"),
            ("hpu_deepspeed", "cpu", 8, "HPUDeepSpeedStrategy requires HPUAccelerator"),
            ("deepspeed_stage_2_offload", "cpu", 8, "deepspeed_stage_2_offload 2"),
            ("zero1", "cpu", 1, "zero1"),
            ("zero2", "cpu", 2, "zero2"),
            ("fsdp", "cpu", 2, "`fsdp` is not a strategy"),
        ] {
            let found = name(given, accelerator, ranks);
            assert!(found.contains(expected), "{given} on {ranks} {accelerator}: {found}");
        }
    }
}
