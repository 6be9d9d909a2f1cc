//! The optimizers and schedules of a fit: the module's own, or those given to the trainer in their place.

use crate::error::{ConfigError, Result};
use crate::module::LightningModule;
use crate::optim::{ActiveLrScheduler, Optimizers};
use crate::trainer::plan::manual;
use crate::trainer::session::guard::guarded;
use crate::trainer::session::session::Session;

/// Gives a session its optimizers and schedules: those that the trainer was given, else the module's.
pub(crate) fn configure_optimizers<M: LightningModule>(session: &mut Session<M>) -> Result<()> {
    let configured: Optimizers = match session.options.optimizers.clone() {
        Some(given) => given.into(),
        None => {
            let _action = session.profile_hook("configure_optimizers")?;
            let configured = guarded(|| session.module.configure_optimizers());
            configured.map_err(|source| session.hook_error("configure_optimizers", source))?
        }
    };
    let configured = match session.plan.ranks.strategy.deepspeed() {
        Some(deepspeed) => deepspeed.optimizers(configured)?,
        None => configured,
    };
    let configured = match session.options.lr {
        Some(lr) => configured.with_lr(lr),
        None => configured,
    };
    for (index, built) in
        session.run.engine.strategy.optimizers(configured, session.module)?.into_iter().enumerate()
    {
        session.training.optimizers.push(built.optimizer);
        session
            .training
            .schedulers
            .extend(built.scheduler.map(|configured| ActiveLrScheduler { optimizer: index, configured }));
    }
    if session.options.is_trial {
        session.training.schedulers.clear();
    }
    if !session.module.automatic_optimization() {
        return Ok(manual::check_plan(session.plan)?);
    }
    match session.training.optimizers.len() {
        0 => tracing::warn!("configure_optimizers gave no optimizer, so nothing is trained"),
        1 => {}
        several => {
            let what = format!("{several} optimizers with automatic optimization");
            let remedy =
                "return exactly one, with several groups if need be, or false from automatic_optimization";
            return Err(ConfigError::new("configure_optimizers", what, remedy).into());
        }
    }
    Ok(())
}
