//! What manual optimization leaves to the module.

use crate::error::{ConfigError, ConfigProblem};
use crate::trainer::config::graph::GraphMode;
use crate::trainer::plan::train_plan::TrainPlan;

/// Keys that ask the trainer for what a module with manual optimization does itself.
pub(crate) fn check_plan(plan: &TrainPlan) -> Result<(), ConfigError> {
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
    if plan.graph == GraphMode::Step {
        let what = "step with manual optimization, where training_step runs backward and optimizers itself";
        let remedy = "set trainer.graph=modules or off, or capture parts of the step by hand (HpuGraph)";
        refuse("graph", what.to_owned(), remedy);
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
}
