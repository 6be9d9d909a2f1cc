//! Finds out which rank this process is, and joins the others.

use crate::accelerator::Accelerator;
use crate::device::Device;
use crate::distributed::{self, Placement, Variables, World};
use crate::error::Result;
use crate::strategy::{Ddp, SingleDevice, Strategy, StrategyConfig, StrategyPlan};
use crate::trainer::config::TrainerConfig;
use crate::trainer::plan::train_plan::TrainPlan;

/// Finds out which rank this process is and joins the others. If nobody has started the ranks of this node, this call
/// does, and ends the process with them. Gives the device of this rank, too.
pub(crate) fn join(
    config: &TrainerConfig,
    plan: &TrainPlan,
    accelerator: &dyn Accelerator,
) -> Result<(Box<dyn Strategy>, Device)> {
    let variables = Variables::of_process();
    let restarts = config.max_restarts > 0;
    let strategy = plan.ranks.strategy.clone();
    if strategy == StrategyPlan::SingleDevice {
        if config.strategy == StrategyConfig::from("auto") {
            variables.check_alone()?;
        }
        // a rank may have a trainer for itself, which its launcher does not look after
        if !restarts || variables.is_rank_of_launcher() {
            return Ok((Box::new(SingleDevice::default()), plan.device));
        }
    }
    let placement = match plan.ranks.place(&variables, restarts)? {
        Placement::Single => return Ok((Box::new(SingleDevice::default()), plan.device)),
        Placement::Launcher(launch) => {
            let folder = plan.default_root_dir.join("rank_logs");
            let code = distributed::launch(&launch, config.max_restarts, &folder)?;
            std::process::exit(code.into());
        }
        Placement::Rank(placement) => placement,
    };
    let StrategyPlan::Ddp { name, config: ddp } = strategy else {
        let world = World::supervised(&placement, distributed::DEFAULT_TIMEOUT)?;
        return Ok((Box::new(SingleDevice::of(world)), plan.device));
    };
    let device = plan.ranks.device_of(placement.local_rank)?;
    accelerator.setup()?; // decides the back end
    let world = World::join(&placement, device, ddp.timeout())?;
    if let Some(group) = world.group().filter(|_| world.is_global_zero() && world.world_size > 1) {
        let nodes = plan.ranks.num_nodes;
        tracing::info!("{name}: {} ranks on {nodes} node(s), over {}", world.world_size, group.backend());
    }
    Ok((Box::new(Ddp::new(name, world, ddp)), device))
}
