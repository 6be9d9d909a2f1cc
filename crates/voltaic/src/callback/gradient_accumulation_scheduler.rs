//! Changes how many batches make an optimizer step, by epoch.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{ConfigError, ConfigProblem};
use crate::lightning::Callback;
use crate::module::HookContext;
use crate::nn::Module;

/// From which epoch on how many batches are accumulated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GradientAccumulationSchedulerConfig {
    /// Batches per optimizer step by the epoch, from 0, from which on they hold: `{4: 2, 8: 4}`. 1 before the first.
    pub scheduling: BTreeMap<String, u64>,
}

/// Sets `accumulate_grad_batches` by epoch. Source: Lightning's `GradientAccumulationScheduler`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientAccumulationScheduler {
    scheduling: BTreeMap<u64, u64>,
}

impl GradientAccumulationScheduler {
    /// From pairs of an epoch and the batches from it on.
    ///
    /// # Errors
    /// [`ConfigError`] if there is no pair, or one has 0 batches.
    pub fn new(scheduling: impl IntoIterator<Item = (u64, u64)>) -> Result<Self, ConfigError> {
        let scheduling =
            scheduling.into_iter().map(|(epoch, batches)| (epoch.to_string(), batches)).collect();
        Self::from_config(GradientAccumulationSchedulerConfig { scheduling })
    }

    /// From its configuration.
    ///
    /// # Errors
    /// [`ConfigError`] with all invalid pairs.
    pub fn from_config(config: GradientAccumulationSchedulerConfig) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        let mut refuse = |what: String| {
            let remedy = "write {epoch: batches}, such as {4: 2}, with epochs from 0 and batches from 1";
            problems.push(ConfigProblem::new("GradientAccumulationScheduler.scheduling", what, remedy));
        };
        if config.scheduling.is_empty() {
            refuse("it is empty".to_owned());
        }
        let mut scheduling = BTreeMap::new();
        for (epoch, batches) in config.scheduling {
            match epoch.parse::<u64>() {
                Ok(epoch) if batches > 0 => drop(scheduling.insert(epoch, batches)),
                _ => refuse(format!("{epoch}: {batches}")),
            }
        }
        if problems.is_empty() { Ok(Self { scheduling }) } else { Err(ConfigError { problems }) }
    }

    /// Batches per optimizer step in an epoch.
    pub fn accumulate_grad_batches(&self, epoch: u64) -> u64 {
        self.scheduling.range(..=epoch).next_back().map_or(1, |(_, batches)| *batches)
    }
}

impl Callback for GradientAccumulationScheduler {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        anyhow::ensure!(
            ctx.facts().automatic_optimization,
            "GradientAccumulationScheduler with manual optimization; step every so many batches in training_step"
        );
        let given = ctx.facts().accumulate_grad_batches;
        anyhow::ensure!(
            given == 1,
            "trainer.accumulate_grad_batches={given} beside GradientAccumulationScheduler; remove one of the two"
        );
        Ok(())
    }

    fn on_train_epoch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        ctx.set_accumulate_grad_batches(self.accumulate_grad_batches(ctx.current_epoch()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_entry_that_has_begun_holds() {
        let schedule = GradientAccumulationScheduler::new([(4, 2), (8, 4)]).unwrap();
        let batches: Vec<u64> =
            [0, 3, 4, 7, 8, 99].map(|epoch| schedule.accumulate_grad_batches(epoch)).to_vec();
        assert_eq!(batches, [1, 1, 2, 2, 4, 4]);
        for wrong in [vec![], vec![(0, 0)]] {
            assert!(GradientAccumulationScheduler::new(wrong).is_err());
        }
    }
}
