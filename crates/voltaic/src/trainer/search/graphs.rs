//! Shows the graphs of a compiled training step, captured in a short run.

use crate::data::{DataModule, Stage};
use crate::error::{ConfigError, Result};
use crate::graph::{ShownGraph, shown};
use crate::module::LightningModule;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::graph::GraphMode;
use crate::trainer::config::values::{FastDevRun, Limit};
use crate::trainer::search::trial::Searcher;

/// Updates until each kind of step and the update after it were captured twice: three run as usual, then two captures of a step, two of the
/// update, and as many again for the steps of a window that add to gradients.
const STEPS: u64 = 9;

impl Searcher<'_> {
    /// See [`Trainer::show_graphs`](crate::trainer::Trainer::show_graphs).
    pub(crate) fn show_graphs<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<Vec<ShownGraph>> {
        let window = self.config.accumulate_grad_batches;
        let compile = self.config.compile.unwrap_or_default();
        let compiled = |config: &mut TrainerConfig| {
            (config.graph, config.compile) = (GraphMode::Off, Some(compile));
            config.fast_dev_run = FastDevRun::Flag(false);
            config.accumulate_grad_batches = window;
            config.overfit_batches = Limit::Batches(window); // the same ones in each step
        };
        let mut trial = self.trial("graph show", STEPS, &compiled, None)?;
        let (result, graphs) = shown(|| trial.run(module, data, Stage::Fit));
        let refusal = trial.run.graphs.refusal.clone();
        trial.restore(module)?;
        result?;
        if graphs.is_empty() {
            let what = refusal.unwrap_or_else(|| "no step of the same shape came often enough".to_owned());
            let remedy = "a step that cannot be compiled has no graph: docs/graphs.md lists what can";
            return Err(ConfigError::new("graph show", what, remedy).into());
        }
        Ok(graphs)
    }
}
