//! The `strategy` key.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::ConfigError;

/// A TiB; a larger bucket is one for all gradients.
const MAX_BUCKET_MB: u64 = 1 << 20;
const MAX_TIMEOUT_SECS: f64 = 365.0 * 86_400.0;

/// A strategy by name, or by class with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum StrategyConfig {
    /// `auto`, `single_device`, `hpu_single`, `ddp`, `ddp_find_unused_parameters_true`, `hpu_ddp` or `hpu_parallel`.
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DdpConfig {
    /// Most MiB of gradients that travel together; the first bucket holds at most 1 MiB, so that it starts early.
    pub bucket_cap_mb: u64,
    /// Some parameters take no part in some losses. Costs a walk through the graph in each step.
    pub find_unused_parameters: bool,
    /// The same parameters take part in every loss, so that one walk through the graph is enough.
    pub static_graph: bool,
    /// Buffers such as running means become rank 0's before each training step.
    pub broadcast_buffers: bool,
    /// In which dtype gradients travel: `none` for their own, or `bf16`.
    pub gradient_compression: GradientCompression,
    /// Seconds that ranks wait for each other, at the start and in each operation.
    pub timeout_secs: f64,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25,
            find_unused_parameters: false,
            static_graph: false,
            broadcast_buffers: true,
            gradient_compression: GradientCompression::None,
            timeout_secs: crate::distributed::DEFAULT_TIMEOUT.as_secs_f64(),
        }
    }
}

impl DdpConfig {
    /// [`DdpConfig::timeout_secs`].
    pub fn timeout(&self) -> std::time::Duration {
        std::time::Duration::try_from_secs_f64(self.timeout_secs)
            .unwrap_or(crate::distributed::DEFAULT_TIMEOUT)
    }
}

/// What a strategy is once its name is understood.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum StrategyPlan {
    SingleDevice,
    Ddp { name: &'static str, config: DdpConfig },
}

impl StrategyConfig {
    /// The strategy for `num_ranks` ranks of an accelerator.
    pub(crate) fn resolve(&self, accelerator: &str, num_ranks: usize) -> Result<StrategyPlan, ConfigError> {
        let refuse = |what: String, remedy: &str| Err(ConfigError::new("trainer.strategy", what, remedy));
        let ddp = |name, config: &DdpConfig| {
            if !(1..=MAX_BUCKET_MB).contains(&config.bucket_cap_mb) {
                let what = format!("bucket_cap_mb is {}", config.bucket_cap_mb);
                return refuse(what, "use a number from 1 to 1048576; 25 is the default");
            }
            if !(config.timeout_secs > 0.0 && config.timeout_secs <= MAX_TIMEOUT_SECS) {
                let what = format!("timeout_secs is {}", config.timeout_secs);
                return refuse(what, "use a positive number of seconds, at most a year (31536000)");
            }
            Ok(StrategyPlan::Ddp { name, config: config.clone() })
        };
        let (name, plan) = match self {
            Self::Class(StrategyClass::DDPStrategy(config)) => ("DDPStrategy", ddp("ddp", config)?),
            Self::Class(StrategyClass::HPUDDPStrategy(config)) => ("HPUDDPStrategy", ddp("hpu_ddp", config)?),
            Self::Class(StrategyClass::HPUParallelStrategy(config)) => {
                ("HPUParallelStrategy", ddp("hpu_parallel", config)?)
            }
            Self::Name(name) => {
                let defaults = DdpConfig::default();
                let unused = DdpConfig { find_unused_parameters: true, ..DdpConfig::default() };
                let plan = match name.to_lowercase().as_str() {
                    "auto" if num_ranks == 1 => StrategyPlan::SingleDevice,
                    "auto" if accelerator == "hpu" => ddp("hpu_parallel", &defaults)?,
                    "auto" | "ddp" | "ddp_find_unused_parameters_false" => ddp("ddp", &defaults)?,
                    "ddp_find_unused_parameters_true" => ddp("ddp", &unused)?,
                    "hpu_ddp" => ddp("hpu_ddp", &defaults)?,
                    "hpu_parallel" => ddp("hpu_parallel", &defaults)?,
                    "single_device" | "hpu_single" if num_ranks > 1 => {
                        let what = format!("`{name}` with {num_ranks} ranks");
                        return refuse(what, "use ddp or auto, or trainer.devices=1 and trainer.num_nodes=1");
                    }
                    "single_device" | "hpu_single" => StrategyPlan::SingleDevice,
                    _ => {
                        return refuse(
                            format!("there is no strategy `{name}`"),
                            "use auto, single_device, hpu_single, ddp, ddp_find_unused_parameters_true, hpu_ddp or \
                             hpu_parallel",
                        );
                    }
                };
                (name.as_str(), plan)
            }
        };
        if name.to_lowercase().starts_with("hpu") && accelerator != "hpu" {
            return refuse(
                format!("{name} needs accelerator=hpu, not {accelerator}"),
                "use ddp, or trainer.accelerator=hpu",
            );
        }
        Ok(plan)
    }
}

impl From<&str> for StrategyConfig {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl From<String> for StrategyConfig {
    fn from(name: String) -> Self {
        Self::Name(name)
    }
}

impl From<StrategyClass> for StrategyConfig {
    fn from(class: StrategyClass) -> Self {
        Self::Class(class)
    }
}

impl From<DdpConfig> for StrategyConfig {
    fn from(config: DdpConfig) -> Self {
        Self::Class(StrategyClass::DDPStrategy(config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ranks_choose_a_strategy() {
        let name =
            |name: &str, accelerator, ranks| match StrategyConfig::from(name).resolve(accelerator, ranks) {
                Ok(StrategyPlan::SingleDevice) => "single".to_owned(),
                Ok(StrategyPlan::Ddp { name, .. }) => name.to_owned(),
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
            ("fsdp", "cpu", 2, "there is no strategy `fsdp`"),
        ] {
            let found = name(given, accelerator, ranks);
            assert!(found.contains(expected), "{given} on {ranks} {accelerator}: {found}");
        }
    }
}
