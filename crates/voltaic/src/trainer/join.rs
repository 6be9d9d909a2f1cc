//! Finds out which rank this process is, and joins the others.

use crate::accelerator::Accelerator;
use crate::device::Device;
use crate::distributed::{self, Facts, JoinOptions, Placement, Variables, World};
use crate::error::Result;
use crate::strategy::{BuildStrategy, Strategy, StrategyConfig};
use crate::trainer::config::TrainerConfig;
use crate::trainer::plan::train_plan::TrainPlan;

/// Finds out which rank this process is and joins the others. If no launcher has started the ranks of this node, this call
/// does, and ends the process with them. Gives the device of this rank, too. The ranks must all bring the same `facts`.
pub(crate) fn join(
    config: &TrainerConfig,
    plan: &TrainPlan,
    accelerator: &dyn Accelerator,
    given: Option<Box<dyn BuildStrategy>>,
    facts: Facts,
) -> Result<(Box<dyn Strategy>, Device)> {
    let (world, device) = meet(config, plan, accelerator, given.as_deref(), facts)?;
    let strategy = match given {
        Some(given) => {
            accelerator.setup()?; // which its devices may need
            given.build(world)?
        }
        None => {
            let strategy = plan.ranks.strategy.clone();
            let dims = strategy.dims(world.world_size);
            strategy.build(world.with_dims(dims)?)?
        }
    };
    let world = strategy.world();
    if let Some(timeout) = strategy.timeout() {
        world.set_timeout(timeout)?;
    }
    if let Some(group) = world.group().filter(|_| world.is_global_zero() && world.world_size > 1) {
        let (name, nodes) = (strategy.name(), plan.ranks.num_nodes);
        tracing::info!("{name}: {} ranks on {nodes} node(s), over {}", world.world_size, group.backend());
    }
    Ok((strategy, device))
}

/// The ranks, which have met, and the device of this one.
fn meet(
    config: &TrainerConfig,
    plan: &TrainPlan,
    accelerator: &dyn Accelerator,
    given: Option<&dyn BuildStrategy>,
    facts: Facts,
) -> Result<(World, Device)> {
    let variables = Variables::of_process();
    let restarts = config.max_restarts > 0;
    let strategy = &plan.ranks.strategy;
    if !strategy.is_distributed() {
        if config.strategy == StrategyConfig::from("auto") {
            variables.check_alone()?;
        }
        // a rank may have a trainer for itself, which its launcher does not look after
        if !restarts || variables.is_rank_of_launcher() {
            return Ok((World::default(), plan.device));
        }
    }
    let placement = match plan.ranks.place(&variables, restarts)? {
        Placement::Single => return Ok((World::default(), plan.device)),
        Placement::Launcher(launch) => {
            let folder = plan.default_root_dir.join("rank_logs");
            let code = distributed::launch(&launch, config.max_restarts, &folder)?;
            std::process::exit(code.into());
        }
        Placement::Rank(placement) => placement,
    };
    if !strategy.is_distributed() {
        return Ok((World::supervised(&placement, distributed::DEFAULT_TIMEOUT)?, plan.device));
    }
    let device = plan.ranks.device_of(placement.local_rank)?;
    distributed::write_records_below(&plan.default_root_dir);
    accelerator.setup()?; // decides the back end
    let timeout = given.map_or_else(|| strategy.timeout(), BuildStrategy::timeout);
    let allowed = match given {
        Some(given) => [given.allowed_differences(), strategy.allowed_differences()].concat(),
        None => strategy.allowed_differences(),
    };
    Ok((World::join_alike(&placement, JoinOptions { device, timeout }, facts, &allowed)?, device))
}
