//! Ranks and devices of the configuration.

use crate::accelerator::{Accelerator, Devices};
use crate::device::Device;
use crate::distributed::{Placement, Variables, Wanted};
use crate::error::{ConfigError, ConfigProblem, DeviceError};
use crate::strategy::StrategyPlan;
use crate::trainer::config::TrainerConfig;
use crate::trainer::plan::problems::Problems;

/// More are a slip of the pen.
const MAX_NODES: u64 = 1 << 16;

/// Ranks of the configuration.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RankPlan {
    /// Devices of this node, one per rank; fewer than ranks if the launcher decides how many there are.
    pub devices: Vec<Device>,
    pub devices_is_auto: bool,
    pub num_nodes: usize,
    pub strategy: StrategyPlan,
    pub use_distributed_sampler: bool,
    pub sync_batchnorm: bool,
}

impl RankPlan {
    /// Checks what the configuration says of ranks.
    pub(crate) fn resolve(
        config: &TrainerConfig,
        accelerator: Result<&dyn Accelerator, &DeviceError>,
        problems: &mut Problems,
    ) -> Self {
        let devices = match accelerator {
            Ok(accelerator) => resolve_devices(config, accelerator, problems),
            Err(error) => {
                problems.accelerator(error);
                vec![Device::Cpu]
            }
        };
        let devices_is_auto = config.devices == Devices::from("auto");
        if let Ok(accelerator) = accelerator
            && let Some(note) = accelerator.auto_devices().filter(|_| devices_is_auto)
            && !Variables::of_process().is_rank_of_launcher()
        {
            tracing::info!("devices=auto: {note}");
        }
        let num_ranks = expected_ranks(config, devices.len(), devices_is_auto);
        let strategy = match accelerator
            .map(|it| config.strategy.resolve(it.name(), devices[0], num_ranks, devices.len()))
        {
            Ok(Ok(strategy)) => strategy,
            Ok(Err(error)) => {
                problems.0.extend(error.problems);
                StrategyPlan::default()
            }
            Err(_) => StrategyPlan::default(), // reported above
        };
        if !(1..=MAX_NODES).contains(&config.num_nodes) {
            let what = format!("{} nodes", config.num_nodes);
            problems.add("num_nodes", what, format!("use 1 or more, at most {MAX_NODES}"));
        }
        Self {
            devices,
            devices_is_auto,
            num_nodes: config.num_nodes.clamp(1, MAX_NODES) as usize,
            strategy,
            use_distributed_sampler: config.use_distributed_sampler,
            sync_batchnorm: config.sync_batchnorm,
        }
    }

    /// What this process is to the run.
    pub(crate) fn place(&self, variables: &Variables, restarts: bool) -> Result<Placement, ConfigError> {
        let wanted = Wanted {
            devices: self.devices.len(),
            is_auto: self.devices_is_auto,
            num_nodes: self.num_nodes,
            is_distributed: self.strategy.is_distributed(),
            restarts,
        };
        Placement::find(variables, wanted)
    }

    /// The device of a rank of this node.
    pub(crate) fn device_of(&self, local_rank: usize) -> Result<Device, ConfigError> {
        let device = match self.devices[0] {
            Device::Cpu => Some(Device::Cpu),
            _ => self.devices.get(local_rank).copied(),
        };
        device.ok_or_else(|| {
            let what = format!("{} for local rank {local_rank}", self.devices.len());
            let remedy = "set trainer.devices to the number of ranks per node";
            ConfigError::new("trainer.devices", what, remedy)
        })
    }
}

/// The devices of this node, one for each rank.
fn resolve_devices(
    config: &TrainerConfig,
    accelerator: &dyn Accelerator,
    problems: &mut Problems,
) -> Vec<Device> {
    match accelerator.parse_devices(&config.devices) {
        Ok(indices) if indices.is_empty() => {
            let what = format!("{} gives no device for it", accelerator.name());
            problems.add("devices", what, "let Accelerator::parse_devices give one or more, or an error");
            vec![accelerator.device(0)]
        }
        Ok(indices) => indices.into_iter().map(|index| accelerator.device(index)).collect(),
        Err(problem) => {
            problems.0.push(ConfigProblem::at("trainer.devices", problem));
            vec![accelerator.device(0)]
        }
    }
}

/// The number of ranks that the configuration gives; with `devices=auto` those that a launcher has started.
fn expected_ranks(config: &TrainerConfig, devices: usize, is_auto: bool) -> usize {
    let configured = devices * config.num_nodes.clamp(1, MAX_NODES) as usize;
    let launched = Variables::of_process().launched_ranks().filter(|_| is_auto);
    launched.map_or(configured, |launched| launched.max(configured))
}
